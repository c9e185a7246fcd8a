"""Every rule against an independent implementation: torch's own, or the paper's formulas in
float64."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import tradewind as tw

SHAPES = [(33, 17), (4096,), (5, 3, 2), (1,), (0,), (8191,)]
MATRICES = [(33, 17), (16, 64), (64, 16), (1, 5)]
NUM_STEPS = 6

AGAINST_TORCH: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("Adagrad", {"maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "weight_decay": 0.1, "alpha": 0.9}),
    ("RMSprop", {"momentum": 0.9, "maximize": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Muon", {"lr": 0.02}),
    ("Muon", {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
]


def names(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *case[1]])


def twins(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    ours = [Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    return ours, [Parameter(parameter.detach().clone()) for parameter in ours]


def set_gradients(*lists: list[Parameter]) -> None:
    for parameters in zip(*lists, strict=True):
        gradient = torch.randn_like(parameters[0])
        for parameter in parameters:
            parameter.grad = gradient.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("case", AGAINST_TORCH, ids=names)
def test_same_as_torch(case: tuple[str, dict[str, Any]], dtype: torch.dtype) -> None:
    name, options = case
    if name == "Muon" and dtype.is_complex:
        pytest.skip("torch's Muon has no complex parameters either")
    torch.manual_seed(0)
    ours, theirs = twins(MATRICES if name == "Muon" else SHAPES, dtype)
    our = getattr(tw.optim, name)(ours, **options)
    their = getattr(torch.optim, name)(theirs, **options)
    for _ in range(NUM_STEPS):
        set_gradients(ours, theirs)
        our.step()
        their.step()
    # A few roundings per step in another order; Muon's bfloat16 products amplify them.
    tolerance = 2e-3 if name == "Muon" else 1e-12 if dtype == torch.float64 else 4e-6
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(ours, theirs, strict=True):
        for key, value in their.state[b].items():
            if isinstance(value, torch.Tensor):
                # A centered variance is a difference of near numbers: it loses some digits.
                torch.testing.assert_close(our.state[a][key], value, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("case", AGAINST_TORCH, ids=names)
def test_state_dicts_pass_between_torch_and_ours(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    torch.manual_seed(1)
    ours, theirs = twins([(33, 17), (16, 64)], torch.float32)
    our = getattr(tw.optim, name)(ours, **options)
    their = getattr(torch.optim, name)(theirs, **options)
    set_gradients(ours, theirs)
    our.step()
    their.step()
    again = [Parameter(p.detach().clone()) for p in theirs]
    resumed = getattr(tw.optim, name)(again, **options)
    resumed.load_state_dict(deepcopy(their.state_dict()))
    back = [Parameter(p.detach().clone()) for p in ours]
    returned = getattr(torch.optim, name)(back, **options)
    returned.load_state_dict(deepcopy(our.state_dict()))
    set_gradients(ours, theirs, again, back)
    for optimizer in (our, their, resumed, returned):
        optimizer.step()
    tolerance = 2e-3 if name == "Muon" else 4e-6  # as above
    for group in (theirs, again, back):
        for a, b in zip(ours, group, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def lion(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], o: dict[str, Any]) -> None:
    """Algorithm 2 of arXiv:2302.06675."""
    m = state.setdefault("m", torch.zeros_like(p))
    b1, b2 = o["betas"]
    p -= o["lr"] * (torch.sign(b1 * m + (1 - b1) * g) + o["weight_decay"] * p)
    state["m"] = b2 * m + (1 - b2) * g


def lamb(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], o: dict[str, Any]) -> None:
    """Algorithm 2 of arXiv:1904.00962."""
    state["t"] = state.get("t", 0) + 1
    b1, b2 = o["betas"]
    state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1 - b1) * g
    state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1 - b2) * g * g
    m = state["m"] / (1 - b1 ** state["t"])
    v = state["v"] / (1 - b2 ** state["t"])
    direction = m / (v.sqrt() + o["eps"]) + o["weight_decay"] * p
    weights, steps = p.norm(), direction.norm()
    ratio = weights / steps if weights > 0 and steps > 0 else torch.tensor(1.0)
    p -= o["lr"] * ratio * direction


PAPERS: list[tuple[str, Callable[..., None], dict[str, Any]]] = [
    ("Lion", lion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ("LAMB", lamb, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1}),
    ("LAMB", lamb, {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name,formula,options", PAPERS)
def test_same_as_the_paper(
    name: str, formula: Callable[..., None], options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    ours, _ = twins(SHAPES, dtype)
    with torch.no_grad():
        ours[2].zero_()  # a norm of zero
    expected = [parameter.detach().double() for parameter in ours]
    states: list[dict[str, Any]] = [{} for _ in ours]
    optimizer = getattr(tw.optim, name)(ours, **options)
    for _ in range(NUM_STEPS):
        set_gradients(ours)
        optimizer.step()
        for parameter, reference, state in zip(ours, expected, states, strict=True):
            assert parameter.grad is not None
            formula(reference, parameter.grad.double(), state, options)
    # Roundings of a few operations per step; in float32 the parameter's own dominates.
    tolerance = 1e-12 if dtype == torch.float64 else 4e-6
    for parameter, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(parameter.double(), reference, rtol=tolerance, atol=tolerance)


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .*\[3\].*AdamW"):
        tw.optim.Muon([Parameter(torch.ones(2, 2)), Parameter(torch.ones(3))])
