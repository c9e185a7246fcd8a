"""A link between two hosts that is gone for seconds costs time and nothing else: TCP sends again
what was lost, and the weights are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fault_cases import ENVIRONMENT, Case, fine  # noqa: E402

INTERFACE = "wire"
AWAY_S = 3.0
ADDRESSES = ("10.78.0.1", "10.78.0.2")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and ip (package iproute2)",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    names = [f"tw-drop-{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        end = ["name", INTERFACE, "netns", names[1]]
        ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", *end)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(hosts: list[str], case: Case, folder: Path) -> list[subprocess.Popen[str]]:
    folder.mkdir()
    request = json.dumps(case.request(str(folder)))
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
    script = str(HERE / "fault_ranks.py")
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, script, request, str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(hosts)
    ]


def end(ranks: list[subprocess.Popen[str]], folder: Path) -> list[dict[str, Any]]:
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    facts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, text in enumerate(errors):
        facts[rank]["stderr"] = text
    return facts


def wait_for_step(folder: Path, step: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if json.loads((folder / "0.json").read_text()).get("num_steps", 0) >= step:
                return
        except (OSError, ValueError):  # not there yet, or half written
            pass
        time.sleep(0.02)
    pytest.fail(f"rank 0 did not come to step {step}")


def test_a_link_that_comes_back_changes_nothing(hosts: list[str], tmp_path: Path) -> None:
    case = Case(
        "drops",
        "engine",
        fine(2),
        overlap="next-forward",
        timeout=30.0,
        host=ADDRESSES[0],
        pace=0.3,
    )
    undisturbed = end(start(hosts, case, tmp_path / "undisturbed"), tmp_path / "undisturbed")
    disturbed = tmp_path / "disturbed"
    ranks = start(hosts, case, disturbed)
    wait_for_step(disturbed, 2)
    ip("-n", hosts[1], "link", "set", INTERFACE, "down")
    time.sleep(AWAY_S)
    ip("-n", hosts[1], "link", "set", INTERFACE, "up")
    facts = end(ranks, disturbed)
    for rank in range(2):
        assert facts[rank]["digests"] == undisturbed[rank]["digests"]
        assert facts[rank]["told"] - facts[rank]["began"] > AWAY_S
    assert facts[0]["digests"] == facts[1]["digests"]
    assert "has waited 1" in facts[0]["stderr"] + facts[1]["stderr"]  # patience is a second
