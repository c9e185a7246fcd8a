"""Gradients that travel compressed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tradewind as tw
from share.gradient_cases import batch, equal, gradients_of, means, mlp
from share.ranks import Ranks

CODECS = ("none", "bf16", "fp16", "int8")


def compresses(rank: int, codec: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = tw.GradientSharing(mlp(), codec=codec)
    given = gradients_of(model, batch(rank))
    return [g.clone() for g in given], means(mlp(), 2)


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_are_close_and_the_same_on_every_rank(ranks: Ranks, codec: str) -> None:
    first, second = ranks.run(compresses, codec)
    assert equal(first[0], second[0])
    # A gradient and a mean are each rounded once: to 8 bits of mantissa, 11 bits, or half a 127th
    # of the largest value (of a block, so of the model at most).
    step = {"none": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127}[codec]
    largest = max(g.abs().max().item() for rank in (0, 1) for g in gradients_of(mlp(), batch(rank)))
    for given, exact in zip(*first, strict=True):
        assert (given - exact).abs().max().item() <= 2 * step * largest


def feeds_back(rank: int, codec: Any) -> tuple[float, float]:
    """A constant gradient, most of which is far below the largest value of its block."""
    model = tw.GradientSharing(nn.Linear(512, 1, bias=False), codec=codec)
    factor = torch.full((1, 512), 1e-3)
    factor[0, 0] = 1.0
    total, num_rounds = torch.zeros(1, 512), 64
    for _ in range(num_rounds):
        model.zero_grad()
        model(factor).sum().backward()
        total += model.module.weight.grad
    return (total / num_rounds - factor).abs().max().item(), factor.max().item()


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8"])
def test_what_a_codec_loses_is_sent_later(ranks: Ranks, codec: str) -> None:
    for error, largest in ranks.run(feeds_back, codec):
        # After n rounds what is missing is one rounding of a gradient and one of a mean: two steps
        # of at most 1/127 of the largest value, spread over n. Without feedback int8 would send
        # 0 in place of 1e-3 for ever.
        assert error <= 2 * largest / 127 / 64


# --- PowerSGD -------------------------------------------------------------------------------------

ROWS, COLS, RANK = 48, 64, 3


def gradient_of(rank: int, round_: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(ROWS, COLS, generator=generator).to(dtype)


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(COLS, ROWS).to(dtype)


def backward_with(model: nn.Module, gradient: torch.Tensor) -> None:
    """The weight's gradient is this one, and the bias's the sums of its rows."""
    loss = (model(torch.eye(COLS, dtype=gradient.dtype)).T * gradient).sum()
    loss.backward()


def sends_thin_matrices(rank: int, num_rounds: int, num_microbatches: int) -> list[Any]:
    model = tw.GradientSharing(linear(), codec="powersgd", powersgd_rank=RANK)
    feedback = model.feedback_state_dict()["values"]
    found: list[Any] = [feedback["directions of weight"].clone()]
    for round_ in range(num_rounds):
        model.zero_grad()
        with model.no_sync():
            for _ in range(num_microbatches - 1):
                backward_with(model, gradient_of(rank, round_) / num_microbatches)
        backward_with(model, gradient_of(rank, round_) / num_microbatches)
        found.append((model.module.weight.grad.clone(), model.module.bias.grad.clone()))
    found.append(model.feedback_state_dict()["values"]["error of weight"].view(ROWS, COLS))
    found.append(model.statistics()["sent_bytes"])
    return found


def orthonormal(vectors: torch.Tensor) -> torch.Tensor:
    """Of rows, by Gram-Schmidt from the first one on: QR with a positive diagonal."""
    q, r = torch.linalg.qr(vectors.T)
    return (q * torch.sign(torch.diagonal(r))).T


@pytest.mark.parametrize("num_microbatches", (1, 3))
@pytest.mark.parametrize("num_ranks", (2, 3))
def test_powersgd_does_as_the_paper_has_it(
    ranks: Ranks, num_ranks: int, num_microbatches: int
) -> None:
    """Algorithms 1 and 2 of arXiv 1905.13727 in float64."""
    num_rounds = 4
    outcomes = ranks.run(sends_thin_matrices, num_rounds, num_microbatches, num_ranks=num_ranks)
    right = outcomes[0][0].view(RANK, COLS).double()
    errors = [torch.zeros(ROWS, COLS, dtype=torch.float64) for _ in range(num_ranks)]
    for round_ in range(num_rounds):
        whole = [gradient_of(rank, round_).double() for rank in range(num_ranks)]
        owed = [error + gradient for error, gradient in zip(errors, whole, strict=True)]
        left = orthonormal(torch.stack([m @ right.T for m in owed]).mean(0).T)
        rights = [left @ m for m in owed]
        mean = torch.stack(rights).mean(0)
        expected = left.T @ mean
        errors = [m - left.T @ own for m, own in zip(owed, rights, strict=True)]
        right = orthonormal(mean)
        bias = torch.stack([g.sum(1) for g in whole]).mean(0)
        for outcome in outcomes:
            weight_grad, bias_grad = outcome[1 + round_]
            assert torch.equal(weight_grad, outcomes[0][1 + round_][0])
            torch.testing.assert_close(weight_grad.double(), expected, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(bias_grad.double(), bias, rtol=1e-5, atol=1e-4)
    for outcome, error in zip(outcomes, errors, strict=True):
        torch.testing.assert_close(outcome[-2].double(), error, rtol=1e-3, atol=1e-3)
        # The factors and the bias, each sent and each mean spread: 2 (N - 1) / N of them in all.
        arithmetic = 4 * (RANK * (ROWS + COLS) + ROWS) * 2 * (num_ranks - 1) / num_ranks
        assert outcome[-1] <= num_rounds * (arithmetic + 4096 * num_ranks)


def owes(rank: int, dtype: torch.dtype) -> float:
    model = tw.GradientSharing(linear(dtype), codec="powersgd", powersgd_rank=RANK)
    gradient = gradient_of(rank, 0, dtype)
    total = torch.zeros(ROWS, COLS)
    for _ in range(96):
        model.zero_grad()
        backward_with(model, gradient)
        total += model.module.weight.grad
    mean = (gradient_of(0, 0, dtype).float() + gradient_of(1, 0, dtype).float()) / 2
    return float((total / 96 - mean).norm() / mean.norm())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_powersgd_sends_what_it_owes(ranks: Ranks, dtype: torch.dtype) -> None:
    # Random matrices are the worst case: a round takes 3 of 48 directions off what is owed.
    for lacking in ranks.run(owes, dtype):
        assert lacking < 0.25


def goes_astray(rank: int) -> tuple[bool, list[str], bool, bool]:
    model = tw.GradientSharing(linear(), codec="powersgd")
    backward_with(model, gradient_of(rank, 0))
    before = model.feedback_state_dict()["values"]
    model.zero_grad()
    gradient = gradient_of(rank, 1)
    if rank == 1:
        gradient[3, 5] = float("nan")
    backward_with(model, gradient)
    all_lost = bool(model.module.weight.grad.isnan().all())
    names = [f"{n.rank} {n.parameter_name} {n.num_parameters}" for n in model.nonfinite]
    after = model.feedback_state_dict()["values"]
    kept = all(torch.allclose(after[name], before[name], atol=1e-5) for name in before)
    model.zero_grad()
    backward_with(model, gradient_of(rank, 2))
    return all_lost, names, kept, bool(model.module.weight.grad.isfinite().all())


def test_powersgd_survives_what_is_not_finite(ranks: Ranks) -> None:
    for all_lost, names, kept, goes_on in ranks.run(goes_astray):
        assert all_lost and kept and goes_on
        assert names == ["1 bias 2"]


def refuses(rank: int, dtype: torch.dtype, codec: Any) -> None:
    tw.GradientSharing(linear(dtype), codec=codec)


@pytest.mark.parametrize("codec", ("bf16", "fp16", "int8", "powersgd"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.complex128))
def test_codecs_refuse_what_they_cannot_carry(ranks: Ranks, codec: str, dtype: torch.dtype) -> None:
    for outcome in ranks.outcomes(refuses, dtype, codec):
        assert outcome.type == "TypeError", outcome
        expected = f"codec '{codec}': expected gradients of float32, bfloat16 or float16, got"
        assert outcome.message.startswith(expected), outcome.message
        assert "'weight'" in outcome.message and "codec='none'" in outcome.message


def sends_complex_numbers(rank: int, codec: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A complex number travels as its two parts."""
    model = tw.GradientSharing(linear(torch.complex64), codec=codec)
    gradient = torch.complex(gradient_of(rank, 0), gradient_of(rank, 1))
    model(torch.eye(COLS, dtype=torch.complex64)).T.backward(gradient)
    both = [torch.complex(gradient_of(r, 0), gradient_of(r, 1)) for r in (0, 1)]
    return model.module.weight.grad.clone(), (both[0] + both[1]) / 2


@pytest.mark.parametrize("codec", ("bf16", "int8", "powersgd"))
def test_complex_gradients_travel_as_two_parts(ranks: Ranks, codec: str) -> None:
    for found, expected in ranks.run(sends_complex_numbers, codec):
        assert (found - expected).abs().max() <= 0.05 * expected.abs().max()


def test_powersgd_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"'sharded'.*strategy='allreduce'"):
        tw.Share(codec="powersgd", strategy="sharded")
    with pytest.raises(ValueError, match="'next-forward'"):
        tw.Share(codec="powersgd", overlap="next-forward")
    with pytest.raises(ValueError, match="powersgd_rank: expected a whole number of at least 1"):
        tw.Share(codec="powersgd", powersgd_rank=0)


# --- what a codec owes, across processes ----------------------------------------------------------


def resumes(rank: int, codec: Any) -> tuple[bool, bool]:
    def rounds(model: tw.GradientSharing, begin: int, end: int) -> list[torch.Tensor]:
        for round_ in range(begin, end):
            model.zero_grad()
            backward_with(model, gradient_of(rank, round_))
        return [p.grad.clone() for p in model.module.parameters()]

    whole = tw.GradientSharing(linear(), codec=codec)
    expected = rounds(whole, 0, 5)
    first = tw.GradientSharing(linear(), codec=codec)
    rounds(first, 0, 3)
    state = first.feedback_state_dict()
    forgetful = rounds(tw.GradientSharing(linear(), codec=codec), 3, 5)
    second = tw.GradientSharing(linear(), codec=codec)
    second.load_feedback_state_dict(state)
    found = rounds(second, 3, 5)
    return equal(found, expected), equal(forgetful, expected)


@pytest.mark.parametrize("codec", ("bf16", "fp16", "int8", "powersgd"))
def test_what_a_codec_owes_goes_on_to_the_bit(ranks: Ranks, codec: str) -> None:
    for same, same_without in ranks.run(resumes, codec):
        assert same and not same_without


def loads_anothers(rank: int) -> list[str]:
    model = tw.GradientSharing(linear(), codec="int8")
    backward_with(model, gradient_of(rank, 0))
    state = model.feedback_state_dict()
    found = []
    for changed in (
        {**state, "rank": 1 - rank},
        {**state, "world_size": 3},
        {**state, "values": {"arena 0": torch.zeros(3)}},
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.load_feedback_state_dict(changed)
        found += [str(warning.message) for warning in caught]
    unchanged = model.feedback_state_dict()["values"]
    assert all(torch.equal(unchanged[name], state["values"][name]) for name in unchanged)
    return found


def test_what_another_rank_owed_is_not_taken(ranks: Ranks) -> None:
    for texts in ranks.run(loads_anothers):
        assert len(texts) == 3
        assert all(text.startswith("error feedback starts from zero: ") for text in texts)
        assert "expected" in texts[2] and "float32 values" in texts[2]


def recovers(rank: int, codec: Any) -> list[bool]:
    model = tw.GradientSharing(mlp(), codec=codec)  # parameters that end amid a cache line
    found = []
    for round_ in range(3):
        model.zero_grad()
        x = batch(rank)
        if round_ == 1 and rank == 1:
            x = torch.full_like(x, float("nan"))
        given = gradients_of(model, x)
        found.append(all(bool(g.isfinite().all()) for g in given))
    return found


@pytest.mark.parametrize("codec", (*CODECS, "powersgd"))
def test_what_is_not_finite_spoils_one_step_alone(ranks: Ranks, codec: str) -> None:
    for found in ranks.run(recovers, codec):
        assert found == [True, False, True]
