"""A GPU's arithmetic between collective calls has the CPU's bits, and so has an Engine that steps
there. The device is emulated: the CUDA library's kernels, compiled for the host, encode, sum and
decode buckets and step parameters on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import cuda_emulation
import pytest
import torch
from torch import nn

import tradewind as tw
from share import test_engine_sharing as engines
from share.collective_ranks import by_collectives, collectives
from share.gradient_cases import batch, equal, mlp
from share.ranks import Ranks
from tradewind._core import native
from tradewind.optim import cuda
from tradewind.optim.fused import FusedOptimizer


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


# --- the Engine ----------------------------------------------------------------------------------


@contextmanager
def emulated(library: str) -> Iterator[None]:
    """Engines step by the library, and share by collective calls."""
    loaded = native.CudaLibrary(library)
    patch = pytest.MonkeyPatch()
    patch.setattr(cuda, "library", lambda: loaded)
    patch.setattr(FusedOptimizer, "_device_type", "cpu")
    try:
        with collectives():
            yield
    finally:
        patch.undo()


def trains_an_engine(
    rank: int, library: str, share: dict[str, Any], options: dict[str, Any]
) -> tuple[str, list[float]]:
    with emulated(library):
        return engines.train(rank, share, options)


@pytest.mark.parametrize(
    ("share", "options"),
    [
        ({}, {"clip_norm": 0.3}),
        ({"codec": "int8"}, {}),
        ({"deterministic": True}, {"precision": "bf16", "accumulate": 2}),
        ({}, {"precision": "amp-fp16", "accumulate": 2}),
    ],
    ids=str,
)
def test_engines_have_the_same_bits(
    ranks: Ranks, library: str, share: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = ranks.run(by_collectives, engines.__name__, "train", share, options)
    assert ranks.run(trains_an_engine, library, share, options) == expected


def vetoes_on_the_device(rank: int, library: str, codec: Any) -> list[tuple[int, str, int]]:
    with emulated(library):
        engine = tw.Engine(mlp(), tw.AdamW(lr=1e-2), share=tw.Share(codec=codec))
        results, losses = [], []
        before: list[torch.Tensor] = []
        for step in range(3):
            losses.append(engine(batch(rank, step)).square().mean())
            if step == 1:
                before = [p.detach().clone() for p in engine.model.parameters()]
                losses[-1] = losses[-1] * (1.0 if rank == 0 else float("inf"))
            results.append(engine.step(losses[-1]))
            if step == 1:
                assert equal([p.detach() for p in engine.model.parameters()], before)
        # Asked a step later, it still speaks of its own round.
        assert [result.applied for result in results] == [True, False, True]
        assert isinstance(engine.optimizer.native_table, cuda.DeviceTables)
        assert results[0].nonfinite == results[2].nonfinite == []
        found = [(n.rank, n.parameter_name, n.microbatch) for n in results[1].nonfinite]
        engine.close()
        return found


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.filterwarnings("ignore:step 2")
def test_a_veto_on_the_device_names_rank_and_parameter(
    ranks: Ranks, library: str, codec: str
) -> None:
    for found in ranks.run(vetoes_on_the_device, library, codec):
        assert [(rank, microbatch) for rank, _, microbatch in found] == [(1, 1)]
        assert found[0][1] in dict(mlp().named_parameters())
