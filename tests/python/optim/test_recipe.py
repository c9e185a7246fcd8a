"""Recipes: options that wait for the parameters, checked before any model exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tradewind as tw


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def names_of(group: dict[str, Any]) -> list[str]:
    names: list[str] = group["param_names"]
    return names


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_builds_the_optimizer_of_its_name(rule: str, model: nn.Module) -> None:
    recipe = getattr(tw, rule)(lr=0.25, weight_decay=0.5)
    assert isinstance(recipe, tw.Recipe)
    optimizer = recipe.build(model.named_parameters())
    assert type(optimizer) is getattr(tw.optim, rule)
    assert optimizer.clip_norm is None
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
    assert names_of(group) == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


def test_a_recipe_can_be_built_twice(model: nn.Module) -> None:
    recipe = tw.SGD(lr=0.5, groups=[{"params": "*.bias", "lr": 0.25}])
    first = recipe.build(model.named_parameters())
    first.param_groups[0]["lr"] = 99.0
    second = recipe.build(model.named_parameters())
    assert [group["lr"] for group in second.param_groups] == [0.5, 0.25]


def test_clip_norm(model: nn.Module) -> None:
    assert tw.AdamW().build(model.named_parameters(), clip_norm=2.0).clip_norm == 2.0
    assert tw.AdamW(clip_norm=3.0).build(model.named_parameters()).clip_norm == 3.0


def test_groups_come_after_the_rest_in_their_order(model: nn.Module) -> None:
    recipe = tw.AdamW(
        lr=0.1,
        weight_decay=0.5,
        groups=[
            {"params": lambda name, parameter: name.startswith("1."), "lr": 0.3},
            {"params": ["*.bias", "nothing.like.this"], "weight_decay": 0.0, "betas": (0.5, 0.6)},
        ],
    )
    optimizer = recipe.build(model.named_parameters())
    rest, norm, bias = optimizer.param_groups
    assert names_of(rest) == ["0.weight", "2.weight"]
    assert names_of(norm) == ["1.weight", "1.bias"]  # the first group that matches takes it
    assert names_of(bias) == ["0.bias", "2.bias"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5, 0.0]
    assert [group["betas"] for group in optimizer.param_groups][1:] == [(0.9, 0.999), (0.5, 0.6)]


def test_a_function_sees_the_parameter(model: nn.Module) -> None:
    recipe = tw.SGD(lr=0.1, groups=[{"params": lambda name, p: p.dim() < 2, "lr": 0.2}])
    _, vectors = recipe.build(model.named_parameters()).param_groups
    assert names_of(vectors) == ["0.bias", "1.weight", "1.bias", "2.bias"]


def test_groups_may_take_everything(model: nn.Module) -> None:
    optimizer = tw.SGD(groups=[{"params": "*", "lr": 0.7}]).build(model.named_parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.7]


def test_patterns_are_case_sensitive(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"groups\[0\]: params='\*\.BIAS' matches no parameter"):
        tw.SGD(groups=[{"params": "*.BIAS"}]).build(model.named_parameters())


def test_a_pattern_that_matches_nothing_is_named(model: nn.Module) -> None:
    recipe = tw.SGD(groups=[{"params": "*.bias"}, {"params": ["head.*"], "lr": 1.0}])
    with pytest.raises(
        ValueError, match=r"groups\[1\]: params=\['head\.\*'\] matches no parameter.*named_param"
    ):
        recipe.build(model.named_parameters())


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_parameters_in_the_place_of_options(rule: str, model: nn.Module) -> None:
    with pytest.raises(
        TypeError, match=rf"tw\.{rule} is a recipe.*tw\.optim\.{rule}\(.*leave out the parameters"
    ):
        getattr(tw, rule)(model.parameters())
    with pytest.raises(TypeError, match="params"):
        getattr(tw, rule)(params=model.parameters())


@pytest.mark.parametrize(
    ("rule", "options", "kind", "message"),
    [
        ("AdamW", {"lr": -1.0}, ValueError, "lr: expected a number >= 0, got -1"),
        ("AdamW", {"betas": (0.9,)}, ValueError, "betas: expected two numbers"),
        ("AdamW", {"clip_norm": -1.0}, ValueError, "clip_norm"),
        ("AdamW", {"capturable": True}, NotImplementedError, "capturable"),
        ("AdamW", {"momentum": 0.9}, TypeError, r"tw\.AdamW options: unknown momentum; expected"),
        ("SGD", {"momentun": 0.9}, TypeError, r"tw\.SGD options: unknown momentun; .* momentum"),
        ("SGD", {"nesterov": True}, ValueError, "nesterov: expected momentum > 0"),
        ("SGD", {"groups": [{"lr": 0.1}]}, ValueError, r"groups\[0\]: expected 'params'"),
        ("SGD", {"groups": [{"params": "*", "lr": -1}]}, ValueError, "lr: expected"),
        ("SGD", {"groups": [{"params": "*", "clip_norm": 1}]}, ValueError, "no clip_norm"),
        ("SGD", {"groups": [{"params": "*", "rl": 1}]}, TypeError, r"groups\[0\]: unknown rl"),
    ],
)
def test_bad_options_raise_before_any_model_exists(
    rule: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        getattr(tw, rule)(**options)


def test_the_repr_shows_the_options() -> None:
    assert repr(tw.SGD(lr=0.1, momentum=0.9)) == "tw.SGD(lr=0.1, momentum=0.9)"
    assert "groups=[{'params': '*.bias'" in repr(tw.AdamW(groups=[{"params": "*.bias"}]))


def test_the_callers_dicts_stay_as_they_are(model: nn.Module) -> None:
    groups = [{"params": "*.bias", "weight_decay": 0.0}]
    recipe = tw.AdamW(groups=groups)
    recipe.build(model.named_parameters())
    assert groups == [{"params": "*.bias", "weight_decay": 0.0}]
    groups[0]["weight_decay"] = 9.0
    built = recipe.build(model.named_parameters())
    assert built.param_groups[1]["weight_decay"] == 0.0


def test_trains(model: nn.Module) -> None:
    optimizer = tw.SGD(lr=0.5).build(model.named_parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "LAMB", "Lion", "RMSprop", "SGD"])
def test_every_rule_has_a_recipe(name: str) -> None:
    model = torch.nn.Linear(3, 2)
    engine = tw.Engine(model, getattr(tw, name)(lr=1e-3), clip_norm=1.0)
    before = model.weight.detach().clone()
    engine.step(engine(torch.ones(4, 3)).sum())
    assert not torch.equal(model.weight, before)
    engine.close()
