"""The contract of `torch.optim.Optimizer`: what training scripts and torch's own tools lean on."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import sys
from typing import Any

import pytest
import torch
from optimizer_cases import (
    USUAL_RULES,
    assert_same_step,
    bits,
    ours_and_torchs,
    parameter_like,
    parameters_of,
    set_gradients,
)
from torch.nn import Parameter
from torch.optim import lr_scheduler

import tradewind as tw

STEPS_ULPS = 64.0  # a dozen steps here; see test_against_torch


def step_both(*optimizers: torch.optim.Optimizer, value: float = 1.0) -> None:
    for optimizer in optimizers:
        set_gradients(optimizer, [torch.full(p.shape, value) for p in parameters_of(optimizer)])
        optimizer.step()


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_is_an_optimizer(rule: str, options: dict[str, Any]) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.ones(2)], options)
    assert isinstance(ours, torch.optim.Optimizer)
    assert set(ours.param_groups[0]) == set(theirs.param_groups[0])
    assert set(ours.defaults) == set(theirs.defaults)
    assert f"{rule} (" in repr(ours)


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    # Cycles momentum, or the first beta.
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_schedulers(rule: str, options: dict[str, Any], name: str) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.linspace(-1, 1, 9)], options)
    schedulers = [SCHEDULERS[name](ours), SCHEDULERS[name](theirs)]
    rates = set()
    for _ in range(10):
        step_both(ours, theirs)
        for scheduler in schedulers:
            scheduler.step()
        rates.add(ours.param_groups[0]["lr"])
        assert_same_step(ours, theirs, STEPS_ULPS)
    assert len(rates) > 3


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_a_group_added_after_steps(rule: str, options: dict[str, Any]) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.ones(3)], options)
    step_both(ours, theirs)
    for optimizer in (ours, theirs):
        optimizer.add_param_group({"params": [parameter_like(torch.ones(4))], "lr": 0.5})
    step_both(ours, theirs)
    step_both(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize("params", [iter, lambda p: (x for x in p), tuple], ids=str)
def test_a_group_takes_any_iterable(params: Any) -> None:
    ours = tw.optim.SGD([{"params": params([Parameter(torch.ones(2))])}], lr=1.0)
    step_both(ours)
    assert torch.equal(parameters_of(ours)[0].detach(), torch.zeros(2))


def test_closure() -> None:
    parameter = Parameter(torch.tensor([2.0]))
    optimizer = tw.optim.SGD([parameter], lr=0.25)

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert float(parameter.detach()) == 1.0
    assert optimizer.step() is None


def test_hooks_run_around_step() -> None:
    calls = []
    optimizer = tw.optim.SGD([Parameter(torch.ones(1))], lr=1.0)

    def pre(given: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        calls.append(("pre", given is optimizer, parameters_of(given)[0].item()))

    def post(given: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        calls.append(("post", given is optimizer, parameters_of(given)[0].item()))

    handle = optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(post)
    step_both(optimizer)
    handle.remove()
    step_both(optimizer)
    assert calls == [("pre", True, 1.0), ("post", True, 0.0), ("post", True, -1.0)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    ours, theirs = ours_and_torchs("SGD", [torch.ones(3)], {"lr": 0.1, "momentum": 0.9})
    for optimizer in (ours, theirs):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            (parameters_of(optimizer)[0] ** 2).sum().backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        gradient = parameters_of(optimizer)[0].grad
        assert (gradient is None) == set_to_none
        assert gradient is None or not gradient.any()
    assert_same_step(ours, theirs, STEPS_ULPS)


def test_parameters_without_requires_grad() -> None:
    frozen = Parameter(torch.ones(2), requires_grad=False)
    given = Parameter(torch.ones(2), requires_grad=False)
    trained = Parameter(torch.ones(2))
    optimizer = tw.optim.AdamW([frozen, given, trained], lr=0.5)
    given.grad = torch.ones(2)  # by hand: torch steps it too
    trained.sum().backward()
    optimizer.step()
    assert torch.equal(frozen.detach(), torch.ones(2)) and frozen not in optimizer.state
    assert torch.equal(given.detach(), trained.detach())
    assert not torch.equal(given.detach(), torch.ones(2))


def test_a_later_use_of_an_overwritten_value_raises_torchs_error() -> None:
    parameter = Parameter(torch.ones(2))
    optimizer = tw.optim.SGD([parameter], lr=1.0)
    version = parameter._version
    loss = (parameter * parameter).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert parameter._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class NonFiniteAt:
    """A loss whose gradient is infinite at one step."""

    def __init__(self, step: int) -> None:
        self.step, self.count = step, 0

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (parameter * (float("inf") if self.count == self.step else 1.0)).sum()


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
@pytest.mark.parametrize("unscale_first", [True, False])
def test_torchs_grad_scaler(rule: str, options: dict[str, Any], unscale_first: bool) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.ones(3)], options)
    scales = []
    for optimizer in (ours, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        loss_of = NonFiniteAt(2)
        for _ in range(4):
            optimizer.zero_grad()
            before = bits(parameters_of(optimizer)[0])
            scaler.scale(loss_of(parameters_of(optimizer)[0])).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            skipped = bits(parameters_of(optimizer)[0]) == before
            assert skipped == (loss_of.count == 2)
        scales.append(scaler.get_scale())
    assert scales == [2.0**9, 2.0**9]
    assert_same_step(ours, theirs, STEPS_ULPS)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_copies_go_their_own_way(rule: str, options: dict[str, Any], clone: Any) -> None:
    optimizer, theirs = ours_and_torchs(rule, [torch.ones(3), torch.ones(4097)], options)
    optimizer.clip_norm = 0.5
    theirs_too = copy.deepcopy(theirs)
    step_both(optimizer)
    step_both(theirs, theirs_too, value=0.5 / (4100**0.5 + 1e-6))
    twin = clone(optimizer)
    assert twin.clip_norm == 0.5
    step_both(twin)
    for parameter, kept in zip(parameters_of(optimizer), parameters_of(theirs), strict=True):
        torch.testing.assert_close(parameter, kept)  # the original did not move
    step_both(optimizer)
    pairs = zip(parameters_of(optimizer), parameters_of(twin), strict=True)
    for parameter, other in pairs:
        assert bits(parameter) == bits(other)
        for name, value in optimizer.state[parameter].items():
            assert bits(value) == bits(twin.state[other][name])


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_native_handles_refuse_copies_by_name(copier: Any) -> None:
    optimizer = tw.optim.SGD([Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(TypeError, match=r"OptimizerTable.*cannot be pickled or copied.*state_dict"):
        copier(optimizer.native_table)


def child_that_exits(optimizer: torch.optim.Optimizer, way: str) -> None:
    if way == "sys.exit":
        sys.exit(0)
    optimizer.__dict__.clear()
    gc.collect()
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("way", ["sys.exit", "destroyed"])
@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_a_forked_child_leaves_the_state_intact(
    rule: str, options: dict[str, Any], way: str
) -> None:
    ours, theirs = ours_and_torchs(rule, [torch.ones(3), torch.ones(4097)], options)
    ours.hook_gradients("measure")
    step_both(ours, theirs)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=child_that_exits, args=(ours, way))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    step_both(ours, theirs)
    assert_same_step(ours, theirs, STEPS_ULPS)
