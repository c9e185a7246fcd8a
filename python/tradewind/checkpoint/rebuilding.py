"""The way back from JSON and named tensors to a state: every marker of `tree.py`, read strictly.

A tree may come from a damaged or hostile manifest: whatever is not exactly as `flatten` writes it
is a DamagedCheckpointError that names its place."""

from __future__ import annotations

import base64
import binascii
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from tradewind.checkpoint.errors import DamagedCheckpointError
from tradewind.checkpoint.parts import PerRank
from tradewind.checkpoint.strict_json import excerpt

MARK = "$"
MAX_DEPTH = 64
MAX_PLAIN_INT = 2**53 - 1  # what every reader of JSON keeps exact

Path = tuple[object, ...]
Outline = Callable[[str, "str | None", bool], object]
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def as_array(tensor: Any) -> object:
    """`tensor` as a numpy array that shares its memory; what is no tensor, as it is."""
    return tensor.numpy() if isinstance(tensor, Tensor) else tensor


def rebuild(
    tree: object,
    tensors: Mapping[str, Any],
    own_tree: object = None,
    *,
    where: str = "checkpoint",
    array: Callable[[Any], object] = as_array,
) -> Any:
    """The state that `flatten` made `tree` and `tensors` of.

    The very values of `tensors` come to where the tensors were, whatever they are; `array` makes
    those that were numpy arrays of theirs. `own_tree`: of the rank that reads; what it lacks is
    PerRank(None, is_known=False). `where` begins messages.

    Raises DamagedCheckpointError where the tree is none that `flatten` writes, or names a tensor
    that is missing.
    """
    if not isinstance(own_tree, (dict, type(None))):
        raise DamagedCheckpointError(
            f"{where}: tree of one rank: expected an object or null, got {excerpt(own_tree)}"
        )
    rebuilder = _Rebuilder(tensors, own_tree or {}, where, array)
    try:
        return rebuilder.value(tree, ())
    except RecursionError:
        raise DamagedCheckpointError(f"{where}: tree: nested too deep") from None


class _Rebuilder:
    def __init__(
        self,
        tensors: Mapping[str, Any],
        own_tree: Mapping[str, object],
        where: str,
        array: Callable[[Any], object],
    ) -> None:
        self._tensors = tensors
        self._own_tree = own_tree
        self._where = where
        self._array = array

    def value(self, node: object, path: Path) -> object:
        if isinstance(node, dict):
            if MARK in node:
                return self._marked(node, path)
            return {key: self.value(item, (*path, key)) for key, item in node.items()}
        if isinstance(node, list):
            return [self.value(item, (*path, idx)) for idx, item in enumerate(node)]
        if isinstance(node, int) and not -MAX_PLAIN_INT <= node <= MAX_PLAIN_INT:
            self._damaged(path, "a number within 2**53", node)
        return node

    def _marked(self, node: dict[str, object], path: Path) -> object:
        kind = node[MARK]
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            self._damaged(path, f"a kind of this version ({', '.join(_READERS)})", kind)
        read, members, optional = reader
        if not members <= node.keys() - {MARK} <= members | optional:
            self._damaged(path, f"members {', '.join(sorted(members))} of {kind}", node)
        return read(self, node, path)

    # Numbers and texts.

    def integer(self, node: dict[str, object], path: Path) -> int:
        text = self._text(node, "hex", path)
        try:
            value = int(text, 16)
        except ValueError:
            value = 0
        if hex(value) != text or -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
            self._damaged(path, "hexadecimal digits of an integer beyond 2**53", text)
        return value

    def float_(self, node: dict[str, object], path: Path) -> float:
        data = self._hex(node, "bits", path)
        if len(data) != 8:
            self._damaged(path, "16 hexadecimal digits of a float64", node["bits"])
        value: float = struct.unpack(">d", data)[0]
        return value

    def complex_(self, node: dict[str, object], path: Path) -> complex:
        match [self.value(part, path) for part in self._list(node, path)]:
            case [float(real), float(imag)]:
                return complex(real, imag)
        self._damaged(path, "two numbers of a complex one", node["items"])

    def text(self, node: dict[str, object], path: Path) -> str:
        try:
            return self.bytes_(node, path).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self._damaged(path, "the base64 of UTF-8", node["base64"])

    def bytes_(self, node: dict[str, object], path: Path) -> bytes:
        try:
            return base64.b64decode(self._text(node, "base64", path), validate=True)
        except (binascii.Error, ValueError):
            self._damaged(path, "base64", node["base64"])

    def dtype(self, node: dict[str, object], path: Path) -> torch.dtype:
        dtype = _DTYPES.get(self._text(node, "name", path))
        if dtype is None:
            self._damaged(path, "a dtype that this torch has", node["name"])
        return dtype

    # Collections.

    def tuple_(self, node: dict[str, object], path: Path) -> tuple[object, ...]:
        items = enumerate(self._list(node, path))
        return tuple(self.value(item, (*path, idx)) for idx, item in items)

    def size(self, node: dict[str, object], path: Path) -> torch.Size:
        sizes = self._list(node, path)
        if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
            self._damaged(path, "a list of sizes", sizes)
        return torch.Size(sizes)  # type: ignore[arg-type]

    def dict_(self, node: dict[str, object], path: Path) -> dict[object, object]:
        pairs: dict[object, object] = {}
        for pair in self._list(node, path):
            if not isinstance(pair, list) or len(pair) != 2:
                self._damaged(path, "[key, value]", pair)
            key = self._key(pair[0], path)
            if key in pairs:
                self._damaged(path, "every key once", pair[0])
            pairs[key] = self.value(pair[1], (*path, key))
        return pairs

    def counter(self, node: dict[str, object], path: Path) -> Counter[object]:
        counts: dict[object, Any] = self.dict_(node, path)
        return Counter(counts)

    def ordered_dict(self, node: dict[str, object], path: Path) -> OrderedDict[object, object]:
        ordered = OrderedDict(self.dict_(node, path))
        if "metadata" in node:
            ordered._metadata = self.value(node["metadata"], path)  # type: ignore[attr-defined]
        return ordered

    def _key(self, node: object, path: Path) -> object:
        key = self.value(node, path)
        try:
            hash(key)
        except TypeError:
            self._damaged(path, "a key", node)
        if isinstance(key, Tensor):
            self._damaged(path, "a key", node)
        return key

    # Tensors and what ranks hold.

    def tensor(self, node: dict[str, object], path: Path) -> Any:
        name = self._text(node, "name", path)
        if name not in self._tensors:
            self._damaged(path, "the name of a tensor of the manifest", name)
        return self._tensors[name]

    def array(self, node: dict[str, object], path: Path) -> object:
        try:
            return self._array(self.tensor(node, path))
        except TypeError:
            self._damaged(path, "a tensor that numpy has a type for", node["name"])

    def per_rank(self, node: dict[str, object], path: Path) -> PerRank:
        name = self._text(node, "name", path)
        if name not in self._own_tree:
            return PerRank(None, is_known=False)
        inner = _Rebuilder(self._tensors, {}, self._where, self._array)
        return PerRank(inner.value(self._own_tree[name], path))

    # Members.

    def _text(self, node: dict[str, object], member: str, path: Path) -> str:
        text = node[member]
        if not isinstance(text, str):
            self._damaged((*path, member), "a text", text)
        return text

    def _hex(self, node: dict[str, object], member: str, path: Path) -> bytes:
        try:
            return bytes.fromhex(self._text(node, member, path))
        except ValueError:
            self._damaged((*path, member), "hexadecimal digits", node[member])

    def _list(self, node: dict[str, object], path: Path) -> list[object]:
        items = node["items"]
        if not isinstance(items, list):
            self._damaged((*path, "items"), "a list", items)
        return items

    def _place(self, path: Path) -> str:
        return f"{self._where}: tree" + "".join(f"[{part!r}]" for part in path)

    def _damaged(self, path: Path, expected: str, got: object) -> NoReturn:
        raise DamagedCheckpointError(
            f"{self._place(path)}: expected {expected}, got {excerpt(got)}"
        )


_Reader = tuple[
    Callable[[_Rebuilder, dict[str, object], Path], object], frozenset[str], frozenset[str]
]


def _reader(
    read: Callable[[_Rebuilder, dict[str, object], Path], object], members: str, optional: str = ""
) -> _Reader:
    return read, frozenset(members.split()), frozenset(optional.split())


_READERS: dict[str, _Reader] = {
    "tensor": _reader(_Rebuilder.tensor, "name"),
    "array": _reader(_Rebuilder.array, "name"),
    "per_rank": _reader(_Rebuilder.per_rank, "name"),
    "dict": _reader(_Rebuilder.dict_, "items"),
    "ordered_dict": _reader(_Rebuilder.ordered_dict, "items", "metadata"),
    "counter": _reader(_Rebuilder.counter, "items"),
    "tuple": _reader(_Rebuilder.tuple_, "items"),
    "size": _reader(_Rebuilder.size, "items"),
    "int": _reader(_Rebuilder.integer, "hex"),
    "float": _reader(_Rebuilder.float_, "bits"),
    "complex": _reader(_Rebuilder.complex_, "items"),
    "str": _reader(_Rebuilder.text, "base64"),
    "bytes": _reader(_Rebuilder.bytes_, "base64"),
    "dtype": _reader(_Rebuilder.dtype, "name"),
}
