"""Whatever happens to one rank, every rank ends by the deadline, says why, and none goes on with
other weights than the rest. The faults are in `fault_cases.py`."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the host's children import these modules by their plain names

import fault_cases  # noqa: E402
from fault_cases import FINE, LOST, Case  # noqa: E402

CASES = {case.name: case for case in fault_cases.all_cases()}
AT_ONCE = 6  # a case waits most of its time
SLACK_S = 2.0  # the machine runs other cases meanwhile
LEAVES_WITHIN_S = 12.0  # from the error to the end of the process: goodbye, and who stays for whom
Outcome = dict[str, Any]


class Host:
    """The process whose forks are the ranks; cases are given to it as soon as there is room."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self._waiting = list(dict.fromkeys(names))
        self._found: dict[str, Outcome] = {}
        self._lines: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_host.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=fault_cases.ENVIRONMENT,
        )
        threading.Thread(target=self._read, daemon=True).start()
        for _ in range(AT_ONCE):
            self._give()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def _give(self) -> None:
        if not self._waiting:
            return
        assert self._process.stdin is not None
        name = self._waiting.pop(0)
        request = CASES[name].request(str(self._folder / name))
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def outcome(self, name: str) -> Outcome:
        while name not in self._found:
            outcome = json.loads(self._lines.get(timeout=120))
            self._found[outcome["name"]] = outcome
            self._give()
        return self._found[name]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.callspec.params.get("name") in CASES
    ]
    host = Host(tmp_path_factory.mktemp("faults"), names)
    yield host
    host.close()


def told_within(case: Case, outcome: Outcome) -> list[str]:
    """Ranks that learnt too late, or long after each other."""
    ranks = outcome["ranks"]
    since = max(
        [rank["fault_at"] for rank in ranks if "fault_at" in rank]
        or [rank.get("began", 0.0) for rank in ranks]
    )
    faulty = (case.fault or {}).get("rank", -1)
    times = {
        r: ranks[r]["told"] - since
        for r, says in case.expected.items()
        if r != faulty and says.outcome != FINE and "told" in ranks[r]
    }
    late = [f"rank {r} knew after {t:.1f} s" for r, t in times.items() if t > case.within + SLACK_S]
    if times and max(times.values()) - min(times.values()) > 2 * SLACK_S:
        late.append(f"ranks knew after {sorted(times.values())} s")
    return late


def differing_digests(case: Case, outcome: Outcome) -> list[str]:
    """Steps after which ranks had other weights than others."""
    if case.steps_differ:
        return []
    digests = [rank["digests"] for rank in outcome["ranks"]]
    steps = sorted({step for of_rank in digests for step in of_rank})
    return [
        f"weights differ after step {step}"
        for step in steps
        if len({of_rank[step] for of_rank in digests if step in of_rank}) > 1
    ]


def wrong_ends(case: Case, outcome: Outcome) -> list[str]:
    wrong = []
    for rank, says in case.expected.items():
        facts = outcome["ranks"][rank]
        found = facts.get("outcome", "nothing")
        if found != says.outcome:
            wrong.append(f"rank {rank} ended with {found} ({facts.get('text')}): {facts['stderr']}")
            continue
        code = 0 if says.outcome in (FINE, "SystemExit") else 1
        if says.outcome == "KeyboardInterrupt":
            code = -2  # the interpreter ends by the signal itself
        if facts["exit"] != code:
            wrong.append(f"rank {rank} left with exit code {facts['exit']}: {facts['stderr']}")
        if facts["ended"] - facts["told"] > LEAVES_WITHIN_S:
            wrong.append(f"rank {rank} took {facts['ended'] - facts['told']:.1f} s to leave")
    return wrong


@pytest.mark.parametrize("name", list(CASES))
def test_every_rank_ends_in_time_and_none_with_other_weights(host: Host, name: str) -> None:
    case, outcome = CASES[name], host.outcome(name)
    complaints = (
        wrong_ends(case, outcome) + told_within(case, outcome) + differing_digests(case, outcome)
    )
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", list(CASES))
def test_every_rank_says_why(host: Host, name: str) -> None:
    case, outcome = CASES[name], host.outcome(name)
    for rank, says in case.expected.items():
        facts = outcome["ranks"][rank]
        assert facts["outcome"] == says.outcome, facts["text"]
        for pattern in says.patterns:
            assert re.search(pattern, facts["text"], re.DOTALL), (pattern, facts["text"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.vetoed_step])
def test_every_rank_vetoes_and_names_what_is_not_finite(host: Host, name: str) -> None:
    case, outcome = CASES[name], host.outcome(name)
    assert case.fault is not None
    step, faulty = case.vetoed_step, case.fault["rank"]
    microbatch = case.accumulate
    for facts in outcome["ranks"]:
        assert facts["nonfinite"] == {str(step): [[faulty, "2.weight", microbatch]]}
        digests = facts["digests"]
        if case.overlap == "backward":  # else a digest of each step would end the overlap
            assert digests[str(step)] == digests[str(step - 1)]
            assert digests[str(step)] != digests[str(step + case.accumulate)]
        if case.api == "engine":
            what = f"step {step // case.accumulate}: the gradient is not finite: rank {faulty}'s "
            what += f"of '2.weight' in microbatch {microbatch}"
            assert any(text.startswith(what) for text in facts["warnings"]), facts["warnings"]


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.overlap != "backward"])
def test_half_an_update_is_not_read_as_a_whole_one(host: Host, name: str) -> None:
    for rank, facts in enumerate(host.outcome(name)["ranks"]):
        if facts.get("outcome") == LOST:
            assert facts.get("read_half", LOST) == LOST, rank


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fork])
def test_a_forked_child_is_refused_and_ends(host: Host, name: str) -> None:
    for facts in host.outcome(name)["ranks"]:
        code, text = facts["child"]
        assert code == 7
        assert re.match(r"RuntimeError: sharing was begun by process \d+, and this is a fork", text)
