"""Exported files are read by the safetensors library and by torch.load, and hold what was saved."""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from checkpoint import reader_from_the_page
from torch import nn

from tradewind.checkpoint import (
    DamagedCheckpointError,
    NoSuchCheckpointError,
    PartialTensor,
    PerRank,
)
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.dtypes import DTYPE_OF, NAME_OF
from tradewind.checkpoint.export import Exported, export
from tradewind.checkpoint.reference import Reference

SMALL = 4096  # a buffer that most tensors are larger than


def tensors() -> dict[str, torch.Tensor]:
    """Of every dtype, some larger than a small buffer, some empty, one in three runs."""
    generator = torch.Generator().manual_seed(5)
    found: dict[str, torch.Tensor] = {"scalar": torch.tensor(math.nan, dtype=torch.float64)}
    for dtype in NAME_OF:
        raw = torch.randint(
            0, 256, (1301 * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        values = raw % 2 > 0 if dtype == torch.bool else raw.view(dtype)
        found[f"of.{NAME_OF[dtype]}"] = values.reshape(1301, 1)
    found["empty"] = torch.zeros(0, 3)
    found["turned"] = torch.randn(40, 70, generator=generator).t()
    return found


def state() -> dict[str, Any]:
    flat = torch.arange(5000, dtype=torch.int32)
    parts = [(0, flat[:1000]), (1000, flat[1000:1001]), (1001, flat[1001:])]
    return {
        "tensors": tensors(),
        "cut": PartialTensor((50, 100), torch.int32, parts),
        "model": nn.Linear(3, 2),
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "own": PerRank({"seed": 7, "noise": torch.ones(2)}),
        "values": {1: (1, math.inf), "b": b"\xff", "count": Counter(a=2), "n": [1, 2, 2**80]},
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "nothing": None,
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "c"
    with Checkpointer(path, block_bytes=4096) as checkpointer:
        checkpointer.save(state(), step=5).wait(120)
    return path


def exported(directory: Path, path: Path, **options: Any) -> Exported:
    with Reference(str(directory)) as reference, reference.reader(reference.name()) as reader:
        return export(reader, path, **options)


def raw(tensor: torch.Tensor) -> bytes:
    """Elements in row-major order, byte by byte: NaNs compare, too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("buffer_bytes", [SMALL, 1 << 26])
def test_safetensors_hold_what_was_saved(
    directory: Path, tmp_path: Path, buffer_bytes: int
) -> None:
    path = tmp_path / "all.safetensors"
    done = exported(directory, path, buffer_bytes=buffer_bytes)
    # What the commit holds, by a reader that shares no code with ours.
    (folder,) = reader_from_the_page.commits(directory)
    _, expected = reader_from_the_page.read(folder)
    found = safetensors.torch.load_file(path)
    assert found.keys() == expected.keys() and not any("__pad__" in name for name in found)
    for name, (dtype, shape, data) in expected.items():
        assert found[name].dtype == DTYPE_OF[dtype] and tuple(found[name].shape) == shape, name
        assert raw(found[name]) == data, name
    for name, tensor in tensors().items():
        assert raw(found[f"tensors.{name}"]) == raw(tensor), name
    assert torch.equal(found["cut"], torch.arange(5000, dtype=torch.int32).reshape(50, 100))
    assert (done.num_tensors, done.size_bytes) == (len(expected), path.stat().st_size)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "5"}


def test_every_tensor_lies_at_a_multiple_of_its_element(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    exported(directory, path)
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
    assert (8 + size) % 4096 == 0
    with safetensors.safe_open(path, "numpy") as file:
        names = file.offset_keys()
    sizes = [safetensors.torch.load_file(path)[name].element_size() for name in names]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("suffix", ["safetensors", "torch"])
def test_only_a_model_is_what_load_state_dict_takes(
    directory: Path, tmp_path: Path, suffix: Any
) -> None:
    path = tmp_path / "model"
    done = exported(directory, path, only="model.", format=suffix)
    assert done.num_tensors == 2
    found = (
        torch.load(path, weights_only=True)
        if suffix == "torch"
        else safetensors.torch.load_file(path)
    )
    model = nn.Linear(3, 2)
    model.load_state_dict(found)
    (folder,) = reader_from_the_page.commits(directory)
    _, expected = reader_from_the_page.read(folder)
    assert raw(model.weight) == expected["model.weight"][2]
    assert raw(model.bias) == expected["model.bias"][2]


def test_a_beginning_that_no_name_has_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSuchCheckpointError, match=r"begin with 'net\.'.*model\."):
        exported(directory, tmp_path / "x", only="net.")
    assert not list(tmp_path.iterdir())


def test_torch_loads_the_state_by_weights_alone(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    exported(directory, path, format="torch")
    found = torch.load(path, weights_only=True)
    assert list(found) == list(state())
    for name, tensor in tensors().items():
        assert found["tensors"][name].dtype == tensor.dtype
        assert found["tensors"][name].shape == tensor.shape
        assert raw(found["tensors"][name]) == raw(tensor), name
    assert torch.equal(found["cut"].reshape(-1), torch.arange(5000, dtype=torch.int32))
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["own"][0]["seed"] == 7 and found["own"][0]["noise"].tolist() == [1, 1]
    expected = {1: (1, math.inf), "b": b"\xff", "count": Counter(a=2), "n": [1, 2, 2**80]}
    assert found["values"] == expected and type(found["values"]["count"]) is Counter
    assert found["size"] == torch.Size([1, 2]) and found["dtype"] is torch.float16
    assert found["nothing"] is None


def test_what_is_stored_once_shares_its_memory_again(tmp_path: Path) -> None:
    flat = torch.arange(2**18, dtype=torch.float32)
    with Checkpointer(tmp_path / "c") as checkpointer:
        in_place = [(flat.data_ptr(), flat.nbytes)]
        checkpointer.save({"a": flat, "tied": flat}, step=1, in_place=in_place).wait(120)
    exported(tmp_path / "c", tmp_path / "x.pt", format="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(found["a"], flat) and torch.equal(found["tied"], flat)
    assert found["a"].data_ptr() == found["tied"].data_ptr()
    exported(tmp_path / "c", tmp_path / "x.safetensors")
    whole = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert torch.equal(whole["a"], flat) and torch.equal(whole["tied"], flat)


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_file_that_is_there_stays(directory: Path, tmp_path: Path, format: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        exported(directory, path, format=format)
    assert path.read_bytes() == b"theirs" and [each.name for each in tmp_path.iterdir()] == ["x"]
    exported(directory, path, format=format, replaces=True)
    assert path.stat().st_size > 100 and [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_file_that_appears_meanwhile_stays(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    synced = os.fsync

    def sync_late(descriptor: int) -> None:
        synced(descriptor)
        path.write_bytes(b"theirs")

    monkeypatch.setattr(os, "fsync", sync_late)
    with pytest.raises(FileExistsError):
        exported(directory, path)
    assert path.read_bytes() == b"theirs" and [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_directory_is_no_file(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        exported(directory, tmp_path, replaces=True)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_damage_leaves_no_file(tmp_path: Path, format: Any) -> None:
    with Checkpointer(tmp_path / "c", block_bytes=4096) as checkpointer:
        checkpointer.save({"a": torch.zeros(5000)}, step=1).wait(120)
    (shard,) = (tmp_path / "c").glob("step-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-9000] ^= 1
    shard.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").write_bytes(b"before")
    with pytest.raises(FileExistsError):  # before anything is read
        exported(tmp_path / "c", out / "x", format=format)
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        exported(tmp_path / "c", out / "x", format=format, replaces=True)
    assert [each.name for each in out.iterdir()] == ["x"]
    assert (out / "x").read_bytes() == b"before"


def test_memory_is_bounded_by_the_buffer(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    empty = torch.empty

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counting)
    exported(directory, tmp_path / "x", buffer_bytes=SMALL)
    assert taken == [SMALL]
