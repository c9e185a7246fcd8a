"""Rows: what was logged for one step. Admission (cheap, in the training loop), merging, and the
late reading of tensors (at a flush, one transfer per device and type)."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tradewind.track.media import Histogram, Image

RESERVED_NAMES = frozenset(("step", "time", "attempt"))
_PLAIN_TYPES = frozenset((float, int, bool, str))
MAX_STEP = 2**63 - 1


@dataclass
class Row:
    """All values of one step; `time` is when the step was first logged, in Unix seconds."""

    step: int
    time: float
    values: dict[str, Any]


def checked_step(step: object) -> int:
    """`step` as an int. Raises TypeError or ValueError for anything but a count from 0."""
    try:
        if isinstance(step, bool):
            raise TypeError
        value = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"run.log: step: expected an integer, got {type(step).__name__} {step!r}; call "
            "run.log(step, {'name': value})"
        ) from None
    if not 0 <= value <= MAX_STEP:
        raise ValueError(f"run.log: step: expected 0 to 2**63 - 1, got {value}")
    return value


def admit(values: Mapping[str, object]) -> tuple[dict[str, Any], int]:
    """A private copy of `values`, every name and type checked, and the bytes of media it holds.

    Tensors stay tensors (detached and copied on their device): reading them would wait for it.
    Raises TypeError or ValueError that names the key; nothing is logged then.
    """
    admitted: dict[str, Any] = dict(values)
    media_bytes = 0
    for name, value in admitted.items():
        if type(name) is not str or not name or name in RESERVED_NAMES:
            _refuse_name(name)
        if type(value) not in _PLAIN_TYPES:
            admitted[name] = value = _admit_value(name, value)
            media_bytes += getattr(value, "num_bytes", 0)
    return admitted, media_bytes


def merge(rows: dict[int, Row], logged: tuple[int, float, dict[str, Any]]) -> None:
    """Fold one log call into the row of its step; a later value of the same name wins."""
    step, time, values = logged
    row = rows.get(step)
    if row is None:
        rows[step] = Row(step, time, values)
    else:
        row.values.update(values)


def read_tensors(rows: Iterable[Row]) -> list[str]:
    """Replace the tensors in `rows` by their numbers, in place. Names whose tensors cannot be read
    any more (their device failed) are dropped from their rows and returned."""
    groups: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row in rows:
        for name, value in row.values.items():
            if type(value) not in _PLAIN_TYPES and hasattr(value, "detach"):
                kind = (str(getattr(value, "device", "")), str(getattr(value, "dtype", "")))
                groups.setdefault(kind, []).append((row, name))
    lost: list[str] = []
    for places in groups.values():
        numbers = _numbers([row.values[name] for row, name in places])
        for (row, name), number in zip(places, numbers, strict=True):
            if number is None:
                del row.values[name]
                lost.append(name)
            else:
                row.values[name] = number
    return lost


def _numbers(tensors: list[Any]) -> list[float | int | bool | None]:
    torch = sys.modules.get("torch")
    try:
        if torch is not None and all(isinstance(each, torch.Tensor) for each in tensors):
            stacked: list[float | int | bool | None] = torch.stack(tensors).tolist()
            return stacked
    except Exception:
        pass  # one by one below, to keep what can still be read
    return [_number(each) for each in tensors]


def _number(tensor: Any) -> float | int | bool | None:
    try:
        value: float | int | bool = tensor.item() if hasattr(tensor, "item") else float(tensor)
    except Exception:
        return None
    return value


def _admit_value(name: str, value: Any) -> Any:
    if isinstance(value, (Image, Histogram)):
        return value
    if hasattr(value, "detach"):
        return _admit_tensor(name, value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if getattr(value, "size", None) == 1 and hasattr(value, "dtype"):
        item = value.item()  # numpy scalars, arrays of one: memory of this process, no sync
        if type(item) in _PLAIN_TYPES:
            return item
        if value.dtype.kind in "fV" and hasattr(value, "__float__"):
            return float(value)  # long double, bfloat16
    raise TypeError(
        f"run.log: {name!r}: expected a number, text, a tensor of one number, Image(x) or "
        f"Histogram(x), got {_described(value)}; wrap an array in tradewind.track.Histogram or "
        ".Image, or log one number of it"
    )


def _admit_tensor(name: str, tensor: Any) -> Any:
    if any(size != 1 for size in tensor.shape):
        raise TypeError(
            f"run.log: {name!r}: expected a number or a tensor of one, got {_described(tensor)}; "
            "log x.mean(), or wrap it: tradewind.track.Histogram(x), tradewind.track.Image(x)"
        )
    is_meta = getattr(getattr(tensor, "device", None), "type", None) == "meta"
    if is_meta or (hasattr(tensor, "is_complex") and tensor.is_complex()):
        raise TypeError(
            f"run.log: {name!r}: expected a real number, got {_described(tensor)}; log x.real, "
            "x.abs() or a tensor that holds data"
        )
    kept = tensor.detach()
    # A copy on the device, unread: the caller may go on to add to its tensor in place.
    kept = kept.clone() if hasattr(kept, "clone") else kept
    return kept.reshape(()) if len(tensor.shape) else kept


def _described(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return kind.removeprefix("builtins.")
    return f"{kind} of shape {list(shape)} and {dtype}"


def _refuse_name(name: object) -> None:
    if type(name) is not str or not name:
        raise TypeError(
            f"run.log: expected names that are non-empty strings, got {name!r}; call "
            "run.log(step, {'name': value})"
        )
    raise ValueError(
        f"run.log: {name!r} is a column of every row ({', '.join(sorted(RESERVED_NAMES))}); give "
        "the value another name, and the step as run.log(step, values)"
    )
