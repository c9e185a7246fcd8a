"""A neighbour's shard in memory: ranks that are started anew restore without the shard files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from share.ranks import Ranks
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.peer_memory import FOLDER, PeerMemory
from tradewind.checkpoint.ranks import Ranks as SavingRanks

kept: list[Any] = []  # what a rank that is killed never closes


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "c"
    yield str(folder)
    for address in (folder / FOLDER).glob("keeper-*.json"):  # of ranks that were killed
        os.kill(json.loads(address.read_text())["pid"], 9)


def weight() -> torch.Tensor:
    return torch.randn(700, 900, generator=torch.Generator().manual_seed(4))


def save_and_stay(rank: int, path: str) -> list[int]:
    checkpointer = Checkpointer(path, peers=True, keep=2)
    kept.append(checkpointer)
    for step in (1, 2):
        checkpointer.save({"w": weight() * step}, step=step).wait(120)
    return checkpointer.steps()


def restore(rank: int, path: str) -> tuple[int | None, torch.Tensor, list[str]]:
    told: list[str] = []
    target = {"w": torch.zeros(700, 900)}
    with Checkpointer(path, peers=True, on_event=lambda _, text: told.append(text)) as found:
        step = found.restore(target)
        dist.barrier()
    return step, target["w"], told


def shards_of(path: str) -> list[Path]:
    folders = [name for name in map(CommitName.parse, os.listdir(path)) if name]
    return sorted(Path(path, max(folders).folder).glob("*.safetensors"))


def test_ranks_that_were_killed_come_back_without_the_shard_files(ranks: Ranks, path: str) -> None:
    assert ranks.run(save_and_stay, path, timeout_s=240) == [[1, 2]] * 2
    ranks._end()  # SIGKILL
    for shard in shards_of(path):
        shard.unlink()
    for step, found, told in ranks.run(restore, path, timeout_s=240):
        assert (step, told) == (2, [])
        assert torch.equal(found, weight() * 2)


def test_memory_that_is_wrong_or_gone_ends_in_reading_the_files(ranks: Ranks, path: str) -> None:
    ranks.run(save_and_stay, path, timeout_s=240)
    ranks._end()
    first, second = (Path(path, FOLDER, f"keeper-{rank:05d}.json") for rank in (0, 1))
    os.kill(json.loads(first.read_text())["pid"], 9)
    shard = shards_of(path)[0]  # rank 0's, kept by rank 1's keeper
    saving = SavingRanks()
    peers = PeerMemory(path, saving)
    wrong = Path(path).parent / "wrong"
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 4
    wrong.write_bytes(data)
    name = CommitName.parse(shard.parent.name)
    assert name is not None
    facts = json.loads(second.read_text())
    first.write_text(json.dumps(facts))  # alone, this process's neighbour is itself
    second.rename(second.with_suffix(".aside"))
    peers.keep(name, shard.name, str(wrong))
    second.with_suffix(".aside").rename(second)
    first.unlink()
    for step, found, told in ranks.run(restore, path, timeout_s=240):
        assert (step, told) == (2, [])
        assert torch.equal(found, weight() * 2)


def close_properly(rank: int, path: str) -> bool:
    with Checkpointer(path, peers=True) as checkpointer:
        checkpointer.save({"w": torch.ones(3)}, step=1).wait(120)
        peers = checkpointer._peers
        assert peers is not None
        alive = peers._answers(peers._address_file(rank))
        dist.barrier()
    return alive


def test_keepers_end_with_the_run(ranks: Ranks, path: str) -> None:
    assert ranks.run(close_properly, path, timeout_s=240) == [True, True]
    until = time.monotonic() + 60
    while list(Path(path, FOLDER).glob("keeper-*.json")):  # each takes its own away at its end
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_stranger_is_not_answered(ranks: Ranks, path: str) -> None:
    ranks.run(save_and_stay, path, timeout_s=240)
    address = Path(path, FOLDER, "keeper-00000.json")
    assert address.stat().st_mode & 0o077 == 0
    peers = PeerMemory(path, SavingRanks())
    assert peers._answers(str(address))
    facts = json.loads(address.read_text())
    strange = Path(path, FOLDER, "strange.json")
    strange.write_text(json.dumps({**facts, "token": "0" * 32}))
    assert not peers._answers(str(strange))
