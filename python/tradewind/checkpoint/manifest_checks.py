"""How the parts of a manifest belong together: ranges, names of files, and that the pieces of every
tensor are each of its elements once, within their files. The same for writers and readers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tradewind.checkpoint.names import (
    MAX_ATTEMPT,
    MAX_STEP,
    MAX_WORLD_SIZE,
    SHARD_SUFFIX,
    CommitName,
)
from tradewind.checkpoint.safetensors_header import BITS_OF, PAGE_BYTES
from tradewind.checkpoint.strict_json import excerpt

if TYPE_CHECKING:
    from tradewind.checkpoint.manifest import Manifest, ShardFile, TensorEntry

MAX_BLOCK_BYTES = 1 << 30
MAX_DIMENSIONS = 64  # of torch
MAX_CREATED_S = 10**12

_MAX_BYTES = 2**63 - 1
_ELEMENT_BYTES = {dtype: bits // 8 for dtype, bits in BITS_OF.items() if bits % 8 == 0}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=@+-]{0,254}")


class Defect(ValueError):
    """One thing that is wrong in a manifest."""

    def __init__(self, what: str, expected: str, got: object) -> None:
        super().__init__(f"{what}: expected {expected}, got {excerpt(got)}")


def problem_of(manifest: Manifest) -> str:
    """What is wrong with a manifest whose fields have their types; empty where nothing is."""
    try:
        _check_name(manifest)
        _check_world(manifest)
        for idx, file in enumerate(manifest.files):
            _check_file(file, f"file {idx}")
        _check_distinct(manifest.files)
        sizes = [file.size_bytes for file in manifest.files]
        for name, tensor in manifest.tensors.items():
            _check_tensor(tensor, name, sizes)
    except Defect as defect:
        return str(defect)
    return ""


def _check_name(manifest: Manifest) -> None:
    _check_range("step", manifest.step, 0, MAX_STEP)
    _check_range("attempt", manifest.attempt, 0, MAX_ATTEMPT)
    try:
        CommitName(manifest.attempt, manifest.step, manifest.id)
    except ValueError:
        raise Defect("id", "16 digits of 0-9a-f", manifest.id) from None
    if manifest.parent is not None and CommitName.parse(manifest.parent) is None:
        raise Defect("parent", "the name of a commit's folder, or null", manifest.parent)
    if not 0 <= manifest.created_s <= MAX_CREATED_S:
        raise Defect("created_s", "seconds since 1970", manifest.created_s)


def _check_world(manifest: Manifest) -> None:
    _check_range("world_size", manifest.world_size, 1, MAX_WORLD_SIZE)
    if len(manifest.per_rank) not in (0, manifest.world_size):
        expected = f"one for each of {manifest.world_size} ranks, or none"
        raise Defect("per_rank", expected, len(manifest.per_rank))
    for tree in manifest.per_rank:
        if tree is not None and type(tree) is not dict:
            raise Defect("per_rank", "objects or null", tree)


def _check_file(file: ShardFile, what: str) -> None:
    name = file.name
    if not _FILE_NAME.fullmatch(name) or not name.endswith(SHARD_SUFFIX):
        expected = f"the bare name of a file in the manifest's own folder, *{SHARD_SUFFIX}"
        raise Defect(f"{what}: name", expected, name)
    what = f"{what} ({name})"
    _check_range(f"{what}: size_bytes", file.size_bytes, 8, _MAX_BYTES)
    _check_range(f"{what}: crc32c", file.crc32c, 0, 2**32 - 1)
    _check_range(f"{what}: block_bytes", file.block_bytes, PAGE_BYTES, MAX_BLOCK_BYTES)
    if file.block_bytes % PAGE_BYTES:
        raise Defect(f"{what}: block_bytes", f"a multiple of {PAGE_BYTES}", file.block_bytes)
    num_blocks = -(-file.size_bytes // file.block_bytes)
    if len(file.block_crc32c) != 4 * num_blocks:
        expected = f"{4 * num_blocks} bytes for {num_blocks} blocks"
        raise Defect(f"{what}: block_crc32c", expected, len(file.block_crc32c))


def _check_distinct(files: Sequence[ShardFile]) -> None:
    seen: set[str] = set()
    for file in files:
        if file.name.lower() in seen:  # some file systems do not tell case apart
            raise Defect("files", "every name once", file.name)
        seen.add(file.name.lower())


def _check_tensor(tensor: TensorEntry, name: str, file_sizes: Sequence[int]) -> None:
    dtype, shape = tensor.dtype, tensor.shape
    element_bytes = _ELEMENT_BYTES.get(dtype)
    if element_bytes is None:
        raise _defect(name, "dtype", "one of safetensors", dtype)
    if len(shape) > MAX_DIMENSIONS or (shape and not 0 <= min(shape) <= max(shape) <= _MAX_BYTES):
        raise _defect(name, "shape", f"at most {MAX_DIMENSIONS} sizes from 0", [*shape])
    num_elements = math.prod(shape)
    if num_elements * element_bytes > _MAX_BYTES:
        raise _defect(name, "shape", "less than 2**63 bytes", [*shape])
    at = 0
    for piece in tensor.pieces:
        file, start, count = piece.file, piece.start, piece.count
        if not 0 <= file < len(file_sizes):
            raise _defect(name, "file", f"a number below {len(file_sizes)}", file)
        if not piece.key:
            raise _defect(name, "key", "a name", piece.key)
        if start != at:
            raise _defect(name, _gap(start, at), f"a piece from {at}", start)
        if count < 1 and (num_elements or count):
            raise _defect(name, "count", "elements", count)
        at += count
        end = piece.offset_bytes + count * element_bytes
        if not 8 <= piece.offset_bytes <= end <= file_sizes[file]:
            expected = f"bytes within the {file_sizes[file]} of file {file}"
            raise _defect(name, "offset", expected, [piece.offset_bytes, end])
    if at != num_elements:
        raise _defect(name, "pieces", f"{num_elements} elements for {[*shape]}", at)


def _defect(name: str, what: str, expected: str, got: object) -> Defect:
    return Defect(f"tensor {excerpt(name)}: {what}", expected, got)


def _gap(start: int, at: int) -> str:
    return "elements that two pieces have" if start < at else "elements that no piece has"


def _check_range(what: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise Defect(what, f"{smallest} to {largest}", value)
