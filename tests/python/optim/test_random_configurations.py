"""A thousand random configurations against torch: options, groups, shapes, missing gradients."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import (
    assert_same_step,
    parameter_like,
    parameters_of,
    random_gradients,
    set_gradients,
)

import tradewind as tw

NUM_EXAMPLES_A_RULE = 500
# As in test_against_torch, but options here can amplify: a small eps and a small beta2 divide by a
# small number that both sides have rounded differently.
ULPS = 512.0

learning_rates = st.sampled_from([0.0, 1e-4, 1e-2, 0.3])
decays = st.sampled_from([0.0, 1e-2, 0.5])
adamw_options = st.fixed_dictionaries(
    {},
    optional={
        "lr": learning_rates,
        "betas": st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.6, 0.9, 0.999])),
        "eps": st.sampled_from([1e-8, 1e-4, 1.0]),
        "weight_decay": decays,
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    },
)
sgd_options = st.one_of(
    st.fixed_dictionaries(
        {"lr": learning_rates},
        optional={
            "momentum": st.sampled_from([0.0, 0.5, 0.9]),
            "dampening": st.sampled_from([0.0, 0.3, 1.0]),
            "weight_decay": decays,
            "maximize": st.booleans(),
        },
    ),
    st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.1, 0.9]),
            "nesterov": st.just(True),
            "dampening": st.just(0),
        },
        optional={"lr": learning_rates, "weight_decay": decays, "maximize": st.booleans()},
    ),
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.tuples(shapes, st.sampled_from([torch.float32, torch.float64]), st.booleans())
plans = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "groups": st.lists(st.lists(tensors, min_size=1, max_size=3), min_size=1, max_size=3),
        "num_steps": st.integers(1, 5),
        "clip_norm": st.sampled_from([None, None, 0.5, 100.0]),
        "scale": st.sampled_from([1.0, 1e-3, 30.0]),
    }
)


def clip_in_float64(parameters: list[torch.Tensor], max_norm: float) -> None:
    """torch's clipping, its norm in float64: among float32 ones torch's own is float32."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([g.double() for g in gradients], foreach=False)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)


def check(rule: str, options: list[dict[str, Any]], plan: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(plan["seed"])

    def make(shape: tuple[int, ...], dtype: torch.dtype, reverse: bool) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return tensor.permute(tuple(reversed(range(tensor.dim())))) if reverse else tensor

    values = [[make(*tensor) for tensor in group] for group in plan["groups"]]

    def build(constructor: Any, **extra: Any) -> torch.optim.Optimizer:
        groups = [
            {**options[i % len(options)], "params": [parameter_like(t) for t in group]}
            for i, group in enumerate(values)
        ]
        return constructor(groups, **extra)

    ours = build(getattr(tw.optim, rule), clip_norm=plan["clip_norm"])
    theirs = build(getattr(torch.optim, rule), foreach=False)
    for _ in range(plan["num_steps"]):
        gradients = [g * plan["scale"] for g in random_gradients(parameters_of(ours), generator)]
        present = torch.rand(len(gradients), generator=generator) < 0.8
        masked = [g if here else None for g, here in zip(gradients, present, strict=True)]
        for optimizer in (ours, theirs):
            set_gradients(optimizer, masked)
        if plan["clip_norm"] is not None:
            clip_in_float64(parameters_of(theirs), plan["clip_norm"])
        ours.step()
        theirs.step()
        assert_same_step(ours, theirs, ULPS)


configured = settings(
    max_examples=NUM_EXAMPLES_A_RULE, deadline=None, derandomize=True, database=None
)


@configured
@given(options=st.lists(adamw_options, min_size=1, max_size=2), plan=plans)
def test_adamw(options: list[dict[str, Any]], plan: dict[str, Any]) -> None:
    check("AdamW", options, plan)


@configured
@given(options=st.lists(sgd_options, min_size=1, max_size=2), plan=plans)
def test_sgd(options: list[dict[str, Any]], plan: dict[str, Any]) -> None:
    check("SGD", options, plan)
