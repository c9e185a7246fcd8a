"""A GPU's arithmetic between collective calls has the CPU's bits. Here the device is emulated: the
CUDA library's kernels, compiled for the host, encode, sum and decode buckets on the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import cuda_emulation
import pytest
import torch
from torch import nn

from share.gradient_cases import batch, equal, mlp
from share.ranks import Ranks
from tradewind._core import native


@pytest.fixture(scope="session")
def library() -> str:
    cuda_emulation.build()
    folder = cuda_emulation.BUILD / "tests" / "cpp" / "cuda_emulation"
    return str(folder / f"lib{cuda_emulation.TARGET}.so")


def collective(model: nn.Module, library: str, **options: Any) -> native.CollectiveGradients:
    """`library`: "" for the CPU's own kernels."""
    from tradewind.share.collective import host_group
    from tradewind.share.rendezvous import meet

    meeting = meet(None, timedelta(seconds=20))
    given = native.CollectiveOptions()
    given.bucket_bytes, given.end_bucket_bytes = 512, 512
    given.deadline_s = 20.0
    given.cuda_library, given.emulates_device = library, bool(library)
    given.settles_itself = True
    for name, value in options.items():
        setattr(given, name, value)
    names, parameters = zip(*model.named_parameters(), strict=True)
    groups = [host_group(meeting, purpose) for purpose in ("gradients", "facts")]
    return native.CollectiveGradients(
        list(parameters), list(names), *groups, meeting.store, meeting.prefix, given
    )


def trains(
    rank: int, library: str, options: dict[str, Any], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    model = mlp().to(dtype)
    shared = collective(model, library, **options)
    assert shared.num_buckets() > 1
    found = []
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step).to(dtype)).float().square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert shared.nonfinite() == []
        assert shared.found_inf().item() == 0.0
    model.zero_grad()
    (model(batch(rank).to(dtype)).float().square().mean() * (float("nan"), 1.0)[rank]).backward()
    assert [(one.rank, one.microbatch, one.num_parameters) for one in shared.nonfinite()] == [
        (0, 1, len(found[0]))
    ]
    assert shared.found_inf().item() == 1.0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_deterministic": True},
        {"codec": "bf16"},
        {"codec": "fp16"},
        {"codec": "int8"},
        {"codec": "int8", "error_feedback": False},
    ],
    ids=str,
)
def test_buckets_have_the_same_bits(
    ranks: Ranks, library: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    here = ranks.run(trains, "", options, dtype)
    there = ranks.run(trains, library, options, dtype)
    for of_rank, of_rank_there in zip(here, there, strict=True):
        for given, expected in zip(of_rank_there, of_rank, strict=True):
            assert len(given) == 6 and equal(given, expected)


def test_a_library_that_is_not_there_is_named(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(trains, "/nowhere/lib.so", {"codec": "int8"}, torch.float32)
    for outcome in outcomes:
        assert outcome.type in ("SharingError", "RuntimeError")
        assert "/nowhere/lib.so" in outcome.message
