"""A checkpoint goes on in another precision, with other masters or another storage of state: values
are those of the masters, and nothing is lost that the new storage can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches
from engine.resuming import RECIPES, differing, net, to_bytes

import tradewind as tw
from tradewind._core import native
from tradewind.optim.stored_state import state_values

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "split": {"precision": "bf16", "masters": "split"},
    "fp16": {"precision": "fp16"},
    "8-bit": {"state_dtype": "8bit"},
    "bf16 state": {"state_dtype": "bf16"},
    "split 8-bit": {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
}


def make(folder: Path, recipe: str = "AdamW", model: Any = None, **options: Any) -> tw.Engine:
    torch.manual_seed(0)
    return tw.Engine(
        model if model is not None else net(),
        RECIPES[recipe](),
        checkpoint=tw.Checkpoint(folder, every=10_000, notices="off"),
        **options,
    )


def trained(folder: Path, recipe: str, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Train a little, save, and return the values by name: `value` (that of the master) and the
    states as plain numbers."""
    with make(folder, recipe, **options) as engine:
        for x, y in batches(4):
            engine.step(F.cross_entropy(engine(x), y))
        found = values_of(engine, recipe)
        engine.save().wait(120)
    return found


def values_of(engine: tw.Engine, recipe: str = "AdamW") -> dict[str, dict[str, torch.Tensor]]:
    """Through an optimizer of float32 that loads the state dict: an independent reading."""
    state = engine.state_dict()
    names = dict(zip(engine._adopted.parameters, engine._adopted.names, strict=True))
    order = [names[p] for group in engine.optimizer.param_groups for p in group["params"]]
    model = net()
    fresh = dict(model.named_parameters())
    model.load_state_dict({name: value.float() for name, value in state["model"].items()})
    optimizer = RECIPES[recipe]().build(list(fresh.items()), model=model)
    name_of = {parameter: name for name, parameter in fresh.items()}
    own = [name_of[p] for group in optimizer.param_groups for p in group["params"]]
    entries, values = {}, {name: p.detach().clone() for name, p in fresh.items()}
    for index, given in state["optimizer"]["state"].items():
        name, entry = order[index], dict(given)
        low, master = entry.pop("master_low", None), entry.pop("master", None)
        if low is not None:
            high = state["model"][name].view(torch.int16).int() << 16
            values[name] = (high + low.int()).view(torch.float32)
        elif master is not None:
            values[name] = master.clone()
        entries[own.index(name)] = entry
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    _ = optimizer.native_table
    return {
        name: {
            "value": values[name],
            **{key: each.clone().float() for key, each in optimizer.state[parameter].items()},
        }
        for name, parameter in fresh.items()
    }


@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("then", WAYS)
def test_values_go_on(tmp_path: Path, then: str, now: str) -> None:
    expected = trained(tmp_path, "AdamW", **WAYS[then])
    with make(tmp_path, **WAYS[now]) as engine:
        assert engine.num_steps == 4
        found = values_of(engine)
        parameters = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        engine.step(F.cross_entropy(engine(batches(1)[0][0]), batches(1)[0][1]))
    for name, values in expected.items():
        assert torch.equal(found[name]["value"], values["value"]), name
        assert float(found[name]["step"]) == 4.0
        # A parameter is its master, rounded to what it holds: half a unit of bfloat16's 8 bits.
        gap = (parameters[name].float() - values["value"]).abs()
        assert bool((gap <= values["value"].abs() * 2**-8 + 2**-24).all()), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert close(found[name][key], values[key], now, then), (name, key)


def close(found: torch.Tensor, expected: torch.Tensor, now: str, then: str) -> bool:
    if "8-bit" in now and "8-bit" not in then:
        # 3 mantissa bits, over a range of 2^16 below the block's largest.
        scale = expected.abs() * 2**-3 + expected.abs().max() * 2**-14
        return bool(((found - expected).abs() <= scale).all())
    if now == "bf16 state" and then != "bf16 state":
        return bool(((found - expected).abs() <= expected.abs() * 2**-7 + 1e-30).all())
    return torch.equal(found, expected)


def test_back_and_forth_gives_the_bits_that_were(tmp_path: Path) -> None:
    expected = trained(tmp_path, "AdamW")
    for way in ("bf16", "split", "fp16", "fp32"):
        with make(tmp_path, **WAYS[way]) as engine:
            found = values_of(engine)
            engine.save().wait(120)
        assert differing(to_bytes(found), to_bytes(expected)) == [], way


@pytest.mark.parametrize("recipe", ["SGD", "LAMB", "Muon"])
def test_other_rules(tmp_path: Path, recipe: str) -> None:
    expected = trained(tmp_path, recipe)
    with make(tmp_path, recipe, precision="bf16") as engine:
        assert differing(to_bytes(values_of(engine, recipe)), to_bytes(expected)) == []


def test_parameters_that_lie_otherwise(tmp_path: Path) -> None:
    def conv() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Conv2d(24, 16, 3)  # 3,456 elements: 14 blocks that share an exponent

    def states(engine: tw.Engine) -> list[torch.Tensor]:
        """Decoded, by dimensions."""
        entry = engine.optimizer.state[engine.model.weight]
        rule = native.rule("adamw")
        names = rule.state_names
        return [state_values(rule, n, entry, engine.model.weight).contiguous() for n in names]

    with make(tmp_path, model=conv(), state_dtype="8bit") as engine:
        for seed in range(3):
            x = torch.randn(2, 24, 6, 6, generator=torch.Generator().manual_seed(seed))
            # Gradients of very different sizes along the input's channels: so are exponents.
            engine.step(engine(x * torch.logspace(-3, 1, 24).view(1, -1, 1, 1)).square().mean())
        expected = states(engine)
        engine.save().wait(120)
    other = conv().to(memory_format=torch.channels_last)
    with make(tmp_path, model=other, state_dtype="8bit") as engine:
        assert engine.model.weight.stride() != conv().weight.stride()
        for found, wanted in zip(states(engine), expected, strict=True):
            # Blocks of 256 have other elements now, of which the smallest may be lost: 3 mantissa
            # bits, over a range of 2^16 below the block's largest.
            assert bool(
                ((found - wanted).abs() <= wanted.abs() / 8 + wanted.abs().max() / 2**14).all()
            )
            large = wanted.abs() > wanted.abs().max() / 2**8
            assert bool((found[large] == wanted[large]).all())


def test_groups_in_another_order_find_their_names(tmp_path: Path) -> None:
    def recipe(first: str, second: str) -> Any:
        return tw.AdamW(lr=1e-2, groups=[{"params": first, "lr": 1.0}, {"params": second}])

    expected = trained(tmp_path, "AdamW")
    with pytest.warns(RuntimeWarning, match="param groups hold other parameters"):
        engine = tw.Engine(
            net(),
            recipe("5.*", "7.*"),
            checkpoint=tw.Checkpoint(tmp_path, every=10_000, notices="off"),
        )
    with engine:
        assert engine.optimizer.param_groups[1]["lr"] == 1.0
        found = values_of(engine)
    for name, values in expected.items():
        assert torch.equal(found[name]["exp_avg"], values["exp_avg"]), name
