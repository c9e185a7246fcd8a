"""Faults and what every rank must say of them, as data. `test_faults.py` runs them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

TIMEOUT_S = 2.0
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
FINE = "fine"
LOST = "SharingError"


@dataclass(frozen=True)
class Says:
    """How a rank ends: the type of its error, and patterns that are all in its text."""

    outcome: str
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    name: str
    api: str  # "sharing" (with torch's optimizer) or "engine"
    expected: dict[int, Says]  # by rank; a rank that is not in it does not write how it ended
    fault: dict[str, Any] | None = None
    size: int = 2
    overlap: str = "backward"
    codec: str = "none"
    clip: float | None = None
    accumulate: int = 1
    timeout: float = TIMEOUT_S
    within: float = TIMEOUT_S  # seconds from the fault until the others know
    store: str = "tcp"  # whose server is rank 0, or "file"
    host: str = "127.0.0.1"
    buffers: bool = False
    odd: str = ""  # how the last rank's model differs
    odd_options: dict[str, Any] = field(default_factory=dict)  # and its options
    fork: bool = False
    whole_exit: bool = False  # through all of the interpreter's end, which takes a core long
    caught: bool = False  # the error, outside `with engine`; the process goes on
    pace: float = 0.0  # seconds that each step takes longer
    vetoed_step: int = 0
    steps_differ: bool = False  # by the script's own doing, which must then end in an error

    def request(self, folder: str) -> dict[str, Any]:
        made = asdict(self)
        del made["expected"]
        return {**made, "folder": folder}


# How gradients are shared, with a step at which that way of sharing is in full swing.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "sharing": ({"api": "sharing"}, 2),
    "engine": ({"api": "engine"}, 2),
    "late": ({"api": "engine", "overlap": "next-forward"}, 4),
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"codec": "int8", "size": 3},
    {"clip": 0.5},
    {"codec": "int8", "clip": 0.5},
    {"size": 3},
)


def fault(kind: str, rank: int, phase: str, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "phase": phase, "step": step, **more}


def others(size: int, faulty: int, *patterns: str, outcome: str = LOST) -> dict[int, Says]:
    return {rank: Says(outcome, patterns) for rank in range(size) if rank != faulty}


def fine(size: int) -> dict[int, Says]:
    return {rank: Says(FINE) for rank in range(size)}


def cases_of_every_way() -> list[Case]:
    made: list[Case] = []
    for way, (settings, step) in WAYS.items():
        variants = iter(VARIANTS * 20)

        def add(
            name: str, given: dict[str, Any], expected: Any, way: str = way, **more: Any
        ) -> None:
            settings = WAYS[way][0]
            made.append(
                Case(**{**settings, **more}, name=f"{way}-{name}", expected=expected, fault=given)
            )

        for phase in ("forward", "backward", "between", "step"):
            variant = next(variants)
            size = variant.get("size", 2)
            faulty = size - 1
            add(
                f"killed-in-{phase}",
                fault("kill", faulty, phase, step),
                others(size, faulty, rf"lost rank {faulty}\b"),
                within=1.0,
                **variant,
            )
        for phase in ("forward", "backward"):
            variant = next(variants)
            size = variant.get("size", 2)
            add(
                f"raises-in-{phase}",
                fault("raise", 1, phase, step),
                {
                    **others(size, 1, rf"rank 1\b.*ValueError.*made up in {phase}"),
                    1: Says("ValueError", (f"made up in {phase}",)),
                },
                within=1.0,
                **variant,
            )
        variant = next(variants)
        add(
            "interrupted-in-forward",
            fault("interrupt", 0, "forward", step),
            {
                **others(variant.get("size", 2), 0, r"rank 0\b.*KeyboardInterrupt"),
                0: Says("KeyboardInterrupt"),
            },
            within=1.0,
            **variant,
        )
        for phase in ("between", "forward-begin"):
            variant = next(variants)
            size = variant.get("size", 2)
            add(
                f"exits-{phase}",
                fault("exit", 1, phase, step),
                {
                    **others(size, 1, r"rank 1 .*(its process ended|has left)"),
                    1: Says("SystemExit"),
                },
                within=3.5,
                whole_exit=True,
                **variant,
            )
        variant = next(variants)
        size = variant.get("size", 2)
        add(
            "stopped-in-forward",
            fault("stop", 1, "forward", step, wakes=False),
            others(size, 1, r"rank 1\b", "bucket|what .* says", r"rank 1 said"),
            within=TIMEOUT_S + 1.5,
            **variant,
        )
        variant = next(variants)
        size = variant.get("size", 2)
        add(
            "stopped-and-wakes",
            fault("stop", 1, "backward", step, wakes=True),
            {**others(size, 1, r"rank 1\b", "bucket|what .* says"), 1: Says(LOST, (r"rank \d",))},
            within=TIMEOUT_S + 1.5,
            **variant,
        )
        variant = next(variants)
        size = variant.get("size", 2)
        add(
            "sleeps-too-long",
            fault("sleep", 1, "between" if way == "late" else "loss", step, seconds=5.0),
            {
                **others(size, 1, r"rank 1 did not arrive", r"deadline of 2 s"),
                1: Says(LOST, (r"rank \d",)),
            },
            within=TIMEOUT_S + 1.5,
            **variant,
        )
        variant = next(variants)
        size = variant.get("size", 2)
        add(
            "sleeps-a-little",
            fault("sleep", 1, "loss", step, seconds=1.2),
            fine(size),
            **variant,
        )
        variant = next(variants)
        size = variant.get("size", 2)
        add(
            "nan",
            fault("nan", 1, "", step),
            fine(size),
            vetoed_step=step,
            **variant,
        )
        add(
            "fewer-batches",
            fault("short", 1, "", 0),
            {0: Says(LOST, (r"rank 1 .*(its process ended|has left)",)), 1: Says(FINE)},
            within=3.5,
            whole_exit=True,
        )
        add("forks", {}, fine(2), fork=True, whole_exit=True)
    return made


def single_cases() -> list[Case]:
    made: list[Case] = []
    for way in ("sharing", "engine"):
        for odd, pattern in (
            ("width", r"parameters\[0\]"),
            ("frozen", r"parameters\[1\]"),
            ("buffers", r"parameters\[4\]"),
            ("running", r"buffers: 0 against"),
        ):
            says = Says("ValueError", (r"rank 0 and rank 2 differ", pattern))
            made.append(
                Case(
                    name=f"{way}-other-model-{odd}",
                    api=way,
                    size=3,
                    odd=odd,
                    expected={rank: says for rank in range(3)},
                    within=TIMEOUT_S,
                )
            )
        changes: dict[str, Any] = {"codec": "int8", "bucket": 0.001}
        changes |= {"strategy": "periodic"} if way == "engine" else {}
        changes |= {"overlap": "auto"} if way == "engine" else {"broadcast_buffers": False}
        for option, value in changes.items():
            says = Says("ValueError", (r"rank 0 and rank 1 differ", option, "start all"))
            made.append(
                Case(
                    name=f"{way}-other-{option}",
                    api=way,
                    odd_options={option: value},
                    buffers=True,
                    expected={rank: says for rank in range(2)},
                    within=TIMEOUT_S,
                )
            )
        made += [
            Case(
                name=f"{way}-killed-at-start",
                api=way,
                size=3,
                fault=fault("kill", 2, "start", 0),
                expected=others(3, 2, r"waited 2 s", r"missing: rank 2"),
                within=TIMEOUT_S + 1.5,
            ),
            Case(
                name=f"{way}-first-rank-killed-at-start",
                api=way,
                size=3,
                fault=fault("kill", 0, "start", 0),
                expected=others(3, 0, r"rank 0"),
                within=TIMEOUT_S + 1.5,
            ),
            Case(
                name=f"{way}-sleeps-at-start",
                api=way,
                fault=fault("sleep", 1, "start", 0, seconds=4.0),
                expected={
                    0: Says(LOST, (r"missing: rank 1",)),
                    1: Says(LOST, (r"rank 0",)),
                },
                within=TIMEOUT_S + 1.5,
            ),
            Case(
                name=f"{way}-sleeps-before-buffers",
                api=way,
                buffers=True,
                size=3,
                fault=fault("sleep", 0, "forward-begin", 2, seconds=5.0),
                expected={rank: Says(LOST, (r"rank 0",)) for rank in range(3)},
                within=TIMEOUT_S + 1.5,
            ),
            Case(
                name=f"{way}-killed-before-buffers",
                api=way,
                buffers=True,
                size=3,
                fault=fault("kill", 0, "forward-begin", 2),
                expected=others(3, 0, r"rank 0"),
                within=1.0,
                whole_exit=True,
            ),
            Case(
                name=f"{way}-first-rank-stopped",
                api=way,
                fault=fault("stop", 0, "forward", 2, wakes=False),
                expected=others(2, 0, r"rank 0 did not arrive"),
                within=TIMEOUT_S + 1.5,
            ),
            Case(
                name=f"{way}-first-rank-stopped-store-elsewhere",
                api=way,
                store="file",
                fault=fault("stop", 0, "forward", 2, wakes=True),
                expected={1: Says(LOST, (r"rank 0 did not arrive",)), 0: Says(LOST, ("rank 1",))},
                within=TIMEOUT_S + 1.5,
            ),
            Case(
                name=f"{way}-group-destroyed-before-forward",
                api=way,
                fault=fault("destroy-group", 1, "forward-begin", 2),
                expected={
                    1: Says("ValueError", ("process_group: expected one that is alive",)),
                    0: Says(LOST, (r"rank 1\b.*ValueError.*process_group",)),
                },
                within=1.0,
            ),
            Case(
                name=f"{way}-group-destroyed-between",
                api=way,
                fault=fault("destroy-group", 1, "loss", 2),
                expected={
                    1: Says("ValueError", ("process_group: expected one that is alive",)),
                    0: Says(LOST, (r"rank 1\b.*ValueError.*process_group",)),
                },
                within=1.0,
            ),
        ]
    made += [
        Case(
            name="engine-raises-in-with",
            api="engine",
            caught=True,
            fault=fault("raise", 1, "loss", 2),
            expected={0: Says(LOST, (r"rank 1\b.*ValueError.*made up in loss",)), 1: Says(FINE)},
            within=1.0,
        ),
        Case(
            name="late-raises-in-with",
            api="engine",
            overlap="next-forward",
            caught=True,
            fault=fault("raise", 1, "between", 4),
            expected={0: Says(LOST, (r"rank 1\b.*ValueError.*made up",)), 1: Says(FINE)},
            within=1.0,
        ),
        Case(
            name="engine-skips-a-backward",
            api="engine",
            fault=fault("skip", 1, "", 2),
            expected={
                1: Says("RuntimeError", ("expected a backward before it",)),
                0: Says(LOST, (r"rank 1\b.*expected a backward before it",)),
            },
            within=1.0,
        ),
        Case(
            name="engine-backward-twice",
            api="engine",
            fault=fault("extra", 1, "", 2),
            expected={
                1: Says("RuntimeError", (r"engine\.step\(\) after each engine\.backward",)),
                0: Says(LOST, (r"rank 1\b.*RuntimeError.*microbatches wait",)),
            },
            within=1.0,
        ),
        Case(
            # Without gradients its optimizer changes nothing: it is a round behind from then on,
            # with the weights that the others had, until it leaves and they have one more to go.
            name="sharing-skips-a-backward",
            api="sharing",
            fault=fault("skip", 1, "", 2),
            expected={0: Says(LOST, (r"rank 1 .*(its process ended|has left)",)), 1: Says(FINE)},
            within=3.5,
            whole_exit=True,
            steps_differ=True,
        ),
        Case(
            name="sharing-backward-twice",
            api="sharing",
            fault=fault("extra", 1, "", 2),
            expected={0: Says(LOST, (r"rank 1\b",)), 1: Says(LOST, ("rank",))},
            within=3.5,
            whole_exit=True,
            steps_differ=True,
        ),
        Case(
            name="engine-nan-in-a-microbatch",
            api="engine",
            size=3,
            accumulate=2,
            clip=0.5,
            fault=fault("nan", 2, "", 2),
            expected=fine(3),
            vetoed_step=2,
        ),
    ]
    return made


def all_cases() -> list[Case]:
    return cases_of_every_way() + single_cases()
