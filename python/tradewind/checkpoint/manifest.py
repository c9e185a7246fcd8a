"""The manifest of a commit: what its files are, where each tensor's elements stand in them, and the
state around the tensors. JSON, sealed by a checksum of itself; docs/checkpoint-format.md is its
schema. Readers take nothing on trust: `decode` checks every field, `manifest_checks.py` how they
belong together."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tradewind._core import native
from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NewerVersionError,
)
from tradewind.checkpoint.manifest_checks import MAX_CREATED_S, Defect, problem_of
from tradewind.checkpoint.strict_json import excerpt, loads

FORMAT = "tradewind-checkpoint"
VERSION = 1
NEEDS = "0.1.0"  # the first release that reads VERSION
MAX_MANIFEST_BYTES = 1 << 30

# The end of every manifest, in every version: the seal is the CRC32C of all bytes before its comma.
_SEAL = re.compile(rb',"seal":"([0-9a-f]{8})"\}\n')
_SEAL_BYTES = 20
_CRC = re.compile("[0-9a-f]{8}")
_RELEASE = re.compile(r"[0-9A-Za-z.+!-]{1,40}")


@dataclass(frozen=True)
class ShardFile:
    """A file of the commit. `block_crc32c`: CRC32C of each `block_bytes` of it, the last one being
    what is left, as u32 little-endian; `crc32c`: of all of it."""

    name: str
    size_bytes: int
    crc32c: int
    block_bytes: int
    block_crc32c: bytes


@dataclass(slots=True)
class Piece:
    """Elements [start, start + count) of a tensor, in row-major order: in file number `file`, from
    byte `offset_bytes` of the file, within what safetensors calls `key` there."""

    file: int
    key: str
    offset_bytes: int
    start: int
    count: int


@dataclass(slots=True)
class TensorEntry:
    """A logical tensor. `dtype`: name of safetensors; `pieces`: ascending, each element once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]


@dataclass(frozen=True)
class Manifest:
    """One commit. `parent`: folder of the commit that its attempt went on from; `created_s`: Unix
    time; `tree`: the state with references to tensors (tree.py); `per_rank`: each rank's own tree,
    one for each rank or none at all; `facts`: JSON that no reader depends on."""

    step: int
    attempt: int
    id: str
    parent: str | None
    created_s: float
    world_size: int
    files: list[ShardFile]
    tensors: dict[str, TensorEntry]
    tree: Any
    per_rank: list[Any] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`, the same for equal manifests.

    Raises CheckpointError for a manifest that `decode` would refuse: elements that no rank or two
    ranks have, names that leave the folder, more than 1 GiB.
    """
    problem = problem_of(manifest)
    if problem:
        raise CheckpointError(f"checkpoint of step {manifest.step}: {problem}")
    members = {
        "format": FORMAT,
        "version": VERSION,
        "needs": NEEDS,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "id": manifest.id,
        "parent": manifest.parent,
        "created_s": float(manifest.created_s),
        "world_size": manifest.world_size,
        "files": [_file_members(file) for file in manifest.files],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "pieces": [
                    (piece.file, piece.key, piece.offset_bytes, piece.start, piece.count)
                    for piece in tensor.pieces
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
        "tree": manifest.tree,
        "per_rank": manifest.per_rank,
        "facts": manifest.facts,
    }
    try:
        text = json.dumps(members, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint of step {manifest.step}: tree or facts are no JSON: {error}"
        ) from None
    body = text[:-1].encode("ascii")
    if len(body) + _SEAL_BYTES > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"checkpoint of step {manifest.step}: its manifest would have {len(body)} bytes; "
            f"expected at most {MAX_MANIFEST_BYTES}: give large lists of numbers as tensors"
        )
    return body + b',"seal":"%08x"}\n' % native.crc32c(body)


def decode(data: bytes, where: str) -> Manifest:
    """The manifest that `data` is. `where` (the path) begins messages.

    Raises DamagedCheckpointError that names what is wrong, and NewerVersionError for a sealed
    manifest of a version that this release does not read.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedCheckpointError(
            f"{where}: expected at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}"
        )
    found = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if found is None:
        raise DamagedCheckpointError(
            f"{where}: expected a seal at the end of its {len(data)} bytes, found none; it was cut "
            "off, or is no manifest"
        )
    body = data[:-_SEAL_BYTES]
    seal = native.crc32c(body)
    if seal != int(found[1], 16):
        raise DamagedCheckpointError(
            f"{where}: expected CRC32C {found[1].decode()} by its seal, got {seal:08x}"
        )
    members = loads(body + b"}", where)
    if not isinstance(members, dict):
        raise DamagedCheckpointError(f"{where}: expected an object, got {excerpt(members)}")
    _check_version(members, where)
    try:
        manifest = _manifest(members)
    except Defect as defect:
        raise DamagedCheckpointError(f"{where}: {defect}") from None
    problem = problem_of(manifest)
    if problem:
        raise DamagedCheckpointError(f"{where}: {problem}")
    return manifest


def _file_members(file: ShardFile) -> dict[str, object]:
    return {
        "name": file.name,
        "size_bytes": file.size_bytes,
        "crc32c": f"{file.crc32c:08x}",
        "block_bytes": file.block_bytes,
        "block_crc32c": base64.b64encode(file.block_crc32c).decode("ascii"),
    }


def _check_version(members: Mapping[str, object], where: str) -> None:
    if members.get("format") != FORMAT:
        raise DamagedCheckpointError(
            f'{where}: format: expected "{FORMAT}", got {excerpt(members.get("format"))}'
        )
    version, needs = members.get("version"), members.get("needs")
    if type(version) is not int or version < 1:
        raise DamagedCheckpointError(f"{where}: version: expected 1, got {excerpt(version)}")
    if not isinstance(needs, str) or not _RELEASE.fullmatch(needs):
        raise DamagedCheckpointError(f"{where}: needs: expected a release, got {excerpt(needs)}")
    if version > VERSION:
        raise NewerVersionError(
            f"{where}: format version {version}, this tradewind reads up to {VERSION}; it takes "
            f"tradewind {needs} or later: pip install 'tradewind>={needs}'"
        )


def _manifest(members: dict[str, Any]) -> Manifest:
    """From JSON of unknown content: every value has the type that its field says."""
    _expect_members(members, _MEMBERS, "manifest")
    created_s = members["created_s"]
    if type(created_s) not in (int, float) or not 0 <= created_s <= MAX_CREATED_S:
        raise Defect("created_s", "seconds since 1970", created_s)
    return Manifest(
        step=_integer(members["step"], "step"),
        attempt=_integer(members["attempt"], "attempt"),
        id=_text(members["id"], "id"),
        parent=None if members["parent"] is None else _text(members["parent"], "parent"),
        created_s=float(created_s),
        world_size=_integer(members["world_size"], "world_size"),
        files=[_file(file, idx) for idx, file in enumerate(_list(members["files"], "files"))],
        tensors={
            name: _tensor(tensor, name)
            for name, tensor in _object(members["tensors"], "tensors").items()
        },
        tree=members["tree"],
        per_rank=_list(members["per_rank"], "per_rank"),
        facts=_object(members["facts"], "facts"),
    )


def _file(members: Any, idx: int) -> ShardFile:
    what = f"file {idx}"
    _expect_members(_object(members, what), _FILE_MEMBERS, what)
    crc, blocks = members["crc32c"], members["block_crc32c"]
    if not isinstance(crc, str) or not _CRC.fullmatch(crc):
        raise Defect(f"{what}: crc32c", "8 digits of 0-9a-f", crc)
    try:
        block_crc32c = base64.b64decode(_text(blocks, f"{what}: block_crc32c"), validate=True)
    except (binascii.Error, ValueError):
        raise Defect(f"{what}: block_crc32c", "base64", blocks) from None
    return ShardFile(
        name=_text(members["name"], f"{what}: name"),
        size_bytes=_integer(members["size_bytes"], f"{what}: size_bytes"),
        crc32c=int(crc, 16),
        block_bytes=_integer(members["block_bytes"], f"{what}: block_bytes"),
        block_crc32c=block_crc32c,
    )


def _tensor(members: Any, name: str) -> TensorEntry:
    if type(members) is dict and members.keys() == _TENSOR_MEMBERS:
        dtype, shape, pieces = members["dtype"], members["shape"], members["pieces"]
        if type(dtype) is str and type(shape) is list and type(pieces) is list:
            for size in shape:
                if type(size) is not int:
                    raise Defect(f"tensor {excerpt(name)}: shape", "integers", size)
            return TensorEntry(dtype, tuple(shape), [_piece(piece, name) for piece in pieces])
    what = f"tensor {excerpt(name)}"
    _expect_members(_object(members, what), _TENSOR_MEMBERS, what)
    raise Defect(what, "a text as dtype, lists as shape and pieces", members)


def _piece(items: Any, name: str) -> Piece:
    if type(items) is list and len(items) == 5:
        file, key, offset_bytes, start, count = items
        if (
            type(file) is int
            and type(key) is str
            and type(offset_bytes) is int
            and type(start) is int
            and type(count) is int
        ):
            return Piece(file, key, offset_bytes, start, count)
    what = f"tensor {excerpt(name)}: piece"
    raise Defect(what, "[file, key, offset, start, count]", items)


def _expect_members(members: dict[str, Any], expected: frozenset[str], what: str) -> None:
    if members.keys() != expected:
        missing = ", ".join(sorted(expected - members.keys()))
        unknown = ", ".join(map(excerpt, sorted(members.keys() - expected)[:4]))
        told = "; ".join(
            part
            for part in (missing and f"without {missing}", unknown and f"with {unknown}")
            if part
        )
        raise Defect(what, "the members of this version", told)


def _integer(value: Any, what: str) -> int:
    if type(value) is not int:
        raise Defect(what, "an integer", value)
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise Defect(what, "a text", value)
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise Defect(what, "a list", value)
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise Defect(what, "an object", value)
    return value


_MEMBERS = frozenset(
    (
        *("format", "version", "needs", "step", "attempt", "id", "parent", "created_s"),
        *("world_size", "files", "tensors", "tree", "per_rank", "facts"),
    )
)
_FILE_MEMBERS = frozenset(("name", "size_bytes", "crc32c", "block_bytes", "block_crc32c"))
_TENSOR_MEMBERS = frozenset(("dtype", "shape", "pieces"))
