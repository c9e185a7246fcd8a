"""`clip_norm=` against `torch.nn.utils.clip_grad_norm_` followed by torch's optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizer_cases import (
    LAYOUTS,
    USUAL_RULES,
    assert_near,
    assert_same_step,
    bits,
    ours_and_torchs,
    parameters_of,
    set_gradients,
)

# torch takes norm and factor in float32 and stores the clipped gradient rounded, we in float64 and
# not at all: 32 ulps for the step, as without clipping, and 32 for those.
CLIPPED_ULPS = 64.0


def clipped_step(
    theirs: torch.optim.Optimizer, gradients: list[torch.Tensor], max_norm: float
) -> torch.Tensor:
    set_gradients(theirs, gradients)
    norm = torch.nn.utils.clip_grad_norm_(parameters_of(theirs), max_norm, foreach=False)
    theirs.step()
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])  # the norm far below, above, far above
@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_norms_below_and_above(
    rule: str, options: dict[str, Any], scale: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: Any) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tensors = [make(randn) for make in LAYOUTS.values()]
    ours, theirs = ours_and_torchs(rule, tensors, options)
    ours.clip_norm = 2.5
    for _ in range(3):
        gradients = [randn(t.shape) * scale for t in tensors]
        set_gradients(ours, gradients)
        ours.step()
        norm = clipped_step(theirs, gradients, 2.5)
        assert ours.outcome.norm == pytest.approx(float(norm), rel=1e-5)  # torch's is float32
        assert (ours.outcome.clip_factor < 1.0) == (float(norm) > 2.5)
        assert_same_step(ours, theirs, CLIPPED_ULPS)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_non_finite_gradients_end_as_in_torch(
    rule: str, options: dict[str, Any], bad: float
) -> None:
    # infinite norm: factor 0, so finite gradients count as 0 and infinite ones become NaN;
    # NaN norm: everything becomes NaN.
    tensors = [torch.ones(5), torch.ones(4097)]
    gradients = [torch.ones(5), torch.ones(4097)]
    gradients[1][4096] = bad
    ours, theirs = ours_and_torchs(rule, tensors, options)
    ours.clip_norm = 1.0
    set_gradients(ours, gradients)
    ours.step()
    clipped_step(theirs, gradients, 1.0)
    assert_same_step(ours, theirs, CLIPPED_ULPS)
    assert ours.outcome.num_nonfinite == 1
    assert ours.outcome.first_nonfinite_name == "group0.param1"


def test_a_norm_of_exactly_the_limit_is_scaled_by_torchs_epsilon() -> None:
    ours, theirs = ours_and_torchs("SGD", [torch.zeros(2)], {"lr": 1.0})
    ours.clip_norm = 5.0
    set_gradients(ours, [torch.tensor([3.0, 4.0])])
    ours.step()
    clipped_step(theirs, [torch.tensor([3.0, 4.0])], 5.0)
    assert ours.outcome.norm == 5.0
    assert ours.outcome.clip_factor == 5.0 / (5.0 + 1e-6)
    assert_same_step(ours, theirs, CLIPPED_ULPS)


def test_clip_norm_zero_and_no_gradients() -> None:
    ours, theirs = ours_and_torchs("SGD", [torch.ones(2)], {"lr": 1.0, "weight_decay": 0.5})
    ours.clip_norm = 0.0
    ours.step()
    assert ours.outcome.norm == 0.0
    set_gradients(ours, [torch.ones(2)])
    ours.step()
    clipped_step(theirs, [torch.ones(2)], 0.0)
    assert_same_step(ours, theirs, CLIPPED_ULPS)


def test_the_norm_is_joint_over_groups_and_dtypes() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32,) * 3]
    parameters.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    import tradewind as tw

    ours = tw.optim.SGD([{"params": [p]} for p in parameters], lr=1.0, clip_norm=2.0)
    set_gradients(ours, [torch.ones(2, dtype=p.dtype) * 2 for p in parameters])
    ours.step()
    assert ours.outcome.norm == math.sqrt(4 * 2 * 4)
    want = torch.full((2,), -2 * 2.0 / (math.sqrt(32) + 1e-6))
    for parameter in parameters:  # one rounding in the parameter's own dtype
        assert_near(parameter.detach(), want.to(parameter.dtype), 1.0)


@pytest.mark.parametrize(("rule", "options"), USUAL_RULES)
def test_gradients_are_left_as_they_are(rule: str, options: dict[str, Any]) -> None:
    ours, _ = ours_and_torchs(rule, [torch.ones(5000)], options)
    ours.clip_norm = 0.1
    set_gradients(ours, [torch.randn(5000, generator=torch.Generator().manual_seed(2))])
    gradient = parameters_of(ours)[0].grad
    assert gradient is not None
    before, version = bits(gradient), gradient._version
    ours.step()
    assert ours.outcome.clip_factor < 1.0
    assert parameters_of(ours)[0].grad is gradient
    assert (bits(gradient), gradient._version) == (before, version)
