"""engine.stats() against the same numbers taken from the tensors themselves."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, small_net
from torch import nn

import tradewind as tw

RECIPES = [
    tw.AdamW(lr=1e-2),
    tw.SGD(lr=0.1, momentum=0.9),
    tw.LAMB(lr=1e-2),
    tw.Lion(lr=1e-3),
]


def relu_net() -> nn.Module:
    """Half of the second layer's inputs are never positive, so its gradient has zero columns."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        net[0].weight[:4], net[0].bias[:4] = 0.0, -1.0
    return net


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
def test_numbers_of_one_update(recipe: tw.Recipe, precision: str) -> None:
    model = relu_net()
    engine = tw.Engine(model, recipe, precision=precision, clip_norm=0.01)
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    scale = 65536.0 if precision == "amp-fp16" else 1.0
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: gradients.update({name: p.grad.double() / scale})
        )
    exact = {n: exact_value(engine, p) for n, p in model.named_parameters()}
    engine.step(F.cross_entropy(engine(x), y))
    stats = engine.stats()
    assert (stats["step"], stats["num_skipped"]) == (1, 0)
    assert stats["loss_scale"] == (scale if scale > 1 else None)
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert stats["grad_norm"] == pytest.approx(float(total), rel=1e-9)
    assert stats["clip_factor"] == pytest.approx(0.01 / (float(total) + 1e-6), rel=1e-9)
    assert list(stats["parameters"]) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        got, gradient = stats["parameters"][name], gradients[name]
        assert got["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-9)
        assert got["grad_max"] == pytest.approx(float(gradient.abs().max()), rel=1e-9)
        assert got["zero_fraction"] == float((gradient == 0).double().mean())
        change = exact_value(engine, parameter) - exact[name]
        # Changes are sums of differences of float32 numbers: a few of their last bits.
        ratio = float(change.norm() / exact[name].norm())
        assert got["update_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert stats["parameters"]["2.weight"]["zero_fraction"] >= 0.5
    json.dumps(stats)


def exact_value(engine: tw.Engine, parameter: torch.Tensor) -> torch.Tensor:
    master = engine.optimizer.state.get(parameter, {}).get("master", parameter)
    return master.detach().double().clone()


def test_a_vetoed_update_shows_its_gradients() -> None:
    engine = tw.Engine(small_net(), tw.AdamW(lr=1e-2))
    x, y = batches(1)[0]
    engine.step(F.cross_entropy(engine(x), y))
    with pytest.warns(RuntimeWarning, match="not finite"):
        engine.step(F.cross_entropy(engine(x), y) * float("inf"))
    stats = engine.stats()
    assert stats["num_skipped"] == 1
    assert not math.isfinite(stats["parameters"]["4.bias"]["grad_max"])
    assert math.isnan(stats["parameters"]["4.bias"]["update_ratio"])


def test_parameters_without_a_gradient_are_left_out() -> None:
    model = small_net()
    model.unused = nn.Parameter(torch.ones(3))
    model[0].weight.requires_grad_(False)
    engine = tw.Engine(model, tw.AdamW(lr=1e-2))
    x, y = batches(1)[0]
    engine.step(F.cross_entropy(engine(x), y))
    assert set(engine.stats()["parameters"]) == {"1.weight", "1.bias", "4.weight", "4.bias"}


def test_before_the_first_update() -> None:
    engine = tw.Engine(small_net(), tw.AdamW(lr=1e-2), precision="fp16")
    assert engine.stats() == {
        "step": 0,
        "num_skipped": 0,
        "grad_norm": None,
        "clip_factor": None,
        "loss_scale": 65536.0,
        "parameters": {},
    }


def test_accumulated_gradients_are_those_of_the_mean_loss() -> None:
    engine = tw.Engine(small_net(), tw.SGD(lr=0.0), precision="bf16", accumulate=3)
    for x, y in batches(2):
        engine.step(F.cross_entropy(engine(x), y))
    flushed = engine.flush()
    assert flushed is not None
    squares = sum(s["grad_norm"] ** 2 for s in engine.stats()["parameters"].values())
    assert math.sqrt(squares) == pytest.approx(flushed.grad_norm, rel=1e-9)
