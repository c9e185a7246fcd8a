"""Muon and AdamW in one optimizer, against torch's two; and who gets what from `tw.Muon`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import tradewind as tw
from tradewind.optim import muon_recipe

MUON = {"lr": 0.02, "weight_decay": 0.05}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
# Muon's bfloat16 products amplify roundings in another order.
TOLERANCE = 2e-3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.places(x)))


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def hidden(model: nn.Module) -> list[Parameter]:
    return [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]


def rest(model: nn.Module) -> list[Parameter]:
    taken = {id(p) for p in hidden(model)}
    return [p for p in model.parameters() if id(p) not in taken]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": hidden(model), "use_muon": True, **MUON},
        {"params": rest(model), "use_muon": False, **ADAMW},
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(11, (32,), generator=generator) for _ in range(2))


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    inputs, targets = batch(step)
    nn.functional.cross_entropy(model(inputs), targets).backward()


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_same_as_torchs_two_optimizers(clip_norm: float | None) -> None:
    ours, theirs = net(), net()
    optimizer = tw.optim.MuonWithAdamW(groups(ours), clip_norm=clip_norm)
    muon = torch.optim.Muon(hidden(theirs), **MUON)
    adamw = torch.optim.AdamW(rest(theirs), **ADAMW)
    for step in range(8):
        backward(ours, step)
        optimizer.step()
        backward(theirs, step)
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
            assert float(optimizer.outcome.norm) == pytest.approx(float(norm), rel=1e-2)
        muon.step()
        adamw.step()
    assert_close(ours, theirs)
    for a, b in zip(hidden(ours), hidden(theirs), strict=True):
        assert {*optimizer.state[a]} == {*muon.state[b]}
    for a, b in zip(rest(ours), rest(theirs), strict=True):
        assert {*optimizer.state[a]} == {*adamw.state[b]}


def test_a_group_has_the_options_of_its_own_optimizer() -> None:
    muon, adamw = tw.optim.MuonWithAdamW(groups(net())).param_groups
    theirs = torch.optim.Muon([Parameter(torch.ones(2, 2))]).param_groups[0]
    assert {*theirs} <= {*muon} and "betas" not in muon
    assert {*torch.optim.AdamW([Parameter(torch.ones(2))]).param_groups[0]} <= {*adamw}
    assert "ns_steps" not in adamw
    assert (muon["eps"], adamw["eps"]) == (1e-7, 1e-8)


def test_a_schedule_multiplies_both_learning_rates() -> None:
    optimizer = tw.optim.MuonWithAdamW(groups(net()))
    schedule = tw.optim.WarmupLinear(optimizer, warmup_steps=4, total_steps=8)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 / 4, 3e-3 / 4]


@pytest.mark.parametrize("storage", [{}, {"state_dtype": "8bit", "seed": 3}])
@pytest.mark.parametrize("way", ["state dict", "pickle"])
def test_resumes_to_the_bit(storage: dict[str, Any], way: str) -> None:
    ours = net()
    optimizer = tw.optim.MuonWithAdamW(groups(ours), **storage)
    for step in range(3):
        backward(ours, step)
        optimizer.step()
    if way == "pickle":
        again, other = pickle.loads(pickle.dumps((ours, optimizer)))
        other.param_groups[0]["params"] = hidden(again)
        other.param_groups[1]["params"] = rest(again)
    else:
        again = copy.deepcopy(ours)
        other = tw.optim.MuonWithAdamW(groups(again), **storage)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, stepped in ((ours, optimizer), (again, other)):
        for step in range(3, 6):
            backward(model, step)
            stepped.step()
    for a, b in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({}, r"expected use_muon True \(matrices\) or False \(AdamW\), got None"),
        ({"use_muon": 1}, "expected use_muon .* got 1"),
        ({"use_muon": True, "betas": (0.9, 0.95)}, "unknown betas; with use_muon=True .* ns_steps"),
        ({"use_muon": False, "momentum": 0.9}, "unknown momentum; with use_muon=False .* betas"),
        ({"use_muon": True, "params": [Parameter(torch.ones(3))]}, r"only supports 2D .*\[3\]"),
        ({"use_muon": True, "lr": -1.0}, "lr: expected a number >= 0, got -1"),
        ({"use_muon": False, "betas": (0.9,)}, "betas: expected two numbers"),
        ({"use_muon": False, "clip_norm": 1.0}, "expected no clip_norm, as the norm is joint"),
    ],
)
def test_bad_groups(group: dict[str, Any], message: str) -> None:
    parameter = Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=message):
        tw.optim.MuonWithAdamW([{"params": [parameter], **group}])
    optimizer = tw.optim.MuonWithAdamW([{"params": [Parameter(torch.ones(2))], "use_muon": False}])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter], **group})
    assert len(optimizer.param_groups) == 1


def test_parameters_without_groups() -> None:
    with pytest.raises(ValueError, match="expected use_muon"):
        tw.optim.MuonWithAdamW(net().parameters())


# --- the recipe -------------------------------------------------------------------------------


def names_of(recipe: tw.Muon, module: nn.Module, **options: Any) -> list[list[str]]:
    optimizer = recipe.build(module.named_parameters(), **options)
    assert optimizer.param_groups[0]["use_muon"]
    return [group["param_names"] for group in optimizer.param_groups]


def test_the_recipe_gives_hidden_matrices_to_muon() -> None:
    model = net()
    first, others = names_of(tw.Muon(lr=0.02), model, model=model)
    assert first == ["blocks.0.weight", "blocks.2.weight"]
    assert {*first, *others} == {name for name, _ in model.named_parameters()}
    # Without the model an embedding is known by its name alone.
    assert names_of(tw.Muon(lr=0.02), model)[0] == ["places.weight", *first]


@pytest.mark.parametrize(
    "name",
    [
        "transformer.wte",
        "model.embed_tokens",
        "token_embedding",
        "tok_emb",
        "patch_embed.proj",
        "lm_head",
        "heads.head",
        "classifier",
        "to_logits",
    ],
)
def test_names_of_input_and_output_layers(name: str) -> None:
    weights = [(f"{name}.weight", Parameter(torch.ones(2, 2)))]
    weights += [("blocks.0.heads.1.query.weight", Parameter(torch.ones(2, 2)))]
    muon, adamw = tw.Muon().build(weights).param_groups
    assert muon["param_names"] == ["blocks.0.heads.1.query.weight"]
    assert adamw["param_names"] == [f"{name}.weight"]


def test_a_head_that_shares_the_embeddings_weight_is_not_hidden() -> None:
    model = net()
    model.unusual = nn.Linear(8, 11, bias=False)
    model.unusual.weight = model.places.weight
    assert "places.weight" not in names_of(tw.Muon(), model, model=model)[0]


def test_the_caller_may_say_which_are_hidden() -> None:
    model = net()
    assert names_of(tw.Muon(hidden="blocks.0.*"), model)[0] == ["blocks.0.weight"]
    wide = tw.Muon(hidden=lambda name, p: p.shape[1] == 16)
    assert names_of(wide, model)[0] == ["blocks.2.weight"]


def test_options_go_where_they_belong() -> None:
    model = net()
    recipe = tw.Muon(
        **MUON,
        clip_norm=2.0,
        state_dtype="bf16",
        adamw=ADAMW,
        groups=[{"params": lambda name, p: p.ndim < 2, "weight_decay": 0.0}],
    )
    optimizer = recipe.build(model.named_parameters(), model=model)
    muon, adamw, vectors = optimizer.param_groups
    assert (muon["lr"], muon["weight_decay"]) == (0.02, 0.05)
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"]) == (3e-3, (0.9, 0.95), 0.1)
    assert (vectors["lr"], vectors["weight_decay"]) == (3e-3, 0.0)
    assert (optimizer.clip_norm, optimizer.state_dtype) == (2.0, "bf16")
    assert "adamw=tw.AdamW(lr=0.003" in repr(recipe)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr: expected a number >= 0, got -1"),
        ({"betas": (0.9, 0.95)}, TypeError, r"tw\.Muon options: unknown betas"),
        ({"adamw": {"momentum": 0.9}}, TypeError, r"tw\.AdamW options: unknown momentum"),
        ({"adamw": {"eps": -1.0}}, ValueError, "eps: expected"),
        ({"adamw": {"clip_norm": 1.0}}, TypeError, r"give it to tw\.Muon\(clip_norm="),
        ({"groups": [{"lr": 1.0}]}, ValueError, r"groups\[0\]: expected 'params'"),
    ],
)
def test_bad_recipes(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tw.Muon(**options)


def test_no_hidden_matrix() -> None:
    with pytest.raises(ValueError, match=r"hidden='nothing\.\*' takes, found none"):
        tw.Muon(hidden="nothing.*").build(net().named_parameters())
    with pytest.raises(TypeError, match=r"tw\.Muon is a recipe"):
        tw.Muon(net().parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_engine_trains_with_it(precision: str, tmp_path: Path) -> None:
    model = net()
    recipe = tw.Muon(lr=0.02, adamw=ADAMW)
    engine = tw.Engine(model, recipe, precision=precision, clip_norm=1.0, run=str(tmp_path / "run"))
    inputs, _ = batch(0)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(engine(inputs), inputs)
        losses.append(float(loss.detach()))
        engine.step(loss)
    engine.close()
    muon, adamw = engine.optimizer.param_groups
    assert muon["param_names"] == ["blocks.0.weight", "blocks.2.weight"]
    assert len(adamw["params"]) == 7
    assert losses[-1] < losses[0] / 4
    written = (tmp_path / "run" / "run.json").read_text()
    assert '"use_muon": true' in written and '"ns_steps": 5' in written


def test_the_page_lists_the_names() -> None:
    page = (Path(__file__).parents[3] / "docs" / "muon.md").read_text()
    assert [name for name in muon_recipe.OUTER_NAMES if f"`{name}`" not in page] == []
