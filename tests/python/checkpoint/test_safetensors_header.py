"""Headers of safetensors files, against the safetensors library in both directions."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.checkpoint.dtypes import DTYPE_OF, NAME_OF
from tradewind.checkpoint.errors import DamagedCheckpointError
from tradewind.checkpoint.safetensors_header import (
    BITS_OF,
    Entry,
    Header,
    compose,
    header_bytes,
    parse,
    sharding_info,
)

names = st.text(st.characters(codec="utf-8"), max_size=6).filter(
    lambda name: name != "__metadata__"
)
described = st.dictionaries(
    names,
    st.tuples(st.sampled_from(sorted(DTYPE_OF)), st.lists(st.integers(0, 3), max_size=3)),
    max_size=5,
)


def laid_out(
    tensors: dict[str, tuple[str, list[int]]],
) -> list[tuple[str, str, list[int], int, int]]:
    entries, at = [], 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BITS_OF[dtype] // 8
        entries.append((name, dtype, shape, at, end))
        at = end
    return entries


def library_reads(data: bytes) -> dict[str, Any] | None:
    """Name to (dtype, shape, bytes) as the library reads them; None where it refuses."""
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in found}


def we_read(data: bytes) -> dict[str, Any] | None:
    try:
        header = parse(data, len(data), "file")
    except DamagedCheckpointError:
        return None
    begin = header.data_begin
    return {
        e.key: (e.dtype, tuple(e.shape), data[begin + e.begin : begin + e.end])
        for e in header.entries
    }


@settings(max_examples=150, deadline=None)
@given(described, st.dictionaries(names, st.text(st.characters(codec="utf-8")), max_size=3))
def test_what_we_compose_the_library_reads(tensors: Any, metadata: dict[str, str]) -> None:
    entries = laid_out(tensors)
    header = compose(entries, metadata)
    size = entries[-1][4] if entries else 0
    data = header + random.Random(size).randbytes(size)
    assert len(header) % 4096 == 0
    found = library_reads(data)
    assert found is not None and found == we_read(data)
    assert {name: (dtype, list(shape)) for name, (dtype, shape, _) in found.items()} == tensors
    parsed = parse(data, len(data), "file")
    assert parsed.metadata == metadata and parsed.data_begin == len(header)
    assert [tuple(entry) for entry in parsed.entries] == [
        (key, dtype, tuple(shape), begin, end) for key, dtype, shape, begin, end in entries
    ] or any(entry[3] == entry[4] for entry in entries)  # empty ones have no place of their own


@pytest.mark.parametrize("dtype", NAME_OF, ids=str)
def test_every_dtype_has_the_librarys_name(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.uint8).to(dtype)
    data = safetensors.torch.save({"t": tensor}, metadata={"a": "b"})
    header = parse(data, len(data), "file")
    (entry,) = header.entries
    assert (entry.key, entry.dtype, tuple(entry.shape)) == ("t", NAME_OF[dtype], (2, 3))
    assert BITS_OF[entry.dtype] == 8 * tensor.element_size() and header.metadata == {"a": "b"}
    composed = compose(header.entries, {}) + data[header.data_begin :]
    loaded = safetensors.torch.load(composed)["t"]
    assert loaded.dtype == dtype and loaded.shape == (2, 3)


def test_a_file_with_pads_and_sharding_info() -> None:
    entries = [
        ("w", "F32", (3,), 0, 12),
        ("__pad__0", "U8", (52,), 12, 64),
        ("b", "BF16", (2, 1), 64, 68),
        ("__pad__1", "U8", (0,), 68, 68),
    ]
    starts = {"w": [6], "__pad__0": [0], "b": [0, 0], "__pad__1": [0]}
    header = compose(entries, {"format": "pt", **sharding_info(starts)})
    data = header + np.arange(3, dtype=np.float32).tobytes() + bytes(56)
    assert safetensors.torch.load(data).keys() == starts.keys()
    told = json.loads(parse(data, len(data), "file").metadata["DCP_SHARDING_INFO"])
    assert told == {name: {"saved_offsets": offsets} for name, offsets in starts.items()}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("a", "F32", (1,), 0, 4), ("a", "F32", (1,), 4, 8)], "taken"),
        ([("__metadata__", "F32", (1,), 0, 4)], "taken"),
        ([("a", "F32", (1,), 4, 8)], "to begin at 0"),
        ([("a", "F32", (2,), 0, 8), ("b", "F32", (1,), 4, 8)], "to begin at 8"),
        ([("a", "F32", (2,), 0, 4)], "expected 8 bytes, got 4"),
        ([("a", "Q8", (2,), 0, 2)], "a dtype of safetensors"),
        ([("a", "U8", (-1,), 0, 1)], "sizes from 0"),
        ([("a", "F4", (1,), 0, 1)], "whole bytes"),
    ],
)
def test_headers_that_nobody_could_read_are_not_composed(entries: Any, words: str) -> None:
    with pytest.raises(ValueError, match="safetensors header: ") as caught:
        compose(entries, {})
    assert words in str(caught.value)


def file_of(header: object, data: bytes = b"", pad: bytes = b" ", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += pad * (-len(text) % 8)
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def one(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DEFECTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at least 8 bytes, got 0"),
    "no length": (b"\x02\x00\x00", "at least 8 bytes, got 3"),
    "header cut off": (file_of(one(), b"ab")[:20], "bytes after the length, the file has 12"),
    "header too long": (file_of(one(), b"ab", size=100_000_001), "at most 100000000 bytes"),
    "length of all ones": (b"\xff" * 8 + b"{}", "at most 100000000"),
    "no object": (file_of(b"[1]"), "to begin with {"),
    "leading space": (file_of(b" {}"), "to begin with {"),
    "no header": (file_of(b"", pad=b""), "to begin with {"),
    "no JSON": (file_of(b'{"t": '), "no JSON"),
    "padded with NUL": (file_of(one(), b"ab", pad=b"\0"), "no JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "UTF-8 text, got byte 0xff"),
    "half a surrogate": (file_of(b'{"__metadata__":{"a":"\\ud800"}}'), "half a surrogate pair"),
    "twice": (
        file_of(b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":1}', b"a"),
        'member "t" stands there twice',
    ),
    "NaN": (file_of(b'{"t":NaN}'), "NaN is no number"),
    "bottomless": (file_of(b'{"t":' + b"[" * 100_000), "nested deeper"),
    "huge number": (file_of(b'{"t":' + b"1" * 10_000 + b"}"), "no JSON that is read here"),
    "trailing bytes": (file_of(one(), b"abc"), "the file has"),
    "missing bytes": (file_of(one(), b"a"), "the file has"),
    "hole": (file_of(one(offsets=(1, 3)), b"abc"), "expected to begin at 0"),
    "overlap": (
        file_of({**one(), "u": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, b"abc"),
        "expected to begin at 2",
    ),
    "other size": (file_of(one(shape=(3,)), b"ab"), "expected 3 bytes, got 2"),
    "backwards": (file_of(one(offsets=(0, -2)), b"ab"), "got -2"),
    "unknown dtype": (file_of(one("F33"), b"ab"), 'a dtype of safetensors, got "F33"'),
    "dtype number": (file_of(one(3), b"ab"), "expected dtype, shape and two data_offsets"),
    "negative shape": (file_of(one(shape=(-1, -2)), b"ab"), "sizes from 0"),
    "float shape": (file_of(one(shape=(2.0,)), b"ab"), "sizes from 0"),
    "true shape": (file_of(one(shape=(2, True)), b"ab"), "sizes from 0"),
    "overflow": (file_of(one(shape=(2**62, 2**62)), b"ab"), "more bytes than 2**63"),
    "overflow before zero": (
        file_of(one(shape=(2**62, 2**62, 0), offsets=(0, 0))),
        "more bytes than 2**63",
    ),
    "half a byte": (file_of(one("F4", (3,)), b"ab"), "whole bytes"),
    "three offsets": (file_of(one(offsets=(0, 1, 2)), b"ab"), "two data_offsets"),
    "float offsets": (file_of(one(offsets=(0, 2.0)), b"ab"), "two data_offsets"),
    "no offsets": (file_of({"t": {"dtype": "U8", "shape": [0]}}), "two data_offsets"),
    "metadata number": (file_of({"__metadata__": {"a": 1}}), "expected texts"),
    "metadata list": (file_of({"__metadata__": []}), "expected texts"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_named(defect: str) -> None:
    data, words = DEFECTS[defect]
    # The format's page asks for the bracket, the library does not.
    assert (library_reads(data) is None) == (defect != "leading space")
    with pytest.raises(DamagedCheckpointError, match="some/file: ") as caught:
        parse(data, len(data), "some/file")
    assert words in str(caught.value)


def test_a_header_that_was_not_read_whole() -> None:
    data = file_of(one(), b"ab")
    needed = header_bytes(data[:8], len(data), "file")
    assert needed == len(data) - 2
    assert parse(data[:needed], len(data), "file") == Header(
        (Entry("t", "U8", (2,), 0, 2),), {}, needed
    )
    with pytest.raises(DamagedCheckpointError, match=f"expected {needed} bytes"):
        parse(data[: needed - 1], len(data), "file")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_changed_file_is_read_as_the_library_reads_it_or_refused(data: st.DataObject) -> None:
    whole = bytearray(
        file_of(
            {**one(), "u": {"dtype": "I16", "shape": [1, 2], "data_offsets": [2, 6]}}, b"abcdef"
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        what = data.draw(st.sampled_from(["flip", "cut", "insert", "remove"]))
        if what == "flip":
            whole[at] = data.draw(st.sampled_from([*b'0129[]{},:"-.eU8I16 a\\'])) if at >= 8 else 0
        elif what == "cut" and at:
            del whole[at:]
        elif what == "insert":
            whole.insert(at, data.draw(st.integers(0, 255)))
        elif len(whole) > 1:
            del whole[at]
    ours = we_read(bytes(whole))
    if ours is not None:
        assert ours == library_reads(bytes(whole))
