"""The header of a safetensors file: composed so that data begins at a page, parsed as strictly as
the safetensors library does (and more: no member twice).

A file is a u64 (little-endian) that says how long the header is, the header, and the data. The
header is a JSON object: tensors by name, {"dtype", "shape", "data_offsets": [begin, end]} counted
from the beginning of the data, and "__metadata__" with texts. Data has no holes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tradewind.checkpoint.errors import DamagedCheckpointError
from tradewind.checkpoint.strict_json import excerpt, loads

PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # of the library
PAD_PREFIX = "__pad__"
METADATA = "__metadata__"
SHARDING_INFO = "DCP_SHARDING_INFO"

_LENGTH_BYTES = 8
_MAX_BYTES = 2**63 - 1

# Bits of an element, by dtype.
BITS_OF = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64},
    **{"U64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


class Entry(NamedTuple):
    """One tensor of a file. `begin`, `end`: bytes from where the data begins."""

    key: str
    dtype: str
    shape: Sequence[int]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds. `data_begin`: where in the file its data begins, in bytes."""

    entries: tuple[Entry, ...]  # in the order of their bytes
    metadata: Mapping[str, str]
    data_begin: int


def compose(
    entries: Iterable[tuple[str, str, Sequence[int], int, int]], metadata: Mapping[str, str]
) -> bytes:
    """The first bytes of a file with these tensors, (key, dtype, shape, begin, end) in the order of
    their bytes, padded with spaces to a multiple of 4096.

    Raises ValueError where they leave holes, overlap, or take other bytes than their shapes: fill
    gaps with U8 tensors named "__pad__0", "__pad__1" and so on.
    """
    members: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape, begin, end in entries:
        if key in members or key == METADATA:
            raise ValueError(f"safetensors header: {excerpt(key)}: a name that is taken")
        problem = _problem(dtype, shape, begin, end, at)
        if problem:
            raise ValueError(f"safetensors header: tensor {excerpt(key)}: {problem}")
        members[key] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
        at = end
    text = json.dumps(members, separators=(",", ":")).encode("ascii")
    size = -(_LENGTH_BYTES + len(text)) // PAGE_BYTES * -PAGE_BYTES - _LENGTH_BYTES
    if size > MAX_HEADER_BYTES:
        raise ValueError(
            f"safetensors header: expected at most {MAX_HEADER_BYTES} bytes, got {size}: "
            "too many tensors for one file, or too long names"
        )
    return size.to_bytes(_LENGTH_BYTES, "little") + text.ljust(size)


def sharding_info(starts: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The metadata by which torch.distributed.checkpoint's Hugging Face reader puts the tensors of
    several files together: for every key of the file (pads too) where in the logical tensor it
    begins. A flat run of elements: [first element]; a whole tensor: a zero for each dimension."""
    offsets = {key: {"saved_offsets": [*start]} for key, start in starts.items()}
    return {SHARDING_INFO: json.dumps(offsets, separators=(",", ":"))}


def header_bytes(data: bytes, file_bytes: int, where: str) -> int:
    """How many bytes of a file `parse` needs, from its first eight and its size.

    Raises DamagedCheckpointError where no header can be that long.
    """
    if file_bytes < _LENGTH_BYTES or len(data) < _LENGTH_BYTES:
        raise DamagedCheckpointError(
            f"{where}: expected at least {_LENGTH_BYTES} bytes, got {min(file_bytes, len(data))}"
        )
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if size > MAX_HEADER_BYTES:
        raise DamagedCheckpointError(
            f"{where}: header: expected at most {MAX_HEADER_BYTES} bytes, got {size}"
        )
    if _LENGTH_BYTES + size > file_bytes:
        raise DamagedCheckpointError(
            f"{where}: header: expected {size} bytes after the length, the file has "
            f"{file_bytes - _LENGTH_BYTES}"
        )
    return _LENGTH_BYTES + size


def parse(data: bytes, file_bytes: int, where: str) -> Header:
    """The header at the beginning of a file. `data`: its first `header_bytes` or more; `where`
    begins messages.

    Raises DamagedCheckpointError that names the defect, for every file that the safetensors
    library refuses.
    """
    end = header_bytes(data, file_bytes, where)
    if len(data) < end:
        raise DamagedCheckpointError(f"{where}: header: expected {end} bytes, got {len(data)}")
    text = data[_LENGTH_BYTES:end]
    if not text.startswith(b"{"):
        raise DamagedCheckpointError(
            f"{where}: header: expected to begin with {{, got {text[:1]!r}"
        )
    members = loads(text, f"{where}: header")
    assert isinstance(members, dict)  # it begins with {
    metadata = _metadata(members.pop(METADATA, {}), where)
    entries = [_entry(key, member, where) for key, member in members.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        problem = _problem(*entry[1:], at)
        if problem:
            raise DamagedCheckpointError(f"{where}: tensor {excerpt(entry.key)}: {problem}")
        at = entry.end
    if end + at != file_bytes:
        raise DamagedCheckpointError(
            f"{where}: expected {end + at} bytes by its header, the file has {file_bytes}"
        )
    return Header(tuple(entries), metadata, end)


def _metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(type(text) is str for text in value.values()):
        raise DamagedCheckpointError(
            f"{where}: {METADATA}: expected texts by name, got {excerpt(value)}"
        )
    return value


def _entry(key: str, value: object, where: str) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            if type(begin) is int and type(end) is int:
                return Entry(key, dtype, tuple(shape), begin, end)
    raise DamagedCheckpointError(
        f"{where}: tensor {excerpt(key)}: expected dtype, shape and two data_offsets, got "
        f"{excerpt(value)}"
    )


def _problem(dtype: str, shape: Sequence[int], begin: int, end: int, at: int) -> str:
    """What is wrong with a tensor that should begin at `at`; empty where nothing is."""
    bits = BITS_OF.get(dtype)
    if bits is None:
        return f"expected a dtype of safetensors, got {excerpt(dtype)}"
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_BYTES:
            return f"expected a shape of sizes from 0, got {excerpt([*shape])}"
        bits *= size  # zero ends the growth; else it ends here
        if bits > 8 * _MAX_BYTES:
            return f"shape {excerpt([*shape])}: more bytes than 2**63"
    if bits % 8:
        return f"shape {excerpt([*shape])}: expected whole bytes of {dtype}, got {bits} bits"
    if begin != at:
        return f"expected to begin at {at}, where the one before ends, got {begin}"
    if end - begin != bits // 8:
        return f"{dtype}{excerpt([*shape])}: expected {bits // 8} bytes, got {end - begin}"
    return ""
