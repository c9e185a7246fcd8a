"""What ranks get after backward: means, to the bit, of what each of them used."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tradewind as tw
from share.gradient_cases import Paths, batch, equal, gradients_of, mean, means, mlp
from share.ranks import Ranks


def trains_as_one_process(rank: int, num_ranks: int) -> None:
    model, alone = tw.GradientSharing(mlp(seed=rank), bucket_cap_mb=0.0005), mlp(seed=0)
    assert equal(list(model.parameters()), list(alone.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        alone_optimizer.zero_grad()
        for parameter, expected in zip(
            alone.parameters(), means(alone, num_ranks, step), strict=True
        ):
            parameter.grad = expected
        alone_optimizer.step()
        # Bitwise: the sum is taken in rank order wherever it is taken.
        assert equal(list(model.parameters()), list(alone.parameters())), step


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_train_as_one_process_does_to_the_bit(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(trains_as_one_process, num_ranks, num_ranks=num_ranks)


def test_it_runs_alone_without_a_process_group() -> None:
    model, alone = tw.GradientSharing(mlp()), mlp()
    assert equal(gradients_of(model, batch(0)), gradients_of(alone, batch(0)))
    assert model.process_group is None


def handles_unused_parameters(rank: int) -> None:
    model = Paths()
    shared = tw.GradientSharing(model)
    ones = torch.ones(1, 4)
    shared(ones, (0, 1) if rank == 0 else (0,)).backward()
    assert model.grad(2) is None  # no rank used it
    assert model.grad(1) is not None  # rank 0 did
    alone = Paths()
    alone(ones, (0, 1)).backward()
    assert torch.equal(model.grad(1), alone.grad(1) / 2)
    # Now layers 0 and 1 hold gradients, and one of them is globally unused.
    before = model.grad(1).clone()
    model.layers[0].weight.grad = None
    shared(ones, (0,)).backward()
    assert torch.equal(model.grad(1), before)
    assert model.grad(2) is None


def test_unused_parameters_keep_their_grad(ranks: Ranks) -> None:
    ranks.run(handles_unused_parameters)


def accumulates(rank: int) -> None:
    """The third layer is used by rank 1 in a microbatch that is not shared, and never after."""
    model, ones = Paths(), torch.ones(1, 4)
    shared = tw.GradientSharing(model)
    for _ in range(3):
        model.zero_grad()
        with shared.no_sync():
            shared(ones, (0, 2) if rank == 1 else (0,)).backward()
        local = model.layers[0].weight.grad.clone()
        shared(ones, (0, 1)).backward()
        alone = [Paths(), Paths()]
        for of_rank, of in enumerate(alone):
            of(ones, (0, 2) if of_rank == 1 else (0,)).backward()
            if of_rank == rank:
                assert torch.equal(local, of.grad(0))
            of(ones, (0, 1)).backward()
        for index in (0, 1):
            assert torch.equal(model.grad(index), mean([of.grad(index) for of in alone]))
        assert torch.equal(model.grad(2), alone[1].grad(2) / 2)


def test_accumulation_counts_what_any_microbatch_used(ranks: Ranks) -> None:
    ranks.run(accumulates)


def combines_no_sync(rank: int) -> None:
    """As with DistributedDataParallel, the forward says whether its backward is shared."""
    for forward_inside in (False, True):
        for backward_inside in (False, True):
            model = tw.GradientSharing(mlp())
            with model.no_sync() if forward_inside else nullcontext():
                loss = model(batch(rank)).square().mean()
            with model.no_sync() if backward_inside else nullcontext():
                loss.backward()
            given = [p.grad.clone() for p in model.parameters()]
            own = gradients_of(mlp(), batch(rank))
            expected = own if forward_inside else means(mlp(), 2)
            assert equal(given, expected), (forward_inside, backward_inside)
            model.zero_grad()
            model(batch(rank)).square().mean().backward()
            assert equal([p.grad for p in model.parameters()], means(mlp(), 2))


def test_no_sync_with_forward_and_backward_inside_and_outside(ranks: Ranks) -> None:
    ranks.run(combines_no_sync)


def ignores_outputs(rank: int) -> None:
    model = tw.GradientSharing(mlp())
    for step in range(3):
        model(batch(rank, step))  # no backward
        with torch.no_grad():
            model(batch(rank, step))
    model(batch(rank)).square().mean().backward()
    assert equal([p.grad for p in model.parameters()], means(mlp(), 2))


def test_a_forward_needs_no_backward(ranks: Ranks) -> None:
    ranks.run(ignores_outputs)


def calls_backward_twice(rank: int) -> None:
    """Each is a round of its own, and they add up."""
    model = tw.GradientSharing(nn.Linear(2, 1, bias=False))
    output = model(torch.ones(1, 2) * (rank + 1)).sum()
    output.backward(retain_graph=True)
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    output.backward()
    assert model.module.weight.grad.tolist() == [[3.0, 3.0]]


def test_two_backwards_of_one_forward(ranks: Ranks) -> None:
    ranks.run(calls_backward_twice)


class Undefined(nn.Module):
    """Of whose first layer the gradient may be undefined, though a backward reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, inputs: torch.Tensor, is_undefined: bool) -> torch.Tensor:
        first = self.first(inputs)
        if is_undefined:
            first = torch._C._functions.UndefinedGrad()(first)
        return first.sum() + self.second(inputs).sum()


def leaves_gradients_undefined(rank: int) -> None:
    model = tw.GradientSharing(Undefined())
    inputs = torch.full((1, 2), 8.0)
    for is_undefined, expected in (
        ((False, False), 8.0),
        ((True, False), 4.0),
        ((True, True), None),
    ):
        model.zero_grad()
        model(inputs, is_undefined[rank]).backward()
        gradient = model.module.first.weight.grad
        if expected is None:
            assert gradient is None
        else:
            assert torch.equal(gradient, torch.full((2, 2), expected))


def test_an_undefined_gradient_counts_as_none(ranks: Ranks) -> None:
    ranks.run(leaves_gradients_undefined)


def asks_for_gradients_of_inputs(rank: int) -> None:
    """As a gradient penalty does: autograd.grad reaches no parameter and is no round."""
    model = tw.GradientSharing(nn.Linear(2, 1, bias=False))
    inputs = torch.full((1, 2), rank + 1.0, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        output = model(inputs).sum()
        (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
        (output + gradient.square().sum()).backward()
        expected = 1.5 + 2 * model.module.weight
        torch.testing.assert_close(model.module.weight.grad, expected, rtol=1e-6, atol=0)
    assert model.num_rounds == 2


def test_autograd_grad_of_inputs_is_no_round(ranks: Ranks) -> None:
    ranks.run(asks_for_gradients_of_inputs)
