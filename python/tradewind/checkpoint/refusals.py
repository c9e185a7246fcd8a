"""Which values have no place in a checkpoint, and what to give instead."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from tradewind.checkpoint.dtypes import NAME_OF, instead

Path = tuple[object, ...]

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def path_text(path: Path) -> str:
    """How a message names the place in the state."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def check_tensor(tensor: Tensor, path: Path) -> None:
    """Raise TypeError for a tensor without elements of its own, or of a dtype without a name."""
    what = ""
    if type(tensor) not in _PLAIN_TENSORS:
        what = f"a tensor of class {type(tensor).__name__}; expected a plain one: give its own part"
        if hasattr(tensor, "to_local"):
            what += " as PartialTensor(shape, dtype, [(start, flat)])"
    elif tensor.is_nested:
        what = "a nested tensor; give its values() and offsets()"
    elif tensor.device.type == "meta":
        what = "a tensor on meta, which has no elements; give it memory with to_empty() first"
    elif tensor.is_quantized:
        what = "a quantized tensor; give its int_repr() and its scales"
    elif tensor.layout != torch.strided:
        what = f"a tensor of layout {tensor.layout}; give its indices and values, or to_dense()"
    elif tensor.dtype not in NAME_OF:
        what = f"a tensor of {tensor.dtype}, which safetensors has no name for; "
        what += instead(tensor.dtype)
    if what:
        raise TypeError(f"checkpoint: {path_text(path)}: {what}")


def refuse(value: object, path: Path) -> NoReturn:
    """Raise TypeError for a value of a kind that does not come back from JSON as what it was."""
    kind = type(value)
    hints: Iterable[tuple[type | tuple[type, ...], str]] = (
        (enum.Enum, "its .value or .name"),
        ((set, frozenset), "sorted(...)"),
        (dict, "dict(...)"),
        (tuple, "tuple(...), or a dict of its fields"),
        (list, "list(...)"),
        ((bytearray, memoryview), "bytes(...)"),
        (str, "str(...)"),
        (int, "int(...)"),
        (float, "float(...)"),
        (np.generic, "a number of Python"),
        (np.ndarray, "numpy.asarray(...)"),
        (torch.Generator, "its get_state()"),
        (torch.device, "str(...)"),
    )
    hint = next((text for kinds, text in hints if isinstance(value, kinds)), "")
    if not hint:
        hint = "dataclasses.asdict(...)" if is_dataclass(value) else "what it consists of"
    raise TypeError(
        f"checkpoint: {path_text(path)}: expected tensors, numbers, texts, bytes and dicts, lists "
        f"and tuples of those, or an object with state_dict(), got {kind.__qualname__}; give {hint}"
    )
