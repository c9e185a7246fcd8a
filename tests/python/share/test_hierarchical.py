"""strategy="hierarchical": ranks of this machine that pretend to be on two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tradewind as tw
from share.hierarchical_rank import STEPS, digest, loss_of, make_model
from tradewind.share.hosts import host_key

RANK_SCRIPT = Path(__file__).with_name("hierarchical_rank.py")
TWO_HOSTS = ("one", "one", "other", "other")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory by memfd is Linux's")


def run_ranks(folder: Path, hosts: Sequence[str], case: str) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each rank."""
    temporary = folder / "temporary"
    temporary.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT), str(rank), str(len(hosts)), str(folder), case],
            env={
                **os.environ,
                "TRADEWIND_HOST_KEY": host,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(temporary),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    found = []
    try:
        for process in started:
            output, errors = process.communicate(timeout=120)
            found.append((process.returncode, output, errors))
    finally:
        for process in started:
            process.kill()
    left = [path.name for path in temporary.rglob("*") if path.is_socket() or "trade" in path.name]
    assert left == []  # torch leaves a folder of its own
    return found


def run(folder: Path, hosts: Sequence[str], case: str) -> list[dict[str, Any]]:
    found = run_ranks(folder, hosts, case)
    for status, _, errors in found:
        assert status == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for _, output, _ in found]


def gradient_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in make_model().parameters())


def alone() -> str:
    """The parameters of one process that adds as two hosts of two ranks do."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        gradients = []
        for rank in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append([p.grad for p in model.parameters()])
        for parameter, a, b, c, d in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = ((a + b) + (c + d)) / 4
        optimizer.step()
    return digest(model)


def memory_files() -> set[str]:
    folder = Path("/dev/shm")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if "tradewind" in name}


def test_equals_one_process_and_sends_each_gradient_once_to_the_other_host(tmp_path: Path) -> None:
    before = memory_files()
    torch.set_num_threads(1)
    ranks = run(tmp_path, TWO_HOSTS, "share:hierarchical")
    assert memory_files() == before
    assert {rank["digest"] for rank in ranks} == {alone()}
    assert all(rank["is_mapped"] for rank in ranks)
    for host in (ranks[:2], ranks[2:]):
        between = sum(rank["between_hosts"] for rank in host)
        # 2(H-1)/H of the gradients for H = 2, and what ranks say of them.
        assert 1.0 <= between / (STEPS * gradient_bytes()) <= 1.05


def test_sends_less_than_sharing_with_every_rank(tmp_path: Path) -> None:
    flat = run(tmp_path, TWO_HOSTS, "share:allreduce")
    assert not any(rank["is_mapped"] for rank in flat)
    # Of a rank's 2(N-1)/N, two thirds go to the two ranks of the other host: 2 S for each host.
    sent = sum(rank["sent"] for rank in flat[:2]) * 2 / 3
    assert sent / (STEPS * gradient_bytes()) == pytest.approx(2.0, rel=0.02)


def test_one_host_sends_no_gradients(tmp_path: Path) -> None:
    ranks = run(tmp_path, ("one",) * 2, "share:hierarchical")
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert ranks[0]["sent"] < 0.05 * STEPS * gradient_bytes()


def test_hosts_of_one_rank_share_as_ranks_do(tmp_path: Path) -> None:
    ranks = run(tmp_path, ("one", "other"), "share:hierarchical")
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert not ranks[0]["is_mapped"]


def test_hosts_of_different_sizes_share_with_all_and_say_so_once(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, ("one", "one", "other"), "share:hierarchical")
    assert [status for status, _, _ in found] == [0, 0, 0], found
    assert len({json.loads(output)["digest"] for _, output, _ in found}) == 1
    assert "hosts have 2, 1 ranks" in found[0][2]
    assert "hosts have" not in found[1][2] + found[2][2]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_codecs_leave_all_ranks_alike(tmp_path: Path, codec: str) -> None:
    ranks = run(tmp_path, TWO_HOSTS, f"codec:{codec}")
    assert len({rank["digest"] for rank in ranks}) == 1
    between = sum(rank["between_hosts"] for rank in ranks[:2])
    assert between < 0.53 * STEPS * gradient_bytes()


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_engine_keeps_ranks_alike(tmp_path: Path, codec: str) -> None:
    ranks = run(tmp_path, TWO_HOSTS, f"engine:{codec}")
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_an_error_on_all_others(tmp_path: Path, victim: int) -> None:
    found = run_ranks(tmp_path, TWO_HOSTS, f"die:{victim}")
    assert found[victim][0] == -9
    for rank, (status, output, errors) in enumerate(found):
        if rank == victim:
            continue
        assert status == 0, errors[-4000:]  # no SIGBUS
        assert f"rank {rank}: lost" in json.loads(output)["error"]
    neighbour = victim ^ 1
    assert f"lost rank {victim} " in json.loads(found[neighbour][1])["error"]


def test_adding_in_rank_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"deterministic=True: .*'hierarchical'"):
        tw.Share(strategy="hierarchical", deterministic=True)


def test_the_key_of_a_host_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRADEWIND_HOST_KEY", raising=False)
    key = host_key()
    assert key == host_key()
    assert key.strip()
    monkeypatch.setenv("TRADEWIND_HOST_KEY", "here")
    assert host_key() == "here"
