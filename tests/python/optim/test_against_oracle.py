"""Relative error against float64 oracles: ours (`native.oracle_step`), and AdamW and SGD written
anew from their papers, which must agree with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from optimizer_cases import RULES, USUAL_RULES
from torch.nn import Parameter

import tradewind as tw
from tradewind._core import native

Array = npt.NDArray[np.float64]
# In float32 a step rounds some ten times: 1e-7 is about one ulp, 20 steps add up. In float64 the
# oracle rounds as the kernel does. 16-bit types round parameter and state once a step.
TOLERANCES = {
    torch.float64: 1e-15,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def adamw_of_the_paper(
    options: dict[str, Any], step: int, parameter: Array, gradient: Array, states: list[Array]
) -> tuple[Array, list[Array]]:
    """Loshchilov and Hutter (2019), algorithm 2, lines 6-12; AMSGrad by Reddi et al. (2018)."""
    lr, (beta1, beta2) = options["lr"], options["betas"]
    m = beta1 * states[0] + (1 - beta1) * gradient
    v = beta2 * states[1] + (1 - beta2) * gradient**2
    states = [m, v, *([np.maximum(states[2], v)] if options["amsgrad"] else [])]
    m_hat = m / (1 - beta1**step)
    v_hat = states[-1] / (1 - beta2**step)
    update = lr * m_hat / (np.sqrt(v_hat) + options["eps"])
    return parameter - update - lr * options["weight_decay"] * parameter, states


def sgd_of_the_papers(
    options: dict[str, Any], step: int, parameter: Array, gradient: Array, states: list[Array]
) -> tuple[Array, list[Array]]:
    """Polyak's momentum with dampening, and Nesterov's as in Sutskever et al. (2013)."""
    direction = gradient + options["weight_decay"] * parameter
    if options["momentum"]:
        momentum = options["momentum"]
        buffer = momentum * states[0] + (1 - options["dampening"]) * direction
        states = [direction if step == 1 else buffer]
        direction = direction + momentum * states[0] if options["nesterov"] else states[0]
    return parameter - options["lr"] * direction, states


PAPERS = {"AdamW": adamw_of_the_paper, "SGD": sgd_of_the_papers}


def relative_error(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))


def as_float64(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy().copy()


def oracle_run(
    rule: str, group: dict[str, Any], parameter: Array, states: list[Array], gradients: list[Array]
) -> tuple[Array, list[Array]]:
    optimizer = getattr(tw.optim, rule)
    for step, gradient in enumerate(gradients, start=1):
        result = native.oracle_step(
            optimizer._rule_name(group),
            optimizer._option_values(group),
            step,
            step == 1,
            parameter.tolist(),
            (-gradient if group["maximize"] else gradient).tolist(),
            [state.tolist() for state in states],
        )
        parameter, states = np.array(result[0]), [np.array(state) for state in result[1]]
    return parameter, states


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_the_oracle_agrees_with_the_papers(rule: str, options: dict[str, Any]) -> None:
    group = getattr(tw.optim, rule)([torch.zeros(1)], **options).param_groups[0]
    info = native.rule(getattr(tw.optim, rule)._rule_name(group))
    random = np.random.default_rng(1)
    parameter = random.standard_normal(50)
    gradients = [random.standard_normal(50) for _ in range(30)]
    zeros = [np.zeros(50) for _ in info.state_names]
    got, got_states = oracle_run(rule, group, parameter, zeros, gradients)
    states: list[Array] = zeros
    for step, gradient in enumerate(gradients, start=1):
        signed = -gradient if group["maximize"] else gradient
        parameter, states = PAPERS[rule](group, step, parameter, signed, states)
    # float64 in another order of operations, 30 steps of some ten roundings each.
    assert relative_error(got, parameter) < 1e-13
    for mine, reference in zip(got_states, states, strict=True):
        assert relative_error(mine, reference) < 1e-13


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_one_step_from_any_state(rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """From the same stored values: only the kernel's own rounding is left."""
    random = np.random.default_rng(2)
    parameter = Parameter(torch.from_numpy(random.standard_normal(4099)).to(dtype))
    optimizer = getattr(tw.optim, rule)([parameter], **options)
    for _ in range(3):
        gradient = torch.from_numpy(random.standard_normal(4099)).to(dtype)
        group = optimizer.param_groups[0]
        names = native.rule(optimizer._rule_name(group)).state_names
        entry = optimizer.state.get(parameter, {})
        states = [as_float64(entry[n]) if n in entry else np.zeros(4099) for n in names]
        signed = as_float64(gradient) * (-1.0 if group["maximize"] else 1.0)
        want, want_states = native.oracle_step(
            optimizer._rule_name(group),
            optimizer._option_values(group),
            int(entry.get("step", 0)) + 1,
            not entry,
            as_float64(parameter).tolist(),
            signed.tolist(),
            [state.tolist() for state in states],
        )
        parameter.grad = gradient
        optimizer.step()
        assert relative_error(as_float64(parameter), np.array(want)) < TOLERANCES[dtype]
        for name, reference in zip(names, want_states, strict=True):
            got = as_float64(optimizer.state[parameter][name])
            assert relative_error(got, np.array(reference)) < TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_twenty_steps(rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    random = np.random.default_rng()  # fresh inputs each time: the tolerance must hold for any
    start = torch.from_numpy(random.standard_normal(1000)).to(dtype)
    gradients = [torch.from_numpy(random.standard_normal(1000)).to(dtype) for _ in range(20)]
    parameter = Parameter(start.clone())
    optimizer = getattr(tw.optim, rule)([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    group = optimizer.param_groups[0]
    names = native.rule(optimizer._rule_name(group)).state_names
    want, want_states = oracle_run(
        rule,
        group,
        as_float64(start),
        [np.zeros(1000) for _ in names],
        [as_float64(gradient) for gradient in gradients],
    )
    assert relative_error(as_float64(parameter), want) < TOLERANCES[dtype]
    for name, reference in zip(names, want_states, strict=True):
        got = as_float64(optimizer.state[parameter][name])
        assert relative_error(got, reference) < TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 31, 4096, 4097, 100_001])
def test_the_norm(dtype: torch.dtype, size: int) -> None:
    random = np.random.default_rng(3)
    parameter = Parameter(torch.zeros(size, dtype=dtype))
    parameter.grad = torch.from_numpy(random.standard_normal(size)).to(dtype)
    optimizer = tw.optim.SGD([parameter], lr=0.0, clip_norm=1.0)
    optimizer.step()
    want = math.sqrt(math.fsum(value * value for value in as_float64(parameter.grad).tolist()))
    # Squares are exact below float64; what is left is adding float64 values in 32 lanes.
    assert optimizer.outcome.norm == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_a_large_step_count(rule: str, options: dict[str, Any]) -> None:
    parameter = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = getattr(tw.optim, rule)([parameter], **options)
    parameter.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    if rule == "AdamW":
        optimizer.state[parameter]["step"].fill_(2**23)
    group = optimizer.param_groups[0]
    names = native.rule(optimizer._rule_name(group)).state_names
    states = [as_float64(optimizer.state[parameter][name]) for name in names]
    start = as_float64(parameter)
    optimizer.step()
    want, _ = PAPERS[rule](group, 2**23 + 1, start, np.ones(3), states)
    assert relative_error(as_float64(parameter), want) < 1e-15
