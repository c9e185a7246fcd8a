"""Parameters, buffers, outputs and copies that GradientSharing takes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tradewind as tw
from share.gradient_cases import batch, equal, gradients_of, mean, means, mlp
from share.ranks import Ranks


def takes_many_kinds(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.ParameterDict(
        {
            "double_": nn.Parameter(torch.randn(5, dtype=torch.float64)),
            "half_": nn.Parameter(torch.randn(5).bfloat16()),
            "empty": nn.Parameter(torch.empty(0, 4)),
            "strided": nn.Parameter(torch.randn(4, 6)[:, ::2]),
            "transposed": nn.Parameter(torch.randn(4, 6).t()),
            "channels_last": nn.Parameter(
                torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            ),
            "scalar": nn.Parameter(torch.randn(())),
            "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        }
    )
    names = {id(p): name for name, p in model.items()}
    shared = tw.GradientSharing(_Sum(model))
    states = [p.detach().clone() for p in shared.parameters()]
    dist.all_gather_object(gathered := [None, None], states)
    assert equal(gathered[0], gathered[1])
    shared(float(rank + 1)).backward()
    for parameter in shared.parameters():
        name = names[id(parameter)]
        if name == "frozen":
            assert parameter.grad is None
            continue
        # Of ranks 1 and 2: 1.5, which every dtype has.
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5)), name
        if name in ("channels_last", "transposed"):
            assert parameter.grad.stride() == parameter.stride(), name


def shares_complex_ones(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.ParameterDict({"c": nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))})
    shared = tw.GradientSharing(_Sum(model))
    shared(float(rank + 1)).backward()
    assert torch.equal(model["c"].grad, torch.full_like(model["c"], 1.5))


def test_complex_parameters_are_shared(ranks: Ranks) -> None:
    ranks.run(shares_complex_ones)


class _Sum(nn.Module):
    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.held = parameters

    def forward(self, factor: float) -> torch.Tensor:
        parts = [p.sum() * factor for p in self.held.values()]
        return sum(part.real.double() if part.is_complex() else part.double() for part in parts)


def test_every_kind_of_parameter_is_shared(ranks: Ranks) -> None:
    ranks.run(takes_many_kinds)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def shares_tied_ones(rank: int) -> None:
    model = tw.GradientSharing(Tied())
    tokens = [torch.tensor([1, 2]), torch.tensor([2, 4])]
    for _ in range(2):
        model.zero_grad()
        model(tokens[rank]).square().mean().backward()
        (expected,) = (
            mean(list(same))
            for same in zip(*(gradients_of(Tied(), of) for of in tokens), strict=True)
        )
        assert torch.equal(model.module.head.weight.grad, expected)


def test_tied_parameters_are_shared_once(ranks: Ranks) -> None:
    ranks.run(shares_tied_ones)


class Outputs:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Checkpointed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.kind in ("reentrant", "not reentrant"):
            inputs = inputs.clone().requires_grad_()
            hidden = checkpoint(self.net[:2], inputs, use_reentrant=self.kind == "reentrant")
            return self.net[2:](hidden)
        outputs = self.net(inputs)
        return Outputs(outputs) if self.kind == "custom output" else {"deep": [outputs]}


def shares_through(rank: int, kind: str) -> None:
    model = tw.GradientSharing(Checkpointed(kind))
    for step in range(3):
        outputs = model(batch(rank, step))
        if kind == "custom output":
            outputs = outputs.value
        elif kind == "nested output":
            outputs = outputs["deep"][0]
        outputs.square().mean().backward()
        given = [p.grad.clone() for p in model.parameters()]
        assert equal(given, means(mlp(), 2, step)), step
        model.zero_grad()


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "custom output", "nested output"])
def test_checkpointing_and_outputs_of_any_kind(ranks: Ranks, kind: str) -> None:
    ranks.run(shares_through, kind)


class Repeats(nn.Module):
    """Runs a layer in checkpoints, as often and as changing as `kind` says."""

    def __init__(self, kind: str, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        if kind == "tied":
            self.first.weight = self.second.weight
        self.kind, self.use_reentrant = kind, use_reentrant
        self.num_forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        layers = [self.second, self.second]
        if self.kind == "changing":
            layers = [self.first if self.num_forwards % 2 else self.second]
        self.num_forwards += 1
        hidden = inputs.clone().requires_grad_() if self.kind == "changing" else self.first(inputs)
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
        return hidden


def repeats_layers(rank: int, kind: str, use_reentrant: bool) -> None:
    model, alone = (Repeats(kind, use_reentrant) for _ in range(2))
    shared = tw.GradientSharing(model)
    for step in range(4):
        shared.zero_grad()
        shared(batch(rank, step)).square().mean().backward()
        of_ranks = []
        for of_rank in (0, 1):
            alone.num_forwards = step
            alone.zero_grad()
            alone(batch(of_rank, step)).square().mean().backward()
            of_ranks.append([p.grad for p in alone.parameters()])
        for parameter, first, second in zip(shared.parameters(), *of_ranks, strict=True):
            if first is None:
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, mean([first, second])), step


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", ["twice", "tied", "changing"])
def test_layers_in_several_checkpoints(ranks: Ranks, kind: str, use_reentrant: bool) -> None:
    ranks.run(repeats_layers, kind, use_reentrant)


def is_checkpointed_itself(rank: int, use_reentrant: bool) -> None:
    model = tw.GradientSharing(mlp())
    for step in range(3):
        model.zero_grad()
        inputs = batch(rank, step).requires_grad_()
        checkpoint(model, inputs, use_reentrant=use_reentrant).square().mean().backward()
        assert equal([p.grad for p in model.parameters()], means(mlp(), 2, step))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_whole_model_in_a_checkpoint(ranks: Ranks, use_reentrant: bool) -> None:
    ranks.run(is_checkpointed_itself, use_reentrant)


def forwards_twice_through_batch_norm(rank: int) -> None:
    torch.manual_seed(0)
    model = tw.GradientSharing(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)))
    first, second = model(batch(rank)), model(batch(rank, 1))
    (first.square() * second).mean().backward()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, [p.grad for p in model.parameters()])
    assert equal(*gathered)


def test_two_forwards_of_one_backward_with_buffers(ranks: Ranks) -> None:
    ranks.run(forwards_twice_through_batch_norm)


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor([10 * rank]))
        self.register_buffer("own", torch.tensor([rank]))
        self.register_parameter("mine", nn.Parameter(torch.tensor([float(rank)])))
        self._ddp_params_and_buffers_to_ignore = ["own", "mine"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.linear(inputs) * self.mine


def shares_buffers(rank: int) -> None:
    """By keyword: the buffer at the start, and after rank 1 changed it and one forward ran."""
    for keywords, at_start, after in (
        ({}, 0, 1),
        ({"forward_sync_buffers": False}, 0, 1 + 5 * rank),
        ({"broadcast_buffers": False}, 10 * rank, 15 * rank + 1),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, 0, 1),
    ):
        model = tw.GradientSharing(Buffered(rank), **keywords)
        assert model.module.count.item() == at_start, keywords
        model.module.count += 5 * rank
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.count.item() == after, keywords
        assert model.module.own.item() == rank
        assert model.module.mine.item() == rank
        assert model.parameters_to_ignore == {"own", "mine"}


def test_buffers_follow_rank_0_and_ignored_ones_are_left_alone(ranks: Ranks) -> None:
    ranks.run(shares_buffers)


def shares_twice(rank: int) -> None:
    first, second = tw.GradientSharing(mlp(1)), tw.GradientSharing(mlp(2))
    for step in range(2):
        loss = first(batch(rank, step)).square().mean() + second(batch(rank, step)).square().mean()
        loss.backward()
        for model, seed in ((first, 1), (second, 2)):
            given = [p.grad.clone() for p in model.parameters()]
            assert equal(given, means(mlp(seed), 2, step))
            model.zero_grad()


def test_two_models_in_one_backward(ranks: Ranks) -> None:
    ranks.run(shares_twice)


def shares_in_a_subgroup(rank: int) -> str:
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="not one of its members"):
            tw.GradientSharing(mlp(), process_group=group)
        return "left out"
    model = tw.GradientSharing(mlp(), process_group=group)
    model(batch(rank)).square().mean().backward()
    expected = [
        mean([a, b]) for a, b in zip(*(gradients_of(mlp(), batch(r)) for r in (0, 2)), strict=True)
    ]
    assert equal([p.grad for p in model.parameters()], expected)
    with pytest.raises(ValueError, match="a group of its own"):
        copy.deepcopy(model)
    return "shared"


def test_a_subgroup(ranks: Ranks) -> None:
    found = ranks.run(shares_in_a_subgroup, num_ranks=3)
    assert found == ["shared", "left out", "shared"]


def copies(rank: int) -> None:
    model = tw.GradientSharing(mlp())
    assert all(name.startswith("module.") for name in model.state_dict())
    if rank == 0:  # as an average of weights is kept, on one rank alone
        alone = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(alone(batch(0)), model.module(batch(0)))
        assert alone.num_rounds == 0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(batch(rank)).square().mean().backward()
    assert equal([p.grad for p in loaded.parameters()], means(mlp(), 2))
    assert all(p.grad is None for p in model.parameters())


def test_copies_and_pickles_share_once_they_train(ranks: Ranks) -> None:
    ranks.run(copies)


def compiles(rank: int) -> None:
    model = tw.GradientSharing(torch.compile(mlp(), backend="aot_eager"))
    outer = torch.compile(tw.GradientSharing(mlp()), backend="aot_eager")
    for made in (model, outer):
        made(batch(rank)).square().mean().backward()
        for parameter, expected in zip(made.parameters(), means(mlp(), 2), strict=True):
            # The compiled backward may sum in another order.
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)


def test_compiled_models(ranks: Ranks) -> None:
    ranks.run(compiles, timeout_s=120)
