"""What the page says in words: the head's figures, the notes, the tables of facts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from tradewind.report.curves import Curve
from tradewind.track import ENDED_WITHOUT_CLOSING, RunRecord

_MAX_STEPS_NAMED = 6


@dataclass(frozen=True)
class Tile:
    """One figure of the page's head; `is_alarm` colours it."""

    label: str
    value: str
    is_alarm: bool = False


def tiles(
    record: RunRecord, curves: Mapping[str, Curve], vetoed: Sequence[int], last_time: float | None
) -> list[Tile]:
    """The head's figures, those that the run has."""
    last_steps = [int(curve.steps[-1]) for curve in curves.values() if len(curve.steps)]
    found = [
        Tile("steps", f"{max(last_steps):,}" if last_steps else "none yet"),
        Tile("duration", _duration(record, last_time)),
    ]
    loss = curves.get("loss")
    if loss is not None and loss.last is not None:
        found.append(Tile("final loss", number_text(loss.last), not math.isfinite(loss.last)))
        if loss.finite.size:
            found.append(Tile("lowest loss", number_text(float(loss.finite.min()))))
    rate = curves.get("samples_per_s")
    if rate is not None and rate.finite.size:
        found.append(Tile("samples/s, median", number_text(float(np.median(rate.finite)))))
    waits, steps = curves.get("share_wait_s"), curves.get("step_s")
    if waits is not None and steps is not None and waits.finite.size and steps.finite.size:
        step_s = float(np.median(steps.finite))
        exposed = float(np.median(waits.finite)) / step_s
        found.append(Tile("of a step, waiting for other ranks", f"{exposed:.1%}"))
        clip = curves.get("clip_wait_s")
        if clip is not None and clip.finite.size:
            cost = float(np.median(clip.finite)) / step_s
            found.append(Tile("of a step, for the norm to clip by", f"{cost:.1%}"))
    found += _checkpoint_tiles(curves)
    if "vetoed" in curves:
        found.append(Tile("vetoed updates", f"{len(vetoed):,}", bool(vetoed)))
    if len(record.attempts) > 1:
        found.append(Tile("attempts", str(len(record.attempts))))
    return found


def _checkpoint_tiles(curves: Mapping[str, Curve]) -> list[Tile]:
    """How many saves there were, what one cost and how long it took."""
    found = []
    stalls, durables = curves.get("checkpoint_stall_s"), curves.get("checkpoint_durable_s")
    if stalls is not None and stalls.finite.size:
        found.append(Tile("checkpoints", f"{stalls.finite.size:,}"))
        stall_ms = 1e3 * float(np.median(stalls.finite))
        found.append(Tile("stall of a checkpoint, median", f"{number_text(stall_ms)} ms"))
    if durables is not None and durables.finite.size:
        durable_s = float(np.median(durables.finite))
        found.append(Tile("until it is durable, median", f"{number_text(durable_s)} s"))
    steps = stalls.steps if stalls is not None else ()
    if len(steps) > 1:
        between = float(np.median(np.diff(np.asarray(steps, dtype=np.float64))))
        found.append(Tile("updates between checkpoints, median", number_text(between)))
    failed = curves.get("checkpoint_failed")
    if failed is not None and len(failed.steps):
        found.append(Tile("failed checkpoints", f"{len(failed.steps):,}", is_alarm=True))
    return found


def notes(record: RunRecord, curves: Mapping[str, Curve], vetoed: Sequence[int]) -> list[str]:
    """What a reader must not miss, as plain sentences."""
    found = []
    if record.status == "running":
        found.append("The run is live: this page shows what it had written when the page was made.")
    if record.status == ENDED_WITHOUT_CLOSING:
        found.append(
            "The run ended without closing: its process was killed or its machine went away. The "
            "last seconds of its metrics may be missing."
        )
    if record.latest.get("error"):
        found.append(f"The last attempt ended with an error: {record.latest['error']}")
    if not curves:
        found.append("No metrics were logged yet, so there is nothing to draw.")
    if vetoed:
        found.append(f"Vetoed updates (weights left as they were): {steps_text(vetoed)}.")
    failed = curves.get("checkpoint_failed")
    if failed is not None and len(failed.steps):
        found.append(
            f"Checkpoints that failed (training went on): {steps_text(list(failed.steps))}; "
            "checkpoint_error of those steps says why."
        )
    for curve in curves.values():
        if curve.non_finite_steps:
            found.append(
                f"{curve.name} was not finite, shown as gaps: {steps_text(curve.non_finite_steps)}."
            )
    return found


def facts(record: RunRecord) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Titles and rows of the tables about the newest attempt."""
    latest = record.latest
    general = {
        "run directory": str(record.path),
        "command": " ".join(latest.get("command") or []),
        "working directory": latest.get("working_directory"),
        "seed": latest.get("seed"),
        **{f"place {name}": value for name, value in _mapping(latest.get("place")).items()},
    }
    yield "Run", _rows(general)
    machine = dict(_mapping(latest.get("machine")))
    if isinstance(machine.get("memory_bytes"), int):
        machine["memory"] = f"{machine.pop('memory_bytes') / 2**30:.1f} GiB"
    yield "Machine", _rows(machine)
    yield "Versions", _rows(_mapping(latest.get("versions")))
    git = latest.get("git")
    yield "Git", _rows(_mapping(git)) if git else [("", "not in a git work tree")]
    yield "Configuration", _rows(_mapping(latest.get("config"))) or [("", "none given")]


def attempts_table(record: RunRecord) -> list[list[str]]:
    """Number, start, end, status and error of each attempt."""
    return [
        [
            str(each.get("attempt", "")),
            _moment(each.get("started")),
            _moment(each.get("ended")),
            record.status if each is record.latest else str(each.get("status", "")),
            str(each.get("error") or ""),
        ]
        for each in record.attempts
    ]


def number_text(value: float) -> str:
    """A number for people: four digits, thousands separated."""
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "infinite")
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def steps_text(steps: Sequence[int]) -> str:
    """Steps in words: "step (5)", "5 steps (5-8, 11)", runs after the sixth left out."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    named = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges]
    head = "step" if len(steps) == 1 else f"{len(steps):,} steps"
    if len(named) > _MAX_STEPS_NAMED:
        named = [*named[:_MAX_STEPS_NAMED], "…"]
    return f"{head} ({', '.join(named)})"


def _duration(record: RunRecord, last_time: float | None) -> str:
    """The attempts' durations together; one that has no end counts to its last row."""
    spans = []
    for each in record.attempts:
        start, end = _timestamp(each.get("started")), _timestamp(each.get("ended"))
        if end is None and each is record.latest and last_time is not None:
            end = last_time
        if start is not None and end is not None:
            spans.append(max(0.0, end - start))
    if not spans:
        return "—"
    seconds = sum(spans)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _moment(value: Any) -> str:
    stamp = _timestamp(value)
    if stamp is None:
        return "—"
    return datetime.fromtimestamp(stamp, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _timestamp(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rows(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found += _rows(value, f"{prefix}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text = "none" if value == [] else text
            found.append((f"{prefix}{name}", text))
    return found
