"""AdamW and SGD against `torch.optim`, one tensor at a time, in every shape, order and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import (
    LAYOUTS,
    RULES,
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

# Both sides round some ten operations a step, in another order (torch folds two of them with
# lerp and addcdiv); each differs by an ulp at most, and five steps add up.
STEPS_ULPS = 32.0


def randn(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Any:
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_every_layout(rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [make(randn(generator, dtype)) for make in LAYOUTS.values()]
    ours, theirs = ours_and_torchs(rule, tensors, options)
    for _ in range(5):
        gradients = random_gradients(tensors, generator)
        for optimizer in (ours, theirs):
            set_gradients(optimizer, gradients)
            optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_16_bit_is_float32_rounded_once_a_step(
    rule: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    # torch rounds to 16 bits after every operation, we once a step: so the reference is torch in
    # float32 on values that are rounded to 16 bits after each step.
    generator = torch.Generator().manual_seed(2)
    tensors = [make(randn(generator, dtype)) for make in LAYOUTS.values()]
    ours, _ = ours_and_torchs(rule, tensors, options)
    _, theirs = ours_and_torchs(rule, [t.float() for t in tensors], options)
    for _ in range(4):
        gradients = random_gradients(tensors, generator)
        set_gradients(ours, gradients)
        set_gradients(theirs, [gradient.float() for gradient in gradients])
        ours.step()
        theirs.step()
        for mine, reference in zip(parameters_of(ours), parameters_of(theirs), strict=True):
            reference.data.copy_(reference.to(dtype))
            # A float32 ulp can tip one rounding to 16 bits, and a tipped state moves the next.
            assert_near(mine.detach(), reference.detach().to(dtype), 2.0)
            for name, value in theirs.state[reference].items():
                if name != "step" and value is not None:
                    value.copy_(value.to(dtype))
                    assert_near(ours.state[mine][name], value.to(dtype), 2.0, name)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_bfloat16_stays_near_torchs_own(rule: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [make(randn(generator, torch.bfloat16)) for make in LAYOUTS.values()]
    ours, theirs = ours_and_torchs(rule, tensors, options)
    for _ in range(3):
        gradients = random_gradients(tensors, generator)
        for optimizer in (ours, theirs):
            set_gradients(optimizer, gradients)
            optimizer.step()
    for mine, reference in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        # torch rounds each of some ten operations a step to 8 bits; half an ulp each, three steps.
        assert_near(mine.detach(), reference.detach(), 15.0)


def test_gaps_between_elements_stay_untouched() -> None:
    base = torch.full((6, 10), 3.0)
    parameter = Parameter(base[:, ::2])
    parameter.grad = torch.ones(6, 5)
    tw.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(base[:, ::2], torch.full((6, 5), 2.0))
    assert torch.equal(base[:, 1::2], torch.full((6, 5), 3.0))


def test_groups_with_different_options() -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(n, generator=generator) for n in (3, 4097, 65, 0, 9)]

    def groups() -> list[dict[str, Any]]:
        p = [parameter_like(t) for t in tensors]
        return [
            {"params": p[:2]},
            {"params": p[2:3], "lr": 0.2, "betas": (0.5, 0.6), "amsgrad": True},
            {"params": []},
            {"params": p[3:], "weight_decay": 0.0, "maximize": True, "eps": 1e-2},
        ]

    ours = tw.optim.AdamW(groups(), lr=0.01)
    theirs = torch.optim.AdamW(groups(), lr=0.01, foreach=False)
    for _ in range(4):
        gradients = random_gradients(tensors, generator)
        for optimizer in (ours, theirs):
            set_gradients(optimizer, gradients)
            optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_dtypes_mix_within_a_group(rule: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32]
    tensors = [torch.randn(9, generator=generator).to(dtype) for dtype in dtypes]
    ours, theirs = ours_and_torchs(rule, tensors, options)
    for _ in range(3):
        gradients = random_gradients(tensors, generator)
        for optimizer in (ours, theirs):
            set_gradients(optimizer, gradients)
            optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_gradients_that_come_and_go(rule: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(6)
    tensors = [torch.randn(n, generator=generator) for n in (5, 70, 3, 8)]
    ours, theirs = ours_and_torchs(rule, tensors, options)
    # The last one never has a gradient: it is not decayed and has no state.
    for present in [(1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (1, 1, 1, 0)]:
        random = random_gradients(tensors, generator)
        gradients = [g if here else None for g, here in zip(random, present, strict=True)]
        for optimizer in (ours, theirs):
            set_gradients(optimizer, gradients)
            optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)
    assert torch.equal(parameters_of(ours)[3].detach(), tensors[3])
    assert parameters_of(ours)[3] not in ours.state


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_zero_gradients_still_decay(rule: str, options: dict[str, Any]) -> None:
    tensors = [torch.ones(5)]
    ours, theirs = ours_and_torchs(rule, tensors, options)
    for optimizer in (ours, theirs):
        set_gradients(optimizer, [torch.zeros(5)])
        optimizer.step()
    assert_same_step(ours, theirs, STEPS_ULPS)
    decays = options.get("weight_decay", 1e-2 if rule == "AdamW" else 0) > 0
    assert torch.equal(parameters_of(ours)[0].detach(), tensors[0]) != decays


@pytest.mark.parametrize("lr", [torch.tensor(0.05), torch.tensor([0.05], dtype=torch.float64)])
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_lr_as_a_tensor_changed_in_place(rule: str, lr: torch.Tensor) -> None:
    tensors = [torch.randn(9, generator=torch.Generator().manual_seed(7))]
    ours = getattr(tw.optim, rule)([parameter_like(t) for t in tensors], lr=lr)
    theirs = getattr(torch.optim, rule)([parameter_like(t) for t in tensors], lr=float(lr))
    for factor in (1.0, 0.5, 3.0):
        lr.mul_(factor)
        theirs.param_groups[0]["lr"] = float(lr)
        for optimizer in (ours, theirs):
            set_gradients(optimizer, [torch.ones(9)])
            optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)
    assert ours.param_groups[0]["lr"] is lr
    lr.fill_(0.05)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("AdamW", {"lr": 0.3, "betas": (0.2, 0.7), "eps": 0.1, "weight_decay": 0.5}),
        ("AdamW", {"maximize": True}),
        ("SGD", {"lr": 0.3, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.5}),
        ("SGD", {"nesterov": True, "dampening": 0, "maximize": True}),
        ("SGD", {"momentum": 0.0}),
    ],
)
def test_options_changed_between_steps(rule: str, changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(8)
    tensors = [torch.randn(9, generator=generator)]
    ours, theirs = ours_and_torchs(rule, tensors, dict(USUAL_RULES)[rule])
    before = {name: ours.param_groups[0][name] for name in changes}
    for changed in ({}, changes, before):  # and back again, with the state that was kept
        gradients = random_gradients(tensors, generator)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(changed)
            set_gradients(optimizer, gradients)
            optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)


def test_amsgrad_turned_on_later_starts_its_maximum_at_zero() -> None:
    tensors = [torch.ones(3)]
    ours, theirs = ours_and_torchs("AdamW", tensors, {"lr": 0.1})
    for optimizer in (ours, theirs):
        set_gradients(optimizer, tensors)
        optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = True
    reference = parameters_of(theirs)[0]
    theirs.state[reference]["max_exp_avg_sq"] = torch.zeros(3)  # torch itself raises KeyError
    for optimizer in (ours, theirs):
        optimizer.step()
    assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_named_parameters(rule: str) -> None:
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    ours = getattr(tw.optim, rule)(model.named_parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    assert ours.param_groups[0]["param_names"] == names
    reference = [parameter_like(p) for p in model.parameters()]
    theirs = getattr(torch.optim, rule)(reference, lr=0.1, foreach=False)
    for optimizer in (ours, theirs):
        set_gradients(optimizer, [torch.ones(p.shape) for p in reference])
        optimizer.step()
    assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize("names", [["w", "w"], ["", "b"]])
def test_names_may_repeat_or_be_empty(names: list[str]) -> None:
    parameters = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    ours = tw.optim.SGD(list(zip(names, parameters, strict=True)), lr=1.0)
    set_gradients(ours, [torch.ones(2), torch.ones(3)])
    ours.step()
    assert all(torch.equal(p.detach(), torch.zeros(p.shape)) for p in parameters)


GRADIENT_ORDERS = {
    "transposed": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:1].expand(g.shape),
    "element_gaps": lambda g: torch.stack([g, g], dim=-1)[..., 0],
    "negative_view": lambda g: torch._neg_view(g),
    "part_of_a_larger_one": lambda g: torch.cat([g, g])[: g.shape[0]],
}


@pytest.mark.parametrize("order", GRADIENT_ORDERS)
@pytest.mark.parametrize("layout", ["matrix", "transposed", "element_gaps"])
def test_gradients_of_another_memory_order(layout: str, order: str) -> None:
    generator = torch.Generator().manual_seed(10)
    tensor = LAYOUTS[layout](randn(generator))
    gradient = GRADIENT_ORDERS[order](torch.randn(tensor.shape, generator=generator))
    for rule, options in USUAL_RULES:
        ours, theirs = ours_and_torchs(rule, [tensor], options)
        for optimizer in (ours, theirs):
            for _ in range(2):
                parameters_of(optimizer)[0].grad = gradient
                optimizer.step()
        assert_same_step(ours, theirs, STEPS_ULPS)
