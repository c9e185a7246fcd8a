"""Gradients that travel compressed."""

from __future__ import annotations

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
