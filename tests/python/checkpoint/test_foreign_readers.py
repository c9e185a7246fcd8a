"""What `tw.Checkpointer` writes is read by others: the safetensors library, torch's distributed
checkpoints at another world size, and a reader written from the format's page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint import reader_from_the_page
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from share.ranks import Ranks
from tradewind.checkpoint import PartialTensor, PerRank
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.dtypes import NAME_OF

NUM_MOMENTS = 1_000_003
PAGE = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


def tensors() -> dict[str, torch.Tensor]:
    """The same everywhere; large enough that ranks share "weight" and "moment"."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(1100, 900, generator=generator)
    return {
        "weight": weight,
        "moment": torch.randn(NUM_MOMENTS, generator=generator),
        "half": torch.randn(700, 3, generator=generator).bfloat16(),
        "mask": torch.randn(5, generator=generator) > 0,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "eight": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "turned": weight[:20].t(),
    }


def state_of(rank: int, size: int) -> dict[str, Any]:
    whole = tensors()
    begin, end = rank * NUM_MOMENTS // size, (rank + 1) * NUM_MOMENTS // size
    part = (begin, whole["moment"][begin:end].clone())
    return {
        **whole,
        "moment": PartialTensor((NUM_MOMENTS,), torch.float32, [part]),
        "tied": whole["weight"],
        "own": PerRank({"seed": 10 + rank, "noise": torch.full((rank + 1,), float(rank))}),
        "array": np.arange(4, dtype=np.uint16),
        "values": [(1, math.inf, -0.0), {1: b"\xff", "1": 2**77, "$": None}, torch.float16],
    }


def save(rank: int, path: str) -> None:
    with Checkpointer(path) as checkpointer:
        checkpointer.save(state_of(rank, dist.get_world_size()), step=5).wait(120)


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a commit of three ranks."""
    directory = tmp_path_factory.mktemp("written") / "c"
    ranks.run(save, str(directory), num_ranks=3, timeout_s=180)
    (folder,) = reader_from_the_page.commits(directory)
    return folder


def as_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    of_name = {name: dtype for dtype, name in NAME_OF.items()}
    if not data:
        return torch.zeros(shape, dtype=of_name[dtype])
    return torch.frombuffer(bytearray(data), dtype=of_name[dtype]).reshape(shape)


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    as_bytes = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
    assert torch.equal(*as_bytes)


def test_the_reader_from_the_page_reads_it_to_the_bit(written: Path) -> None:
    manifest, found = reader_from_the_page.read(written)
    assert (manifest["step"], manifest["world_size"]) == (5, 3)
    for name, expected in {**tensors(), "tied": tensors()["weight"]}.items():
        assert_equal_bits(as_tensor(*found[name]), expected)
    for rank in range(3):
        own = manifest["per_rank"][rank]
        state = reader_from_the_page.state(manifest["tree"], found, own)
        assert state["own"]["seed"] == 10 + rank
        assert_equal_bits(as_tensor(*state["own"]["noise"]), torch.full((rank + 1,), float(rank)))
        assert state["array"] == ("U16", (4,), np.arange(4, dtype=np.uint16).tobytes())
        expected = [(1, math.inf, -0.0), {1: b"\xff", "1": 2**77, "$": None}, "float16"]
        assert repr(state["values"]) == repr(expected)
        assert list(state) == list(state_of(rank, 3))


def test_the_manifest_is_of_the_schema_on_the_page(written: Path) -> None:
    (schema,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    validator = jsonschema.Draft202012Validator(json.loads(schema))
    validator.check_schema(validator.schema)
    manifest = json.loads((written / "manifest.json").read_bytes())
    validator.validate(manifest)
    manifest["files"][0]["name"] = "../elsewhere.safetensors"
    assert not validator.is_valid(manifest)


def test_the_safetensors_library_reads_every_shard(written: Path) -> None:
    runs: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in sorted(written.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            assert set(told) == set(file.keys())
            for key in told:
                assert len(told[key]["saved_offsets"]) == len(file.get_slice(key).get_shape())
                start = told[key]["saved_offsets"][0] if told[key]["saved_offsets"] else 0
                runs.setdefault(key, []).append((start, file.get_tensor(key)))
    for name, expected in tensors().items():
        parts = [part for _, part in sorted(runs[name], key=lambda run: run[0])]
        joined = torch.cat([part.reshape(-1) for part in parts])
        assert_equal_bits(joined, expected.reshape(-1))
    assert len(runs["weight"]) > 1 and len(runs["moment"]) == 3
    assert runs["half"][0][1].shape == (700, 3)


def load_by_torch(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """Two ranks, each of which loads its half of what was cut, and all of the rest."""
    mesh = init_device_mesh("cpu", (2,))
    expected = tensors()
    state: dict[str, torch.Tensor] = {
        name: distribute_tensor(torch.zeros(expected[name].numel()), mesh, [Shard(0)])
        for name in ("weight", "moment")
    }
    for name in ("half", "mask", "scalar", "complex"):
        state[name] = torch.zeros_like(expected[name])
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }


def test_torchs_reader_loads_three_ranks_shards_in_a_world_of_two(
    ranks: Ranks, written: Path
) -> None:
    halves = ranks.run(load_by_torch, str(written), num_ranks=2, timeout_s=180)
    expected = tensors()
    for name in ("weight", "moment"):
        joined = torch.cat([half[name] for half in halves])
        assert_equal_bits(joined, expected[name].reshape(-1))
        assert all(half[name].numel() < expected[name].numel() for half in halves)
    for half in halves:
        for name in ("half", "mask", "scalar", "complex"):
            assert_equal_bits(half[name], expected[name])
