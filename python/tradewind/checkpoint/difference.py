"""How two checkpoints differ: tensors by name, element by element; JSON values by path. Memory is
bounded by two buffers, whatever the size of the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tradewind.checkpoint.manifest import TensorEntry
from tradewind.checkpoint.parts import PerRank
from tradewind.checkpoint.restoring import CommitReader
from tradewind.checkpoint.targets import Stored
from tradewind.checkpoint.window import BUFFER_BYTES, Window, grouped

_EXCERPT = 80


@dataclass(frozen=True)
class TensorChange:
    """A tensor that is not the same. `kind`: "added", "removed", "shape", "dtype" or "values";
    `before`, `after`: dtype and shape, None where it is not there.

    Where the elements can be compared: `num_differing` of `num_elements` have other bits (after
    conversion, where dtypes differ, other values); `max_abs`: the largest |after - before|;
    `max_relative`: the largest of those by the larger magnitude of the two, from 0 to 2. Equal
    infinities, and NaNs on both sides, differ by 0; any other NaN or infinity makes both infinite.
    """

    name: str
    kind: str
    before: str | None
    after: str | None
    num_differing: int | None = None
    num_elements: int | None = None
    max_abs: float | None = None
    max_relative: float | None = None


@dataclass(frozen=True)
class ValueChange:
    """A JSON value that is not the same, as text cut to a readable length; None: not there."""

    path: str
    before: str | None
    after: str | None


@dataclass
class Difference:
    """`num_same`: tensors that are the same, to the bit."""

    tensors: list[TensorChange] = field(default_factory=list)
    values: list[ValueChange] = field(default_factory=list)
    num_same: int = 0

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values)


def difference(
    before: CommitReader, after: CommitReader, *, buffer_bytes: int = BUFFER_BYTES
) -> Difference:
    """What differs between two commits, all blocks of which are checked on the way.

    Raises DamagedCheckpointError that names file and block, OSError.
    """
    found = Difference(values=list(_value_changes(before, after)))
    old, new = before.manifest.tensors, after.manifest.tensors
    common = [name for name in old if name in new]
    comparable = [name for name in common if _is_comparable(old[name], new[name])]
    compared = _Comparison(before, after, buffer_bytes).run(comparable)
    for name in common:
        change = compared[name] if name in compared else _uncompared(name, old[name], new[name])
        if change is None:
            found.num_same += 1
        else:
            found.tensors.append(change)
    gone = [TensorChange(n, "removed", _text(old[n]), None) for n in old if n not in new]
    come = [TensorChange(n, "added", None, _text(new[n])) for n in new if n not in old]
    found.tensors += gone + come
    return found


# --- tensors --------------------------------------------------------------------------------------


def _text(entry: TensorEntry) -> str:
    return f"{entry.dtype} [{', '.join(map(str, entry.shape))}]"


def _is_comparable(old: TensorEntry, new: TensorEntry) -> bool:
    if old.shape != new.shape:
        return False
    return old.dtype == new.dtype or (_is_float(old.dtype) and _is_float(new.dtype))


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))


def _uncompared(name: str, old: TensorEntry, new: TensorEntry) -> TensorChange:
    kind = "dtype" if old.shape == new.shape else "shape"
    return TensorChange(name, kind, _text(old), _text(new))


@dataclass
class _Sums:
    num_differing: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0


class _Comparison:
    def __init__(self, before: CommitReader, after: CommitReader, buffer_bytes: int) -> None:
        self._old, self._new = before.manifest.tensors, after.manifest.tensors
        self._windows = Window(before, buffer_bytes), Window(after, buffer_bytes)
        self._before, self._buffer_bytes = before, buffer_bytes

    def run(self, names: list[str]) -> dict[str, TensorChange | None]:
        """The change of each, None where there is none."""
        sums = {name: _Sums() for name in names}
        old_window, new_window = self._windows
        for group in grouped(self._before, names, self._buffer_bytes):
            views = zip(group, old_window.read(group), new_window.read(group), strict=True)
            for span, old, new in views:
                _add(sums[span.name], old, new)
        return {name: self._change(name, sums[name]) for name in names}

    def _change(self, name: str, sums: _Sums) -> TensorChange | None:
        old, new = self._old[name], self._new[name]
        if old.dtype == new.dtype and not sums.num_differing:
            return None
        return TensorChange(
            name,
            "values" if old.dtype == new.dtype else "dtype",
            _text(old),
            _text(new),
            sums.num_differing,
            math.prod(old.shape),
            sums.max_abs,
            sums.max_relative,
        )


def _add(sums: _Sums, old: torch.Tensor, new: torch.Tensor) -> None:
    """Count in how two flat spans of one tensor differ."""
    if old.dtype == new.dtype:
        size = old.element_size()
        differs = (old.view(torch.uint8) != new.view(torch.uint8)).view(-1, size).any(1)
    else:
        differs = _exact(old) != _exact(new)
    count = int(differs.sum())
    if not count:
        return
    sums.num_differing += count
    old, new = old[differs], new[differs]
    gap = _gap(old, new)
    scale = torch.maximum(_magnitude(old), _magnitude(new))
    relative = torch.where(gap == 0, 0.0, gap / scale)
    sums.max_abs = max(sums.max_abs, float(gap.max()))
    sums.max_relative = max(sums.max_relative, float(relative.nan_to_num(nan=math.inf).max()))


def _gap(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """|new - old| as float64."""
    old, new = _exact(old), _exact(new)
    if old.dtype == torch.int64:
        # Within one sign the difference is an int64; float64 alone would lose its last bits.
        apart = (new.double() - old.double()).abs()
        return torch.where((old < 0) == (new < 0), (new - old).abs().double(), apart)
    gap = (new - old).abs()
    both_nan = old.isnan() & new.isnan()
    same = both_nan | (old == new)  # infinities; zeros of both signs
    return torch.where(same, 0.0, gap).nan_to_num(nan=math.inf, posinf=math.inf)


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128).abs() if values.is_complex() else values.double().abs()


def _exact(values: torch.Tensor) -> torch.Tensor:
    """As float64, complex128 or int64, exactly; of uint64 less 2**63, which keeps differences."""
    if values.dtype == torch.uint64:
        return values.view(torch.int64) ^ torch.iinfo(torch.int64).min
    if values.is_complex():
        return values.to(torch.complex128)
    return values.double() if values.is_floating_point() else values.to(torch.int64)


# --- JSON values ----------------------------------------------------------------------------------


def _value_changes(before: CommitReader, after: CommitReader) -> Iterator[ValueChange]:
    old, new = _leaves(before), _leaves(after)
    for path in [*old, *(path for path in new if path not in old)]:
        if path not in new:
            yield ValueChange(path, _excerpt(old[path]), None)
        elif path not in old:
            yield ValueChange(path, None, _excerpt(new[path]))
        elif not _same(old[path], new[path]):
            yield ValueChange(path, _excerpt(old[path]), _excerpt(new[path]))


def _leaves(reader: CommitReader) -> dict[str, Any]:
    """JSON values by path: those alike on all ranks, and each rank's own."""
    found: dict[str, Any] = {}
    for rank in range(max(1, len(reader.manifest.per_rank))):
        _collect(reader.saved(rank), "", rank, found)
    return found


def _collect(saved: Any, path: str, rank: int, found: dict[str, Any]) -> None:
    if isinstance(saved, Stored):
        return
    if isinstance(saved, PerRank):
        if saved.is_known:
            _collect(saved.value, f"{path}[rank {rank}]", rank, found)
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            _collect(value, f"{path}.{key}" if path else str(key), rank, found)
    elif isinstance(saved, (list, tuple)) and not _is_flat(saved):
        for index, value in enumerate(saved):
            _collect(value, f"{path}.{index}", rank, found)
    else:
        found[path] = saved


def _is_flat(items: list[Any] | tuple[Any, ...]) -> bool:
    """A list of numbers or texts is one value: a random state has thousands."""
    nested = (Stored, PerRank, Mapping, list, tuple)
    return not any(isinstance(item, nested) for item in items)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return old == new or (math.isnan(old) and math.isnan(new))
    return bool(type(old) is type(new) and old == new)


def _excerpt(value: Any) -> str:
    text = repr(value)
    if len(text) > _EXCERPT:
        count = f" ({len(value)} items)" if isinstance(value, (list, tuple)) else ""
        text = f"{text[:_EXCERPT]}…{count}"
    return text
