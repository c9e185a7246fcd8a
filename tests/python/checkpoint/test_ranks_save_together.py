"""`tw.Checkpointer` on several ranks: each writes a part, one commit comes of it or none, and any
number of ranks reads it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from share.ranks import Ranks
from tradewind.checkpoint import CheckpointError, PartialTensor, PerRank, StateMismatchError
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.names import CommitName

LENGTH = 1_000_003


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


def cut(rank: int, size: int, length: int) -> tuple[int, int]:
    return rank * length // size, (rank + 1) * length // size


def logical() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(900, 700, generator=generator),
        "bias": torch.randn(700, generator=generator),
        "moment": torch.randn(LENGTH, generator=generator),
    }


def state_of(rank: int, size: int) -> dict[str, Any]:
    whole = logical()
    begin, end = cut(rank, size, LENGTH)
    moment = PartialTensor((LENGTH,), torch.float32, [(begin, whole["moment"][begin:end].clone())])
    own = {"seed": 100 + rank, "noise": torch.full((3,), float(rank))}
    return {
        "weight": whole["weight"],
        "bias": whole["bias"],
        "moment": moment,
        "own": PerRank(own),
        "step": 5,
    }


def blank_of(rank: int, size: int) -> dict[str, Any]:
    begin, end = cut(rank, size, LENGTH)
    return {
        "weight": torch.zeros(900, 700),
        "bias": torch.zeros(700),
        "moment": PartialTensor((LENGTH,), torch.float32, [(begin, torch.zeros(end - begin))]),
        "own": PerRank({"seed": 0, "noise": torch.zeros(3)}),
        "step": 0,
    }


def save(rank: int, path: str) -> list[int]:
    with Checkpointer(path) as checkpointer:
        handle = checkpointer.save(state_of(rank, dist.get_world_size()), step=5)
        handle.wait(60)
        return checkpointer.steps()


def restore(rank: int, path: str) -> dict[str, Any]:
    size = dist.get_world_size()
    target = blank_of(rank, size)
    with Checkpointer(path) as checkpointer:
        step = checkpointer.restore(target)
        restored = checkpointer.restored
    ((_, moment),) = target["moment"].parts
    return {
        "step": step,
        "weight": target["weight"],
        "moment": moment.clone(),
        "noise": target["own"].value["noise"],
        "restored": restored,
    }


@pytest.mark.parametrize(("written_by", "read_by"), [(3, 3), (3, 2), (2, 3)])
def test_any_number_of_ranks_reads_what_others_wrote(
    ranks: Ranks, tmp_path: Path, written_by: int, read_by: int
) -> None:
    path = str(tmp_path / "c")
    assert ranks.run(save, path, num_ranks=written_by, timeout_s=120) == [[5]] * written_by
    folder = next(name for name in os.listdir(path) if CommitName.parse(name))
    shards = sorted((tmp_path / "c" / folder).glob("*.safetensors"))
    assert len(shards) == written_by
    sizes = [shard.stat().st_size for shard in shards]
    assert max(sizes) < 1.7 * sum(sizes) / len(sizes)
    whole = logical()
    for rank, found in enumerate(ranks.run(restore, path, num_ranks=read_by, timeout_s=120)):
        begin, end = cut(rank, read_by, LENGTH)
        assert found["step"] == 5 and found["restored"]["step"] == 5
        assert torch.equal(found["weight"], whole["weight"])
        assert torch.equal(found["moment"], whole["moment"][begin:end])
        known = rank < written_by
        assert torch.equal(found["noise"], torch.full((3,), float(rank if known else 0)))


def test_one_process_reads_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, str(tmp_path / "c"), num_ranks=3, timeout_s=120)
    with Checkpointer(tmp_path / "c") as checkpointer:
        found = checkpointer.load()
        assert checkpointer.verify() == 5
    assert found is not None and found[0] == 5
    for name, tensor in logical().items():
        assert torch.equal(found[1][name], tensor)
    assert found[1]["own"].value["seed"] == 100


def fail_on_one(rank: int, path: str) -> list[Any]:
    """Rank 1 cannot write its shard: nobody commits, everybody says so, the next save works."""
    with Checkpointer(path, on_event=lambda kind, text: None) as checkpointer:
        checkpointer.save(state_of(rank, 3), step=1).wait(60)
        writer = checkpointer._saver._writer
        if rank == 1:
            checkpointer._saver._writer = _Broken()  # type: ignore[assignment]
        handle = checkpointer.save(state_of(rank, 3), step=2)
        try:
            handle.wait(60)
            said = ""
        except (CheckpointError, OSError) as error:
            said = str(error)
        checkpointer._saver._writer = writer
        between = checkpointer.steps()
        checkpointer.save(state_of(rank, 3), step=3).wait(60)
        return [said, between, checkpointer.steps()]


class _Broken:
    def start(self, *arguments: Any) -> Any:
        raise OSError(28, "No space left on device", "the shard of rank 1")


def test_a_rank_that_cannot_write_fails_the_save_on_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(fail_on_one, str(tmp_path / "c"), num_ranks=3, timeout_s=120)
    for rank, (said, between, after) in enumerate(found):
        assert "No space left on device" in said, rank
        assert between == [1] and after == [1, 3]
    assert "rank 1" in found[0][0] and "rank 1" in found[2][0]


def different_shapes(rank: int, path: str) -> str:
    with Checkpointer(path, on_event=lambda kind, text: None) as checkpointer:
        try:
            checkpointer.save({"t": torch.zeros(4 + rank)}, step=1).wait(60)
        except CheckpointError as error:
            return str(error)
        return ""


def test_ranks_that_differ_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(different_shapes, str(tmp_path / "c"), timeout_s=120):
        assert "tensor 't'" in said and "PerRank" in said


def lose_a_part(rank: int, path: str) -> str:
    part = [(0, torch.zeros(5))] if rank == 0 else []
    with Checkpointer(path, on_event=lambda kind, text: None) as checkpointer:
        try:
            state = {"t": PartialTensor((10,), torch.float32, part)}
            checkpointer.save(state, step=1).wait(60)
        except CheckpointError as error:
            return str(error)
        return ""


def test_elements_that_no_rank_has_fail_the_save(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(lose_a_part, str(tmp_path / "c"), timeout_s=120):
        assert "'t'" in said or '"t"' in said


def one_is_absent(rank: int, path: str) -> str:
    options: dict[str, Any] = {"on_event": lambda kind, text: None}
    checkpointer = Checkpointer(path, deadline=timedelta(seconds=3), **options)
    checkpointer.own()
    said = ""
    if rank == 0:
        try:
            checkpointer.save({"t": torch.zeros(4)}, step=1).wait(60)
        except CheckpointError as error:
            said = str(error)
    dist.barrier()
    checkpointer.close()
    return said


def test_a_rank_that_does_not_save_is_named_at_the_deadline(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(one_is_absent, str(tmp_path / "c"), timeout_s=120)[0]
    assert "waited 3 s for rank 1" in said


def damaged_for_one(rank: int, path: str) -> tuple[int | None, list[str]]:
    passed: list[str] = []
    with Checkpointer(path, on_event=lambda kind, text: passed.append(text)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(rank, 2), step=step).wait(60)
        dist.barrier()
        if rank == 0:
            names = [name for name in map(CommitName.parse, os.listdir(path)) if name]
            newest = max(names)
            shard = Path(path) / newest.folder / "shard-00001-of-00002.safetensors"
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        dist.barrier()
        return checkpointer.restore(blank_of(rank, 2)), passed


def test_all_ranks_fall_back_to_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    for step, passed in ranks.run(damaged_for_one, str(tmp_path / "c"), timeout_s=120):
        assert step == 1
        assert len(passed) == 1 and "shard-00001-of-00002" in passed[0]


def mismatch(rank: int, path: str) -> str:
    with Checkpointer(path) as checkpointer:
        checkpointer.save({"t": torch.zeros(4)}, step=1).wait(60)
        try:
            checkpointer.restore({"t": torch.zeros(4 + rank)})
        except StateMismatchError as error:
            return str(error)
    return ""


def test_a_state_that_fits_not_on_one_rank_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(mismatch, str(tmp_path / "c"), timeout_s=120)
    assert "rank 1" in first and "expected shape (5,), was (4,)" in second


def alone_in_a_group(rank: int, path: str) -> list[int]:
    """Ranks of subgroups save each into a directory of their own."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(f"{path}-{rank}", process_group=groups[rank]) as checkpointer:
            checkpointer.save({"t": torch.full((2,), rank)}, step=rank).wait(60)
            assert checkpointer.restore({"t": torch.zeros(2, dtype=torch.int64)}) == rank
            return checkpointer.steps()


def test_a_process_group_of_ones_own(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(alone_in_a_group, str(tmp_path / "c"), timeout_s=120) == [[0], [1]]
