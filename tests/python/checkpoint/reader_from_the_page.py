"""A reader of checkpoints written from docs/checkpoint-format.md alone: no tradewind, no torch. The
tests use it as an oracle. Tensors come as (dtype, shape, bytes)."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {name: 1 for name in "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ".split()}
SIZES |= {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
SIZES |= {"I64": 8, "U64": 8, "F64": 8, "C64": 8}
TABLE = np.arange(256, dtype=np.uint32)
for _ in range(8):
    TABLE = TABLE >> 1 ^ np.where(TABLE & 1, np.uint32(0x82F63B78), np.uint32(0))
STEPS = TABLE.tolist()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ STEPS[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def commits(directory: Path) -> list[Path]:
    """Folders of the commits that count, the newest first."""
    found = []
    for folder in directory.glob("step-*"):
        name = re.fullmatch(r"step-(\d{12})\.(\d{9})\.([0-9a-f]{16})", folder.name)
        if name and (folder / "manifest.json").exists():
            found.append((int(name[2]), name[3], int(name[1]), folder))
    for path in sorted(directory.glob("attempts/*.accepted"), reverse=True):
        told = json.loads(path.read_text())
        if f"{crc32c(json.dumps(told['accepted']).encode()):08x}" == told["crc32c"]:
            newest = int(path.stem)
            found = [c for c in found if c[0] >= newest or c[3].name in told["accepted"]]
            break
    return [folder for *_, folder in sorted(found, reverse=True)]


def read(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """The manifest and the tensors of a commit. AssertionError where anything is damaged."""
    data = (folder / "manifest.json").read_bytes()
    seal = re.fullmatch(rb',"seal":"([0-9a-f]{8})"\}\n', data[-20:])
    assert seal and int(seal[1], 16) == crc32c(data[:-20]), "damaged manifest"
    manifest = json.loads(data)
    assert (manifest["format"], manifest["version"]) == ("tradewind-checkpoint", 1)
    shards = []
    for file in manifest["files"]:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=@+-]*\.safetensors", file["name"])
        shard = (folder / file["name"]).read_bytes()
        assert len(shard) == file["size_bytes"] and crc32c(shard) == int(file["crc32c"], 16)
        blocks = struct.iter_unpack("<I", base64.b64decode(file["block_crc32c"]))
        for number, (block,) in enumerate(blocks):
            begin = number * file["block_bytes"]
            assert crc32c(shard[begin : begin + file["block_bytes"]]) == block, number
        shards.append(shard)
    tensors = {}
    for name, tensor in manifest["tensors"].items():
        size, elements = SIZES[tensor["dtype"]], b""
        for file, _, offset, start, count in tensor["pieces"]:
            assert start * size == len(elements)
            elements += shards[file][offset : offset + count * size]
        assert len(elements) == size * math.prod(tensor["shape"])
        tensors[name] = (tensor["dtype"], tuple(tensor["shape"]), elements)
    return manifest, tensors


def state(node: Any, tensors: dict[str, Any], own: dict[str, Any] | None) -> Any:
    """The state that a tree stands for, as the rank sees it whose object of per_rank is `own`."""
    if isinstance(node, list):
        return [state(item, tensors, own) for item in node]
    if not isinstance(node, dict):
        return node
    kind, items = node.get("$"), node.get("items")
    if kind is None:
        return {key: state(value, tensors, own) for key, value in node.items()}
    if kind in ("tensor", "array"):
        return tensors[node["name"]]
    if kind == "per_rank":
        return state((own or {}).get(node["name"]), tensors, None)
    if kind in ("dict", "ordered_dict", "counter"):
        return {state(k, tensors, own): state(v, tensors, own) for k, v in items}
    if kind in ("tuple", "size"):
        return tuple(state(item, tensors, own) for item in items)
    if kind == "int":
        return int(node["hex"], 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(node["bits"]))[0]
    if kind == "complex":
        return complex(*(state(item, tensors, own) for item in items))
    if kind == "bytes":
        return base64.b64decode(node["base64"])
    if kind == "str":
        return base64.b64decode(node["base64"]).decode("utf-8", "surrogatepass")
    assert kind == "dtype", kind
    return node["name"]
