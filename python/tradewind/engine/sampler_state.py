"""What a DataLoader's sampler holds at the beginning of an epoch, so that its order can be drawn
again: its `state_dict` where it has one, else the generators among its attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from tradewind.checkpoint.random_state import generator_state, set_generator_state


def sampler_state(loader: Any) -> dict[str, Any]:
    """JSON values and CPU tensors; empty where nothing is held, or where the loader has a
    `state_dict` of its own, which holds it."""
    if _knows_itself(loader):
        return {}
    found: dict[str, Any] = {}
    for name, holder in _holders(loader):
        if _knows_itself(holder):
            found[name] = {"state": copy.deepcopy(holder.state_dict())}
        elif states := _generators(holder):
            found[name] = {"generators": states}
    return found


def load_sampler_state(loader: Any, state: dict[str, Any]) -> None:
    """Raises TypeError where a generator is of another kind than the one that was saved."""
    for name, holder in _holders(loader):
        saved = state.get(name, {})
        if "state" in saved and _knows_itself(holder):
            holder.load_state_dict(saved["state"])
        for key, value in saved.get("generators", {}).items():
            generator = getattr(holder, key, None)
            if generator is not None:
                set_generator_state(generator, value)


def generators_of(loader: Any) -> dict[str, Any]:
    """As `sampler_state`, of the generators alone, whatever has a `state_dict`."""
    found = {name: {"generators": _generators(holder)} for name, holder in _holders(loader)}
    return {name: states for name, states in found.items() if states["generators"]}


def _holders(loader: Any) -> Iterator[tuple[str, Any]]:
    """The loader and what draws its order."""
    if not isinstance(loader, DataLoader):
        return
    yield "loader", loader
    seen: list[Any] = []
    for name, holder in (("batch_sampler", loader.batch_sampler), ("sampler", loader.sampler)):
        while holder is not None and not any(holder is other for other in seen):
            seen.append(holder)
            yield name, holder
            name, holder = f"{name}.sampler", getattr(holder, "sampler", None)


def _generators(holder: Any) -> dict[str, Any]:
    attributes = getattr(holder, "__dict__", {}).items()
    states = {str(key): generator_state(value) for key, value in attributes}
    return {key: state for key, state in states.items() if state is not None}


def _knows_itself(holder: Any) -> bool:
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
