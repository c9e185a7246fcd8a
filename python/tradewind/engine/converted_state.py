"""State of another precision, other masters, another storage or order of memory: loaded by value,
as plain numbers that the optimizer stores in its own way."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tradewind._core import native
from tradewind.engine import saved_state
from tradewind.engine.adoption import clean_name
from tradewind.optim.fused import FusedOptimizer
from tradewind.optim.stored_state import master_values, state_values

if TYPE_CHECKING:
    from tradewind.engine.engine import Engine


def convert(
    engine: Engine,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    states: Mapping[str, Any] | None,
) -> None:
    """Load fresh tensors: parameters from their masters, where they had some, and states as plain
    numbers, which the optimizer stores in its own way."""
    now = engine.optimizer
    names = saved_state.parameter_names(engine)
    entries = _plain_entries(engine, model, optimizer, states)
    values = dict(model)
    wanted: dict[torch.Tensor, dict[str, Any]] = {}
    for parameter, name in names.items():
        entry = entries.get(name, {})
        whole = entry.pop("master", None)
        if name in model and parameter.is_floating_point():
            source = model[name] if whole is None else whole
            if has_master := _has_master(now, parameter):
                entry["master"] = source.float()
            if whole is not None or source.dtype != parameter.dtype:
                is_split = has_master and now.masters == "split"
                values[name] = _ties_away(source) if is_split else source.to(parameter.dtype)
        if entry:
            wanted[parameter] = entry
    here = engine.model.state_dict()
    engine.model.load_state_dict({name: values[clean_name(name)] for name in here})
    sharded = engine._sharing.sharded if engine._sharing is not None else None
    if sharded is not None:
        sharded.load_state(wanted)
        _ = sharded.inner.native_table
        return
    for parameter, entry in wanted.items():
        now.state[parameter] = {
            key: value.to(parameter.device) if key != "step" else value
            for key, value in entry.items()
        }
    now._table = None


def _has_master(optimizer: FusedOptimizer, parameter: torch.Tensor) -> bool:
    return optimizer.masters is not None and parameter.dtype in (torch.bfloat16, torch.float16)


def _plain_entries(
    engine: Engine,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    states: Mapping[str, Any] | None,
) -> dict[str, dict[str, Any]]:
    """By parameter: its states in float32 or as they were, `step`, and its float32 `master` where
    it had one. Of another rule's states the masters alone."""
    now = engine.optimizer
    is_same_rule = optimizer["rule"] == type(now).__name__
    _warn_of_lost_states(engine, optimizer, states, is_same_rule=is_same_rule)
    if states is None:
        return {}
    shapes = {name: p.shape for p, name in saved_state.parameter_names(engine).items()}
    rule_of = {
        name: native.rule(now._rule_name(group))
        for group in (optimizer["groups"] if is_same_rule else ())
        for name in group["params"]
    }
    counted = states["steps"]
    counts = {}
    if counted["values"] is not None:
        counts = dict(zip(counted["names"], counted["values"], strict=True))
    found: dict[str, dict[str, Any]] = {}
    for name, raw in states["states"].items():
        if name not in shapes:
            continue
        order = states["memory_order"].get(name)
        entry = _by_dimensions(raw, order) if states["is_in_memory_order"] else dict(raw)
        like = _laid_out(shapes[name], order)
        plain: dict[str, Any] = {}
        if name in rule_of:
            for key in rule_of[name].state_names:
                value = state_values(rule_of[name], key, entry, like)
                if value is not None:
                    plain[key] = value
            if name in counts:
                plain["step"] = counts[name].clone()
        master = master_values(entry, like.to(model[name].dtype).copy_(model[name]))
        if master is not None:
            plain["master"] = master
        found[name] = plain
    return found


def _by_dimensions(raw: Mapping[str, Any], order: list[int] | None) -> dict[str, Any]:
    """Tensors that were saved as they lie, by the parameter's dimensions."""
    if order is None:
        return dict(raw)
    back = [order.index(dim) for dim in range(len(order))]
    is_flat = saved_state.is_exponents
    return {key: value if is_flat(key) else value.permute(back) for key, value in raw.items()}


def _laid_out(shape: torch.Size, order: list[int] | None) -> torch.Tensor:
    """A float32 tensor that lies as the parameter did."""
    if order is None:
        return torch.empty(shape)
    lying = torch.empty([shape[dim] for dim in order])
    return lying.permute([order.index(dim) for dim in range(len(order))])


def _ties_away(values: torch.Tensor) -> torch.Tensor:
    """The bfloat16 half of a split master, as csrc/step/format.h has it: rounded to nearest, ties
    away from zero."""
    bits = values.float().contiguous().view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), torch.full_like(high, float("nan")), high)


def _warn_of_lost_states(
    engine: Engine,
    optimizer: Mapping[str, Any],
    states: Mapping[str, Any] | None,
    *,
    is_same_rule: bool,
) -> None:
    text = ""
    if not is_same_rule:
        text = f"was {optimizer['rule']}'s, the Engine has {type(engine.optimizer).__name__}"
    elif states is None:
        text = "was each rank's own (strategy='periodic', another number of ranks)"
    if text:
        warnings.warn(
            f"resume: the optimizer's state {text}; it starts anew, parameters go on",
            RuntimeWarning,
            stacklevel=4,
        )
