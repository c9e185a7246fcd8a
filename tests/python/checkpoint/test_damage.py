"""Whatever happens to a checkpoint's bytes is found and named, and the one before is restored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tradewind.checkpoint import CheckpointError, DamagedCheckpointError
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.names import MANIFEST, CommitName

BLOCK_BYTES = 4096
NUM_ELEMENTS = 20_000


def value(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(NUM_ELEMENTS, generator=generator),
        "bias": torch.randn(7, generator=generator),
        "count": torch.tensor(step),
    }


class Damaged:
    """Steps 1 and 2, of which 2 is to be damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[str] = []
        with Checkpointer(path, block_bytes=BLOCK_BYTES) as checkpointer:
            for step in (1, 2):
                checkpointer.save({**value(step), "step": step}, step=step).wait(60)
        names = [name for name in map(CommitName.parse, os.listdir(path)) if name]
        self.first, self.second = (path / name.folder for name in sorted(names))
        self.shard = next(self.second.glob("*.safetensors"))
        self.manifest = self.second / MANIFEST

    def falls_back(self) -> str:
        """Assert that step 1 is restored to the bit, and return what was said of step 2."""
        told: list[str] = []
        target = {name: torch.zeros_like(tensor) for name, tensor in value(0).items()}
        with Checkpointer(
            self.path, block_bytes=BLOCK_BYTES, on_event=lambda _, text: told.append(text)
        ) as checkpointer:
            assert checkpointer.restore({**target, "step": 0}) == 1
        for name, tensor in value(1).items():
            assert torch.equal(target[name], tensor), name
        assert len(told) == 1 and self.second.name in told[0]
        return told[0]


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Damaged]:
    yield Damaged(tmp_path / "c")


def test_undamaged_it_is_restored(damaged: Damaged) -> None:
    with Checkpointer(damaged.path) as checkpointer:
        found = checkpointer.load()
    assert found is not None and found[0] == 2
    assert all(torch.equal(found[1][name], tensor) for name, tensor in value(2).items())


def flips(size: int, num_points: int) -> list[int]:
    """The ends, and points in between that fall on every kind of byte."""
    return sorted({0, 1, 7, 8, 9, size - 1, size - 2, *range(0, size, max(size // num_points, 1))})


@pytest.mark.parametrize("bit", [0, 7])
def test_every_region_of_a_shard_flipped(damaged: Damaged, bit: int) -> None:
    whole = damaged.shard.read_bytes()
    for offset in flips(len(whole), 60):
        data = bytearray(whole)
        data[offset] ^= 1 << bit
        damaged.shard.write_bytes(data)
        said = damaged.falls_back()
        assert damaged.shard.name in said and f"block {offset // BLOCK_BYTES}" in said, offset


@pytest.mark.parametrize("bit", [0, 5])
def test_every_region_of_a_manifest_flipped(damaged: Damaged, bit: int) -> None:
    whole = damaged.manifest.read_bytes()
    for offset in flips(len(whole), 60):
        data = bytearray(whole)
        data[offset] ^= 1 << bit
        damaged.manifest.write_bytes(data)
        damaged.falls_back()


@pytest.mark.parametrize("file", ["shard", "manifest"])
def test_truncated_and_extended(damaged: Damaged, file: str) -> None:
    path: Path = getattr(damaged, file)
    whole = path.read_bytes()
    sizes = {0, 1, 8, len(whole) // 2, len(whole) - 4096, len(whole) - 1}
    for size in sorted(size for size in sizes if 0 <= size < len(whole)):
        path.write_bytes(whole[:size])
        damaged.falls_back()
    for more in (b"\0", b"\n", b"\0" * 4096, whole):
        path.write_bytes(whole + more)
        damaged.falls_back()


def swap_blocks(d: Damaged) -> None:
    data = d.shard.read_bytes()
    one, two = data[BLOCK_BYTES : 2 * BLOCK_BYTES], data[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]
    d.shard.write_bytes(data[:BLOCK_BYTES] + two + one + data[3 * BLOCK_BYTES :])


def swap_tensors(d: Damaged) -> None:
    text = d.manifest.read_bytes()
    d.manifest.write_bytes(text.replace(b'"weight"', b'"thgiew"'))


def delete_shard(d: Damaged) -> None:
    d.shard.unlink()


def make_shard_a_folder(d: Damaged) -> None:
    d.shard.unlink()
    d.shard.mkdir()


def take_shard_of_another_step(d: Damaged) -> None:
    shutil.copy(next(d.first.glob("*.safetensors")), d.shard)


def take_manifest_of_another_step(d: Damaged) -> None:
    shutil.copy(d.first / MANIFEST, d.manifest)


def take_both_of_another_step(d: Damaged) -> None:
    take_shard_of_another_step(d)
    take_manifest_of_another_step(d)


def zero_a_page(d: Damaged) -> None:
    with d.shard.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\0" * 4096)


def empty_manifest(d: Damaged) -> None:
    d.manifest.write_bytes(b"")


@pytest.mark.parametrize(
    "harm",
    [
        swap_blocks,
        swap_tensors,
        delete_shard,
        make_shard_a_folder,
        take_shard_of_another_step,
        take_manifest_of_another_step,
        take_both_of_another_step,
        zero_a_page,
        empty_manifest,
    ],
)
def test_harm(damaged: Damaged, harm: Callable[[Damaged], None]) -> None:
    harm(damaged)
    damaged.falls_back()


def test_without_a_manifest_it_is_no_checkpoint(damaged: Damaged) -> None:
    damaged.manifest.unlink()
    with Checkpointer(damaged.path) as checkpointer:
        assert checkpointer.steps() == [1]
        target = {name: torch.zeros_like(tensor) for name, tensor in value(0).items()}
        assert checkpointer.restore({**target, "step": 0}) == 1


def test_a_step_that_is_asked_for_by_name_is_not_replaced_by_another(damaged: Damaged) -> None:
    zero_a_page(damaged)
    target = {name: torch.zeros_like(tensor) for name, tensor in value(0).items()}
    with Checkpointer(damaged.path, on_event=lambda *_: None) as checkpointer:
        with pytest.raises(DamagedCheckpointError, match=damaged.shard.name):
            checkpointer.restore({**target, "step": 0}, step=2)
        with pytest.raises(DamagedCheckpointError, match=damaged.shard.name):
            checkpointer.verify(2)
        assert checkpointer.verify(1) == 1


def test_what_is_damaged_on_the_disk_is_not_saved_over_silently(damaged: Damaged) -> None:
    """A run that fell back goes on, and its next commit is the newest."""
    zero_a_page(damaged)
    with Checkpointer(damaged.path, on_event=lambda *_: None) as checkpointer:
        target = {name: torch.zeros_like(tensor) for name, tensor in value(0).items()}
        assert checkpointer.restore(target) == 1
        checkpointer.save(value(2), step=2).wait(60)
        assert checkpointer.restore(target) == 2
        assert torch.equal(target["weight"], value(2)["weight"])


def test_all_are_damaged(damaged: Damaged) -> None:
    for shard in damaged.path.rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-4096])
    with (
        Checkpointer(damaged.path, on_event=lambda *_: None) as checkpointer,
        pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole"),
    ):
        checkpointer.load()
