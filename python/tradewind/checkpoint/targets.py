"""What of a state a checkpoint fills: the state and what was saved, walked side by side. Everything
that does not fit is found before a byte is read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tradewind.checkpoint.errors import StateMismatchError
from tradewind.checkpoint.parts import PartialTensor, PerRank

_MOST_SHOWN = 6


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, in the place that it had in the state."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_array: bool = False

    def value(self, memory: torch.Tensor) -> Any:
        """What it was, over memory of its dtype and shape."""
        return memory.numpy() if self.is_array else memory


@dataclass(frozen=True)
class Fill:
    """Read elements [start, ...) of the logical tensor `name` into all of `target`."""

    name: str
    start: int
    target: torch.Tensor


@dataclass
class Filling:
    """What is to be done: `fills` are read from the files; then each of `loads`, (object, what its
    load_state_dict takes with Stored in place of tensors), and each of `values`."""

    fills: list[Fill] = field(default_factory=list)
    loads: list[tuple[Any, Any]] = field(default_factory=list)
    values: list[tuple[MutableMapping[Any, Any], Any, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def match(state: Any, saved: Any, where: str, *, partial: bool) -> Filling:
    """Plan how `state` takes `saved` (a state with Stored in place of tensors).

    Raises StateMismatchError that lists what does not fit, unless `partial`: then what fits is
    filled, and `problems` says what is not.
    """
    filling = Filling()
    _Walk(filling).visit(state, saved, "")
    if filling.problems and not partial:
        shown = filling.problems[:_MOST_SHOWN]
        more = len(filling.problems) - len(shown)
        listed = "; ".join(shown) + (f"; and {more} more" if more else "")
        raise StateMismatchError(
            f"{where}: does not fit the state: {listed}. Nothing was changed. partial=True would "
            f"fill what fits ({_count(filling)}) and leave the rest as it is"
        )
    return filling


class _Walk:
    def __init__(self, filling: Filling) -> None:
        self._found = filling

    def visit(self, target: Any, saved: Any, path: str) -> None:
        if isinstance(target, PerRank):
            if isinstance(saved, PerRank):
                if saved.is_known:
                    self.visit(target.value, saved.value, path)
            else:
                self._found.problems.append(f"{path}: is each rank's own, was alike when saved")
        elif isinstance(target, np.ndarray) and target.flags.writeable:
            self._tensor(torch.from_numpy(target), saved, path)
        elif isinstance(target, torch.Tensor):
            self._tensor(target, saved, path)
        elif isinstance(target, PartialTensor):
            self._parts(target, saved, path)
        elif isinstance(target, torch.nn.Module) and _reads_plainly(target):
            self.visit(dict(target.state_dict()), saved, path)
        elif hasattr(target, "load_state_dict") and hasattr(target, "state_dict"):
            if isinstance(saved, Stored) or not isinstance(saved, Mapping):
                self._found.problems.append(f"{path}: expected a state dict, was {_kind(saved)}")
            elif problem := _other_groups(target, saved):
                self._found.problems.append(f"{path}: {problem}")
            else:
                self._found.loads.append((target, saved))
        elif isinstance(target, Mapping):
            self._mapping(target, saved, path)
        elif isinstance(target, (list, tuple)) and _holds_tensors(target):
            self._sequence(target, saved, path)

    def _mapping(self, target: Mapping[Any, Any], saved: Any, path: str) -> None:
        if not isinstance(saved, Mapping):
            self._found.problems.append(f"{path or 'state'}: expected a dict, was {_kind(saved)}")
            return
        for key, value in target.items():
            inner = f"{path}.{key}" if path else str(key)
            if key in saved:
                self.visit(value, saved[key], inner)
                if isinstance(target, MutableMapping) and _is_value(value, saved[key]):
                    self._found.values.append((target, key, saved[key]))
            elif _wants(value):
                self._found.problems.append(f"{inner}: is not in the checkpoint")
        for key in saved:
            if key not in target and _holds_tensors(saved[key]):
                inner = f"{path}.{key}" if path else str(key)
                self._found.problems.append(f"{inner}: is in the checkpoint, not in the state")

    def _sequence(self, target: Any, saved: Any, path: str) -> None:
        if not isinstance(saved, (list, tuple)) or len(saved) != len(target):
            self._found.problems.append(f"{path}: expected {len(target)} items, was {_kind(saved)}")
            return
        for index, (value, there) in enumerate(zip(target, saved, strict=True)):
            self.visit(value, there, f"{path}.{index}")

    def _tensor(self, target: torch.Tensor, saved: Any, path: str) -> None:
        if problem := _unfillable(target):
            self._found.problems.append(f"{path}: {problem}")
            return
        if self._fits(target.shape, target.dtype, saved, path):
            self._found.fills.append(Fill(saved.name, 0, target.detach()))

    def _parts(self, target: PartialTensor, saved: Any, path: str) -> None:
        if self._fits(target.shape, target.dtype, saved, path):
            self._found.fills += [Fill(saved.name, start, part) for start, part in target.parts]

    def _fits(self, shape: Sequence[int], dtype: torch.dtype, saved: Any, path: str) -> bool:
        problem = ""
        if not isinstance(saved, Stored):
            problem = f"expected a tensor, was {_kind(saved)}"
        elif not _converts(saved.dtype, dtype):
            problem = f"expected {dtype}, was {saved.dtype}"
        elif saved.shape != tuple(shape):
            problem = f"expected shape {tuple(shape)}, was {saved.shape}"
        if problem:
            self._found.problems.append(f"{path}: {problem}")
        return not problem


def replace(saved: Any, give: Callable[[Stored], Any]) -> Any:
    """A copy of `saved` with `give(stored)` in place of each Stored."""
    if isinstance(saved, Stored):
        return give(saved)
    if isinstance(saved, PerRank):
        return PerRank(replace(saved.value, give), saved.is_known)
    if isinstance(saved, Mapping):
        copied = copy.copy(saved)  # an OrderedDict keeps its attributes
        for key, value in saved.items():
            copied[key] = replace(value, give)  # type: ignore[index]
        return copied
    if isinstance(saved, (list, tuple)) and _holds_tensors(saved):
        return type(saved)([replace(value, give) for value in saved])
    return saved


def json_values(saved: Any) -> Any:
    """`saved` without its tensors."""
    if isinstance(saved, PerRank):
        return json_values(saved.value)
    if isinstance(saved, Mapping):
        return {
            key: json_values(value) for key, value in saved.items() if not isinstance(value, Stored)
        }
    if isinstance(saved, (list, tuple)):
        return [None if isinstance(value, Stored) else json_values(value) for value in saved]
    return saved


def stored_in(saved: Any) -> list[Stored]:
    """Every tensor of `saved`, in order."""
    if isinstance(saved, Stored):
        return [saved]
    if isinstance(saved, PerRank):
        return stored_in(saved.value)
    values = saved.values() if isinstance(saved, Mapping) else saved
    if isinstance(saved, (Mapping, list, tuple)):
        return [stored for value in values for stored in stored_in(value)]
    return []


def _reads_plainly(module: torch.nn.Module) -> bool:
    """Whether filling the tensors of its state dict is all that loading it does."""
    plain = torch.nn.Module
    return all(
        type(each).load_state_dict is plain.load_state_dict
        and type(each).state_dict is plain.state_dict
        and type(each).get_extra_state is plain.get_extra_state
        and not each._load_state_dict_pre_hooks
        and not each._load_state_dict_post_hooks
        and not each._state_dict_hooks
        for each in module.modules()
    )


def _other_groups(target: Any, saved: Mapping[Any, Any]) -> str:
    """Why an optimizer would refuse these param groups, before anything of it changes."""
    groups, there = getattr(target, "param_groups", None), saved.get("param_groups")
    if not isinstance(groups, list) or not isinstance(there, list):
        return ""
    have = [len(group["params"]) for group in groups]
    had = [len(group["params"]) for group in there]
    return "" if have == had else f"expected param groups of {have} parameters, was {had}"


def _unfillable(target: torch.Tensor) -> str:
    if target.is_meta:
        return "is on the meta device without memory; materialize it first (to_empty)"
    if target.layout != torch.strided or target.is_quantized:
        return f"is of layout {target.layout}; expected a plain dense tensor"
    strides = zip(target.stride(), target.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        return "is expanded: several elements share memory; give .clone() of it"
    if target.is_conj() or target.is_neg():
        return "is a lazy conjugate or negative of another tensor; give .resolve_conj() of it"
    return ""


def _converts(saved: torch.dtype, target: torch.dtype) -> bool:
    return saved == target or (saved.is_floating_point and target.is_floating_point)


def _wants(value: Any) -> bool:
    """Whether something in `value` would have been filled."""
    if isinstance(value, Mapping):
        return any(_wants(each) for each in value.values())
    return hasattr(value, "load_state_dict") or _holds_tensors(value)


def _is_value(target: Any, saved: Any) -> bool:
    """Whether a dict's entry is a plain value that takes the saved one's place."""
    fills = isinstance(target, (torch.Tensor, np.ndarray, PartialTensor, PerRank, Mapping))
    if fills or hasattr(target, "load_state_dict") or _holds_tensors(target):
        return False
    return not _holds_tensors(saved)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray, PartialTensor, Stored)):
        return True
    if isinstance(value, PerRank):
        return _holds_tensors(value.value)
    if isinstance(value, Mapping):
        return any(_holds_tensors(each) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_tensors(each) for each in value)


def _kind(saved: Any) -> str:
    if isinstance(saved, Stored):
        return f"a tensor of shape {saved.shape}"
    if isinstance(saved, Mapping):
        return f"a dict of {len(saved)}"
    if isinstance(saved, (list, tuple)):
        return f"{len(saved)} items"
    return f"{type(saved).__name__}"


def _count(filling: Filling) -> str:
    tensors, objects = len(filling.fills), len(filling.loads)
    return f"{tensors} tensors" + (f" and {objects} objects" if objects else "")
