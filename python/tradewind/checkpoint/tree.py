"""A state as JSON plus named tensors, and back, so that every value returns as what it was.

JSON has fewer kinds of values than Python, so that the others are written as markers: objects with
a member "$" that names the kind (the table is in docs/checkpoint-format.md; `rebuilding.py` reads
them). Nothing is pickled: what has no marker is refused by its path, before anything is written."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tradewind.checkpoint.dtypes import dtype_name
from tradewind.checkpoint.parts import PartialTensor, PerRank
from tradewind.checkpoint.rebuilding import MARK, MAX_DEPTH, MAX_PLAIN_INT, rebuild
from tradewind.checkpoint.refusals import Path, check_tensor, path_text, refuse

__all__ = ["Flat", "PartialTensor", "PerRank", "dtype_name", "flatten", "rebuild"]

# Names that the container has for itself, and ours for tensors of one rank, begin like this.
_RESERVED = ("~", "__pad__", "__metadata__")


@dataclass
class Flat:
    """A state in parts. `tree`: JSON, alike on all ranks; it refers to `tensors` by name.
    `own_tree`: JSON of this rank's own values, by the names that `tree` has for them, None where
    there are none; `own_tensors`: the tensors of those, whose names no other rank has. Tensors
    share their memory with the state."""

    tree: object = None
    tensors: dict[str, Tensor | PartialTensor] = field(default_factory=dict)
    own_tree: dict[str, object] | None = None
    own_tensors: dict[str, Tensor] = field(default_factory=dict)


def flatten(state: object, rank: int = 0) -> Flat:
    """`state` as JSON and named tensors. `rank`: whose PerRank values these are.

    The state is any nesting of dict, OrderedDict, Counter, list, tuple and torch.Size of tensors,
    numpy arrays, None, bool, int, float, complex, str, bytes and torch.dtype; objects with a
    `state_dict()` (modules, optimizers) are read through it; numpy scalars become numbers. Keys of
    dicts keep their kind (1 is not "1"). Tensors on any device, of any strides.

    Raises TypeError that names the path for anything else, among them tensors that have no
    elements of their own (meta, sparse, quantized, nested, distributed), and ValueError for a
    state that is nested too deep or contains itself.
    """
    flattener = _Flattener(rank)
    flattener.flat.tree = flattener.node(state, ())
    return flattener.flat


class _Flattener:
    def __init__(self, rank: int) -> None:
        self.flat = Flat()
        self._rank = rank
        self._is_own = False

    def node(self, value: object, path: Path) -> object:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if len(path) > MAX_DEPTH:
            raise ValueError(
                f"checkpoint: {path_text(path[:4])}...: nested deeper than {MAX_DEPTH} levels; "
                "does the state contain itself?"
            )
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, value, path)
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            return self._state_dict(value, path)
        refuse(value, path)

    # Numbers and texts.

    def integer(self, value: int, path: Path) -> object:
        if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
            return value
        return {MARK: "int", "hex": hex(value)}

    def float_(self, value: float, path: Path) -> object:
        if math.isfinite(value):
            return value
        return {MARK: "float", "bits": struct.pack(">d", value).hex()}

    def complex_(self, value: complex, path: Path) -> object:
        parts = [self.float_(value.real, path), self.float_(value.imag, path)]
        return {MARK: "complex", "items": parts}

    def text(self, value: str, path: Path) -> object:
        if _is_unicode(value):
            return value
        data = value.encode("utf-8", "surrogatepass")
        return {MARK: "str", "base64": base64.b64encode(data).decode("ascii")}

    def bytes_(self, value: bytes, path: Path) -> object:
        return {MARK: "bytes", "base64": base64.b64encode(value).decode("ascii")}

    def dtype(self, value: torch.dtype, path: Path) -> object:
        return {MARK: "dtype", "name": str(value).removeprefix("torch.")}

    # Collections.

    def list_(self, value: list[object], path: Path) -> object:
        return self._items(value, path)

    def tuple_(self, value: tuple[object, ...], path: Path) -> object:
        return {MARK: "tuple", "items": self._items(value, path)}

    def size(self, value: torch.Size, path: Path) -> object:
        return {MARK: "size", "items": [int(size) for size in value]}

    def dict_(self, value: dict[object, object], path: Path) -> object:
        if MARK not in value and all(type(key) is str and _is_unicode(key) for key in value):
            return {str(key): self.node(item, (*path, key)) for key, item in value.items()}
        return {MARK: "dict", "items": self._pairs(value, path)}

    def counter(self, value: Mapping[object, object], path: Path) -> object:
        return {MARK: "counter", "items": self._pairs(value, path)}

    def ordered_dict(self, value: OrderedDict[object, object], path: Path) -> object:
        node = {MARK: "ordered_dict", "items": self._pairs(value, path)}
        metadata = getattr(value, "_metadata", None)  # versions that modules put at their dicts
        if metadata is not None:
            node["metadata"] = self.node(metadata, (*path, "_metadata"))
        return node

    def _items(self, values: Sequence[Any], path: Path) -> object:
        kinds = set(map(type, values))
        if kinds == {int}:  # long lists of numbers (orders of samples, random states) go fast
            if min(values) >= -MAX_PLAIN_INT and max(values) <= MAX_PLAIN_INT:
                return [*values]
        elif kinds == {float} and all(map(math.isfinite, values)):
            return [*values]
        return [self.node(item, (*path, idx)) for idx, item in enumerate(values)]

    def _pairs(self, value: Mapping[object, object], path: Path) -> object:
        return [
            [self._key(key, path), self.node(item, (*path, key))] for key, item in value.items()
        ]

    def _key(self, key: object, path: Path) -> object:
        if isinstance(key, np.generic):
            key = key.item()
        if type(key) is tuple:
            return {MARK: "tuple", "items": [self._key(part, path) for part in key]}
        if key is not None and type(key) not in _KEYS:
            raise TypeError(
                f"checkpoint: {path_text(path)}: key {key!r}: expected str, int, bool, float, "
                f"None, bytes, torch.dtype or a tuple of those, got {type(key).__name__}"
            )
        return self.node(key, path)

    # Tensors and what ranks hold.

    def per_rank(self, value: PerRank, path: Path) -> object:
        if self._is_own:
            raise TypeError(f"checkpoint: {path_text(path)}: PerRank in PerRank; leave out one")
        if self.flat.own_tree is None:
            self.flat.own_tree = {}
        name = _unique(_name(path), self.flat.own_tree)
        self._is_own = True
        self.flat.own_tree[name] = self.node(value.value, path)
        self._is_own = False
        return {MARK: "per_rank", "name": name}

    def partial(self, value: PartialTensor, path: Path) -> object:
        if self._is_own:
            raise TypeError(
                f"checkpoint: {path_text(path)}: PartialTensor in PerRank: expected tensors of "
                "this rank alone; move it out of PerRank"
            )
        name = self._common_name(path)
        self.flat.tensors[name] = value
        return {MARK: "tensor", "name": name}

    def tensor(self, value: Tensor, path: Path) -> dict[str, object]:
        check_tensor(value, path)
        value = value.detach()
        if self._is_own:
            name = _unique(f"~{self._rank}.{_name(path)}", self.flat.own_tensors)
            self.flat.own_tensors[name] = value
        else:
            name = self._common_name(path)
            self.flat.tensors[name] = value
        return {MARK: "tensor", "name": name}

    def array(self, value: np.ndarray[Any, Any], path: Path) -> object:
        try:
            if not value.flags.writeable or any(stride < 0 for stride in value.strides):
                value = np.array(value, order="C")
            tensor = torch.from_numpy(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"checkpoint: {path_text(path)}: array of {value.dtype}: expected numbers or "
                "truth values in the machine's byte order; convert it with astype()"
            ) from None
        return {**self.tensor(tensor, path), MARK: "array"}

    def _common_name(self, path: Path) -> str:
        name = _name(path)
        if not name or name.startswith(_RESERVED):
            name = f"~~{name}"
        return _unique(name, self.flat.tensors)

    # What stands for other values.

    def _numpy_scalar(self, value: np.generic, path: Path) -> object:
        item = value.item()
        if type(item) not in _KEYS and type(item) is not complex:
            refuse(value, path)
        return self.node(item, path)

    def _state_dict(self, value: object, path: Path) -> object:
        state = value.state_dict()  # type: ignore[attr-defined]
        if not isinstance(state, dict):
            raise TypeError(
                f"checkpoint: {path_text(path)}: state_dict() of {type(value).__name__}: expected "
                f"a dict, got {type(state).__name__}"
            )
        return self.node(state, path)


_WRITERS: dict[type, Callable[[_Flattener, Any, Path], object]] = {
    int: _Flattener.integer,
    float: _Flattener.float_,
    complex: _Flattener.complex_,
    str: _Flattener.text,
    bytes: _Flattener.bytes_,
    torch.dtype: _Flattener.dtype,
    list: _Flattener.list_,
    tuple: _Flattener.tuple_,
    torch.Size: _Flattener.size,
    dict: _Flattener.dict_,
    Counter: _Flattener.counter,
    OrderedDict: _Flattener.ordered_dict,
    PerRank: _Flattener.per_rank,
    PartialTensor: _Flattener.partial,
    np.ndarray: _Flattener.array,
}
_KEYS = (bool, int, float, str, bytes, torch.dtype)


def _is_unicode(text: str) -> bool:
    """Whether `text` has no half of a surrogate pair, which other readers of JSON refuse."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _name(path: Path) -> str:
    return ".".join(map(_name_part, path)).encode("utf-8", "replace").decode("utf-8")


def _name_part(key: object) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.hex()
    if isinstance(key, tuple):
        return f"({','.join(map(_name_part, key))})"
    return str(key)


def _unique(name: str, taken: Mapping[str, object]) -> str:
    if name not in taken:
        return name
    number = 1
    while f"{name}~{number}" in taken:
        number += 1
    return f"{name}~{number}"
