"""Manifests: what was encoded comes back, and whatever else is there is named, never believed."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NewerVersionError,
)
from tradewind.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Piece,
    ShardFile,
    TensorEntry,
    decode,
    encode,
)

ID = "b27c4698e855ca4a"
PARENT = "step-000000000004.000000002.00000000aaaaaaaa"
BLOCK = 1 << 20


def table_crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, from its polynomial (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seal(members: dict[str, Any] | bytes) -> bytes:
    """What `encode` should have made of these members, by the format's page alone."""
    body = members
    if isinstance(members, dict):
        body = json.dumps(members, separators=(",", ":")).encode()[:-1]
    assert isinstance(body, bytes)
    return body + b',"seal":"%08x"}\n' % table_crc32c(body)


def a_file(number: int, size_bytes: int = BLOCK + 4096) -> ShardFile:
    num_blocks = -(-size_bytes // BLOCK)
    blocks = struct.pack(f"<{num_blocks}I", *range(num_blocks))
    return ShardFile(f"shard-{number:05d}-of-00002.safetensors", size_bytes, 77, BLOCK, blocks)


def a_manifest() -> Manifest:
    return Manifest(
        step=10,
        attempt=3,
        id=ID,
        parent=PARENT,
        created_s=1.7e9,
        world_size=2,
        files=[a_file(0), a_file(1, 8192)],
        tensors={
            "w": TensorEntry("F32", (5, 3), [Piece(0, "w", 4096, 0, 8), Piece(1, "w", 4096, 8, 7)]),
            "b": TensorEntry("BF16", (), [Piece(1, "b", 4124, 0, 1)]),
            "none": TensorEntry("I64", (0, 4), []),
            "empty": TensorEntry("U8", (4, 0), [Piece(1, "empty", 8192, 0, 0)]),
        },
        tree={"model": {"$": "tensor", "name": "w"}, "lr": 0.1, 'é"\\\n': [None, True, -(2**53)]},
        per_rank=[{"rng": [1, 2]}, None],
        facts={"versions": {"torch": "2.13.0"}},
    )


def test_the_bytes_are_those_of_the_page() -> None:
    manifest = a_manifest()
    expected = {
        "format": "tradewind-checkpoint",
        "version": 1,
        "needs": "0.1.0",
        "step": 10,
        "attempt": 3,
        "id": ID,
        "parent": PARENT,
        "created_s": 1.7e9,
        "world_size": 2,
        "files": [
            {
                "name": "shard-00000-of-00002.safetensors",
                "size_bytes": BLOCK + 4096,
                "crc32c": "0000004d",
                "block_bytes": BLOCK,
                "block_crc32c": base64.b64encode(b"\0\0\0\0\1\0\0\0").decode(),
            },
            {
                "name": "shard-00001-of-00002.safetensors",
                "size_bytes": 8192,
                "crc32c": "0000004d",
                "block_bytes": BLOCK,
                "block_crc32c": base64.b64encode(bytes(4)).decode(),
            },
        ],
        "tensors": {
            "w": {
                "dtype": "F32",
                "shape": [5, 3],
                "pieces": [[0, "w", 4096, 0, 8], [1, "w", 4096, 8, 7]],
            },
            "b": {"dtype": "BF16", "shape": [], "pieces": [[1, "b", 4124, 0, 1]]},
            "none": {"dtype": "I64", "shape": [0, 4], "pieces": []},
            "empty": {"dtype": "U8", "shape": [4, 0], "pieces": [[1, "empty", 8192, 0, 0]]},
        },
        "tree": manifest.tree,
        "per_rank": manifest.per_rank,
        "facts": manifest.facts,
    }
    assert encode(manifest) == seal(expected)
    assert decode(seal(expected), "m") == manifest
    assert encode(a_manifest()) == encode(manifest)


def test_members_may_stand_in_any_order_and_spaces_between_them() -> None:
    members = json.loads(encode(a_manifest()))
    del members["seal"]
    body = json.dumps(dict(reversed(members.items())), indent=2, ensure_ascii=False).encode()
    assert decode(seal(body[:-1]), "m") == a_manifest()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def made(draw: st.DrawFn) -> Manifest:
    world_size = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 2**40), min_size=world_size, max_size=world_size))
    block_bytes = 4096 * draw(st.integers(2**14, 2**18))
    files = []
    for idx, size_bytes in enumerate(sizes):
        table = bytes(4 * -(-(size_bytes + 8) // block_bytes))
        crc = draw(st.integers(0, 2**32 - 1))
        files.append(ShardFile(f"s{idx}.safetensors", size_bytes + 8, crc, block_bytes, table))
    tensors = {}
    for name in draw(st.lists(st.text(max_size=5), max_size=4, unique=True)):
        count = draw(st.integers(0, min(sizes)))
        cut = draw(st.integers(0, count))
        pieces = [Piece(0, "k", 8, 0, cut), Piece(world_size - 1, "k", 8, cut, count - cut)]
        kept = [piece for piece in pieces if piece.count]
        tensors[name] = TensorEntry(draw(st.sampled_from(["U8", "BOOL", "I8"])), (count,), kept)
    return Manifest(
        step=draw(st.integers(0, 10**12 - 1)),
        attempt=draw(st.integers(0, 10**9 - 1)),
        id=draw(st.text("0123456789abcdef", min_size=16, max_size=16)),
        parent=draw(st.sampled_from([None, PARENT])),
        created_s=draw(st.floats(0, 1e12)),
        world_size=world_size,
        files=files,
        tensors=tensors,
        tree=draw(json_values),
        per_rank=draw(st.sampled_from([[], [{"a": 1}] * world_size, [None] * world_size])),
        facts=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)),
    )


@settings(max_examples=150, deadline=None)
@given(made())
def test_every_manifest_comes_back(manifest: Manifest) -> None:
    data = encode(manifest)
    back = decode(data, "m")
    assert back == manifest and encode(back) == data
    assert data.isascii() and data.endswith(b"}\n")


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = encode(a_manifest())
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(DamagedCheckpointError, match="some/manifest"):
                decode(bytes(flipped), "some/manifest")
        with pytest.raises(DamagedCheckpointError, match="some/manifest"):
            decode(data[:at], "some/manifest")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_other_damage_is_found(data: st.DataObject) -> None:
    whole = encode(a_manifest())
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    other = data.draw(
        st.binary(max_size=20) | st.just(bytes(last - first)) | st.just(whole[first:last] * 2)
    )
    changed = whole[:first] + other + whole[last:]
    if changed != whole:
        with pytest.raises(DamagedCheckpointError):
            decode(changed, "m")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected a seal at the end of its 0 bytes"),
        (b"{}", "expected a seal"),
        (b'{"a":1,"seal":"0000000G"}\n', "expected a seal"),
        (encode(a_manifest())[:-1], "expected a seal"),
        (encode(a_manifest()) + b"\n", "expected a seal"),
        (b'{"a":1,"seal":"00000000"}\n', "expected CRC32C 00000000 by its seal"),
        (encode(a_manifest()).upper(), "expected a seal"),
        (seal(b'{"a":'), "no JSON"),
        (seal(b'["a"'), "no JSON"),
        (seal(b'{"format":"x"'), 'format: expected "tradewind-checkpoint", got "x"'),
        (seal(b'{"step":1,"step":2'), 'member "step" stands there twice'),
        (seal(b'{"step":NaN'), "NaN is no number"),
        (seal(b'{"step":1e999'), "beyond float64"),
        (seal(b'{"step":' + b"9" * 5000), "no JSON that is read here"),
        (seal(b'{"step":"\xff"'), "UTF-8 text, got byte 0xff"),
        (seal(b'{"step":"\\ud800"'), "half a surrogate pair"),
        (seal(b'{"tree":' + b"[" * 100_000 + b"]" * 100_000), "nested deeper"),
    ],
)
def test_what_is_no_manifest(data: bytes, words: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="some/manifest: ") as caught:
        decode(data, "some/manifest")
    assert words in str(caught.value)


class Endless(bytes):
    def __len__(self) -> int:
        return MAX_MANIFEST_BYTES + 1


def test_a_manifest_beyond_its_limit_is_not_read() -> None:
    with pytest.raises(DamagedCheckpointError, match="at most 1073741824 bytes"):
        decode(Endless(b"x"), "m")


def test_a_manifest_beyond_its_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(CheckpointError, match="at most 500: give large lists of numbers"):
        encode(a_manifest())


def put(*path: Any) -> Callable[[Any], None]:
    """A change of members: the last of `path` to where the others lead."""
    *way, last, value = path

    def change(members: Any) -> None:
        for step in way:
            members = members[step]
        members[last] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    *way, last = path

    def change(members: Any) -> None:
        for step in way:
            members = members[step]
        del members[last]

    return change


FILE = ("files", 0)
W = ("tensors", "w")
PIECE = (*W, "pieces", 0)
A_LARGE_TABLE = base64.b64encode(bytes(4 * 2**20)).decode()

CORRUPTIONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "version 0": (put("version", 0), "version: expected 1, got 0"),
    "version true": (put("version", True), "version: expected 1, got true"),
    "version text": (put("version", "1"), "version: expected 1"),
    "no version": (drop("version"), "version: expected 1, got null"),
    "no needs": (drop("needs"), "needs: expected a release, got null"),
    "needs a command": (put("needs", "1'; rm -rf ~"), "needs: expected a release"),
    "no step": (drop("step"), "without step"),
    "unknown member": (put("extra", 1), 'with "extra"'),
    "step negative": (put("step", -1), "step: expected 0 to 999999999999, got -1"),
    "step too large": (put("step", 10**12), "step: expected 0 to"),
    "step float": (put("step", 1.0), "step: expected an integer, got 1.0"),
    "step true": (put("step", True), "step: expected an integer, got true"),
    "attempt negative": (put("attempt", -1), "attempt: expected 0 to"),
    "attempt too large": (put("attempt", 10**9), "attempt: expected 0 to"),
    "id short": (put("id", "b27c"), "id: expected 16 digits"),
    "id number": (put("id", 3), "id: expected a text"),
    "parent a path": (put("parent", "../step"), "parent: expected the name of a commit's folder"),
    "parent number": (put("parent", 3), "parent: expected a text"),
    "created text": (put("created_s", "now"), "created_s: expected seconds"),
    "created negative": (put("created_s", -1.0), "created_s: expected seconds"),
    "created too late": (put("created_s", 1e13), "created_s: expected seconds"),
    "created huge": (put("created_s", 10**400), "created_s: expected seconds"),
    "world of none": (put("world_size", 0), "world_size: expected 1 to"),
    "world too large": (put("world_size", 10**5), "world_size: expected 1 to"),
    "files an object": (put("files", {}), "files: expected a list"),
    "file a text": (put(*FILE, "shard"), "file 0: expected an object"),
    "file without size": (drop(*FILE, "size_bytes"), "file 0: expected the members of this"),
    "file with more": (put(*FILE, "mode", 7), 'with "mode"'),
    "file outside": (put(*FILE, "name", "../w.safetensors"), "in the manifest's own folder"),
    "file absolute": (put(*FILE, "name", "/etc/w.safetensors"), "in the manifest's own folder"),
    "file below": (put(*FILE, "name", "a/w.safetensors"), "in the manifest's own folder"),
    "file backslash": (put(*FILE, "name", "..\\w.safetensors"), "in the manifest's own folder"),
    "file of a drive": (put(*FILE, "name", "C:w.safetensors"), "in the manifest's own folder"),
    "file with NUL": (put(*FILE, "name", "w\0.safetensors"), "in the manifest's own folder"),
    "file with newline": (put(*FILE, "name", "w\n.safetensors"), "in the manifest's own folder"),
    "file hidden": (put(*FILE, "name", ".w.safetensors"), "in the manifest's own folder"),
    "file too long": (put(*FILE, "name", "w" * 300 + ".safetensors"), "manifest's own folder"),
    "file without name": (put(*FILE, "name", ""), "in the manifest's own folder"),
    "file dots": (put(*FILE, "name", ".."), "in the manifest's own folder"),
    "file of another kind": (put(*FILE, "name", "manifest.json"), "manifest's own folder"),
    "file a number": (put(*FILE, "name", 3), "file 0: name: expected a text"),
    "file twice": (put(*FILE, "name", "shard-00001-of-00002.safetensors"), "every name once"),
    "file twice but for case": (
        put(*FILE, "name", "Shard-00001-of-00002.safetensors"),
        "every name once",
    ),
    "file size negative": (put(*FILE, "size_bytes", -1), "size_bytes: expected 8 to"),
    "file size huge": (put(*FILE, "size_bytes", 2**63), "size_bytes: expected 8 to"),
    "file size float": (put(*FILE, "size_bytes", 8.0), "size_bytes: expected an integer"),
    "file crc number": (put(*FILE, "crc32c", 77), "crc32c: expected 8 digits"),
    "file crc short": (put(*FILE, "crc32c", "4d"), "crc32c: expected 8 digits"),
    "file crc capital": (put(*FILE, "crc32c", "0000004D"), "crc32c: expected 8 digits"),
    "block of 0": (put(*FILE, "block_bytes", 0), "block_bytes: expected 4096 to"),
    "block of 2 GiB": (put(*FILE, "block_bytes", 2**31), "block_bytes: expected 4096 to"),
    "block odd": (put(*FILE, "block_bytes", 5000), "a multiple of 4096, got 5000"),
    "blocks text": (put(*FILE, "block_crc32c", "?"), "block_crc32c: expected base64"),
    "blocks number": (put(*FILE, "block_crc32c", 3), "block_crc32c: expected base64, got 3"),
    "a block missing": (put(*FILE, "block_crc32c", "AAAAAA=="), "8 bytes for 2 blocks, got 4"),
    "blocks too many": (put(*FILE, "block_crc32c", A_LARGE_TABLE), "8 bytes for 2 blocks"),
    "tensors a list": (put("tensors", []), "tensors: expected an object"),
    "tensor a list": (put(*W, []), 'tensor "w": expected an object'),
    "tensor without pieces": (drop(*W, "pieces"), 'tensor "w": expected the members of this'),
    "dtype unknown": (put(*W, "dtype", "F33"), 'tensor "w": dtype: expected one of safetensors'),
    "dtype of half bytes": (put(*W, "dtype", "F4"), 'tensor "w": dtype: expected one'),
    "dtype number": (put(*W, "dtype", 3), "expected a text as dtype"),
    "shape text": (put(*W, "shape", "53"), "lists as shape and pieces"),
    "shape negative": (put(*W, "shape", [-5, -3]), "64 sizes from 0"),
    "shape float": (put(*W, "shape", [5.0, 3]), "shape: expected integers, got 5.0"),
    "shape true": (put(*W, "shape", [15, True]), "shape: expected integers, got true"),
    "shape overflow": (put(*W, "shape", [2**40, 2**40]), "less than 2**63 bytes"),
    "shape huge": (put(*W, "shape", [10**300]), "64 sizes from 0"),
    "shape of many": (put(*W, "shape", [1] * 65), "64 sizes from 0"),
    "shape other": (put(*W, "shape", [5, 4]), "pieces: expected 20 elements for [5, 4], got 15"),
    "pieces an object": (put(*W, "pieces", {}), "lists as shape and pieces"),
    "no pieces": (put(*W, "pieces", []), "pieces: expected 15 elements"),
    "piece missing": (drop(*PIECE), "elements that no piece has: expected a piece from 0, got 8"),
    "piece twice": (put(*W, "pieces", 1, [0, "w", 4096, 0, 8]), "elements that two pieces have"),
    "piece short": (put(*PIECE, 4, 7), "elements that no piece has: expected a piece from 7"),
    "piece overlapping": (put(*PIECE, 4, 9), "elements that two pieces have"),
    "last piece long": (put(*W, "pieces", 1, 4, 8), "expected 15 elements for [5, 3], got 16"),
    "piece of none": (
        put(*W, "pieces", [[0, "w", 4096, 0, 0], [0, "w", 4096, 0, 15]]),
        "count: expected elements, got 0",
    ),
    "piece of less": (put(*PIECE, 4, -8), "count: expected elements, got -8"),
    "piece before 0": (put(*PIECE, 3, -1), "elements that two pieces have"),
    "piece of another file": (put(*PIECE, 0, 2), "file: expected a number below 2, got 2"),
    "piece of file -1": (put(*PIECE, 0, -1), "file: expected a number below 2, got -1"),
    "piece of file true": (put(*PIECE, 0, True), "[file, key, offset, start, count]"),
    "piece of 4": (drop(*PIECE, 4), "[file, key, offset, start, count]"),
    "piece float": (put(*PIECE, 2, 4096.0), "[file, key, offset, start, count]"),
    "piece without key": (put(*PIECE, 1, ""), "key: expected a name"),
    "piece beyond": (put(*PIECE, 2, BLOCK + 4096 - 31), "offset: expected bytes within the"),
    "piece far beyond": (put(*PIECE, 2, 2**70), "offset: expected bytes within the"),
    "piece in the length": (put(*PIECE, 2, 0), "offset: expected bytes within the"),
    "piece negative": (put(*PIECE, 2, -4096), "offset: expected bytes within the"),
    "empty piece beyond": (
        put("tensors", "empty", "pieces", 0, 2, 8193),
        "offset: expected bytes within the",
    ),
    "empty piece of -1": (put("tensors", "empty", "pieces", 0, 4, -1), "count: expected elements"),
    "ranks of one": (put("per_rank", [None]), "per_rank: expected one for each of 2 ranks"),
    "ranks an object": (put("per_rank", {}), "per_rank: expected a list"),
    "rank a list": (put("per_rank", [None, []]), "per_rank: expected objects or null"),
    "facts a list": (put("facts", []), "facts: expected an object"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corruption_is_named(corruption: str) -> None:
    members = json.loads(encode(a_manifest()))
    del members["seal"]
    change, words = CORRUPTIONS[corruption]
    decode(seal(copy.deepcopy(members)), "some/manifest")
    change(members)
    with pytest.raises(DamagedCheckpointError, match="some/manifest: ") as caught:
        decode(seal(members), "some/manifest")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_newer_version_says_who_reads_it() -> None:
    newer = seal(
        {"format": "tradewind-checkpoint", "version": 7, "needs": "3.2.0", "unheard": "of"}
    )
    with pytest.raises(NewerVersionError, match="some/manifest: format version 7") as caught:
        decode(newer, "some/manifest")
    assert "reads up to 1" in str(caught.value) and "tradewind>=3.2.0" in str(caught.value)
    assert not isinstance(caught.value, DamagedCheckpointError)
    with pytest.raises(DamagedCheckpointError):
        decode(newer.replace(b"7", b"8"), "m")  # it must be whole to be believed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": [a_file(0), dataclasses.replace(a_file(1), name="../x.safetensors")]}, "folder"),
        ({"step": -1}, "step: expected"),
        (
            {"tensors": {"w": TensorEntry("F32", (4,), [Piece(0, "w", 4096, 1, 3)])}},
            'tensor "w": elements that no piece has',
        ),
        (
            {"tensors": {"w": TensorEntry("F32", (4,), [Piece(0, "w", 4096, 0, 3)])}},
            "expected 4 elements for [4], got 3",
        ),
        ({"facts": {"a": float("nan")}}, "tree or facts are no JSON"),
        ({"facts": {"a": object()}}, "tree or facts are no JSON"),
    ],
)
def test_what_no_reader_would_take_is_not_written(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint of step ") as caught:
        encode(dataclasses.replace(a_manifest(), **changes))
    assert words in str(caught.value)
