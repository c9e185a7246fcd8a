"""Users edit groups, state and parameters in place: every edit counts at the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import (
    USUAL_RULES,
    assert_near,
    assert_same_step,
    ours_and_torchs,
    parameter_like,
    parameters_of,
    random_gradients,
    set_gradients,
)
from torch.nn import Parameter

import tradewind as tw

STEPS_ULPS = 64.0  # see test_against_torch
STATES = {"AdamW": "exp_avg", "SGD": "momentum_buffer"}


def run(*optimizers: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        gradients = random_gradients(parameters_of(optimizers[0]), generator)
        for optimizer in optimizers:
            set_gradients(optimizer, gradients)
            optimizer.step()


def new_entry(entry: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() * 0.5 for name, value in entry.items() if name != "step"} | {
        name: value.clone() + 5 for name, value in entry.items() if name == "step"
    }


def swap(optimizer: torch.optim.Optimizer, first: torch.Tensor, second: torch.Tensor) -> None:
    state = optimizer.state
    state[first], state[second] = state[second], state[first]


STATE_EDITS: dict[str, Callable[[torch.optim.Optimizer, list[torch.Tensor], str], Any]] = {
    "in_place": lambda o, p, name: o.state[p[0]][name].zero_(),
    "tensor_replaced": lambda o, p, name: o.state[p[0]].update({name: torch.full((6,), 0.3)}),
    "other_strides": lambda o, p, name: o.state[p[0]].update({name: torch.ones(6, 2)[:, 0]}),
    "entry_replaced": lambda o, p, name: o.state.update({p[0]: new_entry(o.state[p[0]])}),
    "entries_replaced": lambda o, p, name: o.state.update({q: new_entry(o.state[q]) for q in p}),
    "entries_swapped": lambda o, p, name: swap(o, p[0], p[1]),
    "entry_removed": lambda o, p, name: o.state.pop(p[0]),
    "cleared": lambda o, p, name: o.state.clear(),
    "looked_up": lambda o, p, name: o.state[p[2]],
    "foreign_key": lambda o, p, name: o.state[p[0]].update({"ema": torch.zeros(6)}),
}


@pytest.mark.parametrize("edit", STATE_EDITS)
@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_state_edits(rule: str, options: dict[str, Any], edit: str) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.ones(6), torch.ones(6), torch.ones(2)], options)
    for optimizer in (ours, theirs):
        p = parameters_of(optimizer)
        for _ in range(2):
            set_gradients(optimizer, [torch.ones(6), torch.ones(6) * 2, None])
            optimizer.step()
        STATE_EDITS[edit](optimizer, p, STATES[rule])
        set_gradients(optimizer, [torch.ones(6), torch.ones(6), None])
        optimizer.step()
        optimizer.step()
    # An empty entry that a look-up made is no state.
    ours.state.pop(parameters_of(ours)[2], None)
    theirs.state.pop(parameters_of(theirs)[2], None)
    assert_same_step(ours, theirs, STEPS_ULPS)


GROUP_EDITS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "replaced": lambda o: o.param_groups[0]["params"].__setitem__(0, Parameter(torch.ones(4))),
    "appended": lambda o: o.param_groups[0]["params"].append(Parameter(torch.ones(4))),
    "removed": lambda o: o.param_groups[0]["params"].pop(),
    "moved": lambda o: o.param_groups[1]["params"].insert(0, o.param_groups[0]["params"].pop()),
    "group_removed": lambda o: o.param_groups.pop(),
    "group_replaced": lambda o: o.param_groups.__setitem__(1, {**o.param_groups[1], "lr": 0.9}),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("edit", GROUP_EDITS)
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_group_edits(rule: str, edit: str, named: bool) -> None:
    def build(constructor: Any, **extra: Any) -> torch.optim.Optimizer:
        p: list[Any] = [Parameter(torch.ones(n)) for n in (3, 4, 5)]
        if named:
            p = [(f"layer{i}", q) for i, q in enumerate(p)]
        return constructor([{"params": p[:2]}, {"params": p[2:], "lr": 0.5}], lr=0.1, **extra)

    ours = build(getattr(tw.optim, rule))
    theirs = build(getattr(torch.optim, rule), foreach=False)
    run(ours, theirs)
    for optimizer in (ours, theirs):
        GROUP_EDITS[edit](optimizer)
    run(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)


def test_a_parameter_swapped_with_its_state() -> None:
    """What densification in Gaussian splatting does, before there is any state and after."""
    ours, theirs = ours_and_torchs("AdamW", [torch.ones(3)], {"lr": 0.1})
    for size in (5, 7):
        for optimizer in (ours, theirs):
            group = optimizer.param_groups[0]
            entry = optimizer.state.pop(group["params"][0], None)
            group["params"][0] = Parameter(torch.ones(size))
            if entry is not None:
                entry["exp_avg"] = torch.zeros(size)
                entry["exp_avg_sq"] = torch.zeros(size)
                optimizer.state[group["params"][0]] = entry
        run(ours, theirs)
        assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_memory_format_changed_after_steps(rule: str, options: dict[str, Any]) -> None:
    tensor = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(2))
    ours, theirs = ours_and_torchs(rule, [tensor], options)
    run(ours, theirs)
    for optimizer in (ours, theirs):
        parameter = parameters_of(optimizer)[0]
        parameter.data = parameter.data.to(memory_format=torch.channels_last)
    run(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_data_moved_elsewhere(rule: str, options: dict[str, Any]) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.ones(5)], options)
    run(ours, theirs)
    for optimizer in (ours, theirs):
        parameters_of(optimizer)[0].data = torch.full((5,), 2.0)
    run(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)


def test_another_shape_before_there_is_state() -> None:
    ours, theirs = ours_and_torchs("AdamW", [torch.ones(5), torch.ones(2)], {"lr": 0.1})
    for optimizer in (ours, theirs):
        set_gradients(optimizer, [None, torch.ones(2)])
        optimizer.step()
        parameters_of(optimizer)[0].data = torch.ones(50)
    run(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)


def test_another_shape_than_its_state_is_refused() -> None:
    parameter, other = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    optimizer = tw.optim.AdamW([("weight", parameter), ("bias", other)], lr=0.1)
    set_gradients(optimizer, [torch.ones(4), torch.ones(4)])
    optimizer.step()
    moments = optimizer.state[other]["exp_avg"].clone()
    parameter.data = torch.ones(4000)
    parameter.grad = torch.ones(4000)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"parameter 'weight': expected shape \(4000,\), got \(4,\)"
        ):
            optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(4000))
    assert torch.equal(optimizer.state[other]["exp_avg"], moments)


def test_another_dtype_is_refused() -> None:
    parameter = Parameter(torch.ones(4))
    optimizer = tw.optim.AdamW([("weight", parameter)], lr=0.1)
    set_gradients(optimizer, [torch.ones(4)])
    optimizer.step()
    parameter.data = parameter.data.bfloat16()
    parameter.grad = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'weight': was float32 .*, is bfloat16 now; convert"):
        optimizer.step()


def test_converted_before_the_first_step() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = tw.optim.SGD(model.parameters(), lr=1.0)
    model.to(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(optimizer, [torch.ones_like(p) for p in model.parameters()])
    optimizer.step()
    for parameter, start in zip(model.parameters(), before, strict=True):
        assert_near(parameter.detach(), start - 1, 1.0)  # one rounding


def test_a_copy_on_write_parameter_leaves_its_source_alone() -> None:
    source = torch.ones(4)
    parameter = Parameter(torch._lazy_clone(source))
    optimizer = tw.optim.SGD([parameter], lr=1.0)
    set_gradients(optimizer, [torch.ones(4)])
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.zeros(4))
    assert torch.equal(source, torch.ones(4))


def test_state_lies_in_gapped_parameters_order() -> None:
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))[:, ::2]
    ours, theirs = ours_and_torchs("AdamW", [tensor, parameter_like(tensor.t())], {"lr": 0.1})
    run(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)
