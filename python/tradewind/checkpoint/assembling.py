"""What is written around the bytes: a shard file's header, and the manifest of all ranks' files."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tradewind._core import native
from tradewind.checkpoint.dtypes import NAME_OF
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.manifest import Manifest, Piece, ShardFile, TensorEntry
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.plan import ShardPlan
from tradewind.checkpoint.safetensors_header import compose, sharding_info
from tradewind.checkpoint.tree import Flat


@dataclass(frozen=True)
class ComposedShard:
    """`header`: the file's first bytes; `pieces`: for each part of the plan, tensor, key, offset
    in the file in bytes, first element and number of elements."""

    header: bytes
    pieces: list[tuple[str, str, int, int, int]]


def compose_shard(
    plan: ShardPlan, shapes: Mapping[str, tuple[int, ...]], dtypes: Sequence[str]
) -> ComposedShard:
    """The header of a file of this plan. `shapes` of logical tensors by name, `dtypes` by index."""
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    starts: dict[str, list[int]] = {}
    keys: dict[tuple[str, int], str] = {}
    for placed in plan.placed:
        part = placed.part
        if placed.same_as is not None:
            continue
        key = part.name if part.name not in starts else f"{part.name}@{part.start}"
        keys[part.name, part.start] = key
        shape = shapes[part.name] if part.is_whole else (part.count,)
        starts[key] = [0] * len(shape) if part.is_whole else [part.start]
        begin = placed.offset_bytes
        entries.append((key, dtypes[part.index], shape, begin, begin + part.size_bytes))
    for number, (begin, size) in enumerate(plan.pads):
        key = f"__pad__{number}"
        starts[key] = [0]
        entries.append((key, "U8", (size,), begin, begin + size))
    entries.sort(key=lambda entry: (entry[3], entry[4]))
    header = compose(entries, {"format": "pt", **sharding_info(starts)})
    pieces = []
    for placed in plan.placed:
        part, first = placed.part, placed.same_as or placed.part
        offset = len(header) + placed.offset_bytes
        key = keys[first.name, first.start]
        pieces.append((part.name, key, offset, part.start, part.count))
    return ComposedShard(header, pieces)


def file_facts(name: str, block_bytes: int, result: native.ShardResult) -> dict[str, Any]:
    """What a rank tells of a file that it wrote, as JSON."""
    return {
        "name": name,
        "size_bytes": result.size_bytes,
        "crc32c": result.crc32c,
        "block_bytes": block_bytes,
        "block_crc32c": result.block_crc32c.hex(),
    }


def rank_facts(
    flat: Flat, files: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """What a rank tells of its shard, as JSON. `pieces` begin with the number of the file."""
    tensors = (*flat.tensors.items(), *flat.own_tensors.items())
    return {
        "files": list(files),
        "pieces": [list(piece) for piece in pieces],
        "tensors": {name: [NAME_OF[value.dtype], list(value.shape)] for name, value in tensors},
        "own_tree": flat.own_tree,
    }


def assemble(
    name: CommitName,
    flat: Flat,
    ranks: Sequence[dict[str, Any]],
    *,
    parent: str | None,
    facts: Mapping[str, Any],
) -> Manifest:
    """The manifest of what `ranks` told (`rank_facts`, in rank order).

    Raises CheckpointError where a tensor differs between ranks in dtype or shape.
    """
    entries: dict[str, TensorEntry] = {}
    files: list[ShardFile] = []
    for rank, told in enumerate(ranks):
        for tensor, (dtype, shape) in told["tensors"].items():
            entry = TensorEntry(dtype, tuple(shape), [])
            known = entries.setdefault(tensor, entry)
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"tensor {tensor!r}: rank {rank} has {dtype} {tuple(shape)}, another rank "
                    f"{known.dtype} {known.shape}; what differs between ranks belongs in "
                    "PerRank(...)"
                )
        for file, tensor, key, offset, start, count in told["pieces"]:
            entries[tensor].pieces.append(Piece(len(files) + file, key, offset, start, count))
        files += [_shard_file(file) for file in told["files"]]
    for entry in entries.values():
        entry.pieces.sort(key=lambda piece: (piece.start, piece.count))
    own_trees = [told["own_tree"] for told in ranks]
    return Manifest(
        step=name.step,
        attempt=name.attempt,
        id=name.id,
        parent=parent,
        created_s=time.time(),
        world_size=len(ranks),
        files=files,
        tensors=entries,
        tree=flat.tree,
        per_rank=own_trees if any(tree is not None for tree in own_trees) else [],
        facts={**_versions(), **facts},
    )


def _shard_file(told: dict[str, Any]) -> ShardFile:
    return ShardFile(**{**told, "block_crc32c": bytes.fromhex(told["block_crc32c"])})


@cache
def _versions() -> dict[str, Any]:
    try:
        own = version("tradewind")
    except PackageNotFoundError:
        own = "0.0.0+source"
    return {
        "versions": {
            "tradewind": own,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    }
