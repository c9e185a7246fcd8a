"""What GradientSharing refuses, and what it says where ranks do not fit together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tradewind as tw
from share.gradient_cases import batch, equal, gradients_of, mlp
from share.ranks import Ranks


def differs(rank: int, what: str) -> None:
    model: nn.Module = nn.Linear(4, 4)
    keywords: dict[str, Any] = {}
    if rank == 1:
        if what == "shape":
            model = nn.Linear(4, 5)
        elif what == "count":
            model = nn.Sequential(model, nn.Linear(4, 4))
        elif what == "dtype":
            model = model.double()
        elif what == "frozen":
            model.bias.requires_grad_(False)
        else:
            keywords["codec"] = "bf16"
    tw.GradientSharing(model, timeout=timedelta(seconds=20), **keywords)


@pytest.mark.parametrize("what", ["shape", "count", "dtype", "frozen", "options"])
def test_ranks_that_differ_are_an_error_on_every_rank(ranks: Ranks, what: str) -> None:
    for outcome in ranks.outcomes(differs, what):
        assert outcome.type == "ValueError", outcome
        assert "rank 0 and rank 1 differ in" in outcome.message
        assert ("options" if what == "options" else "parameters") in outcome.message


def waits_for_nobody(rank: int) -> None:
    if rank == 0:
        tw.GradientSharing(nn.Linear(2, 2), timeout=timedelta(seconds=1))


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    first, _ = ranks.outcomes(waits_for_nobody)
    assert first.type == "SharingError"
    assert "missing: rank 1" in first.message


def outlives_its_group(rank: int) -> None:
    model = tw.GradientSharing(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    model(torch.ones(1, 2))


def test_a_destroyed_group_is_a_named_error(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(outlives_its_group):
        assert outcome.type == "ValueError"
        assert "has been destroyed" in outcome.message


def gives_sparse_gradients(rank: int) -> None:
    model = tw.GradientSharing(nn.Sequential(nn.Embedding(5, 2, sparse=True)))
    model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_by_name(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(gives_sparse_gradients):
        assert outcome.type in ("RuntimeError", "SharingError"), outcome
    assert any(
        "parameter '0.weight': expected a dense gradient" in outcome.message
        for outcome in ranks.outcomes(gives_sparse_gradients)
    )


def _of(parameter: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(parameter, requires_grad=False))
    return module


def _stepping_in_backward() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight._in_backward_optimizers = [object()]  # as _apply_optimizer_in_backward leaves it
    return model


@pytest.mark.parametrize(
    ("make", "keywords", "error", "message"),
    [
        (nn.Module, {}, RuntimeError, "nothing to share"),
        (lambda: _of(torch.ones(2)), {}, RuntimeError, "requires a gradient"),
        (lambda: nn.LazyLinear(3), {}, RuntimeError, "'weight': is lazy"),
        (lambda: [1], {}, TypeError, "module: expected a torch.nn.Module, got list"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, NotImplementedError, "'weight': is on meta"),
        (_stepping_in_backward, {}, NotImplementedError, "'weight': has an optimizer"),
        (mlp, {"codec": "int4"}, ValueError, "codec: expected one of none"),
        (mlp, {"strategy": "ring"}, ValueError, "strategy: expected one of"),
        (mlp, {"strategy": "sharded"}, ValueError, "use tw.Engine"),
        (mlp, {"strategy": "periodic"}, ValueError, "use tw.Engine"),
        (mlp, {"overlap": "never"}, ValueError, "overlap: expected one of"),
        (mlp, {"deterministic": 1}, TypeError, "deterministic: expected True or False"),
        (mlp, {"bucket_cap_mb": 0}, ValueError, "bucket_mb: expected a positive number"),
        (mlp, {"timeout": 3}, TypeError, "timeout: expected a datetime.timedelta, got int"),
        (mlp, {"timeout": timedelta(0)}, ValueError, "timeout: expected a positive number"),
        (mlp, {"device_ids": [0]}, ValueError, "device_ids=None"),
        (mlp, {"output_device": 0}, NotImplementedError, "output_device=None"),
        (mlp, {"buckets": 3}, TypeError, "unknown option 'buckets'"),
        (mlp, {"mixed_precision": object()}, NotImplementedError, "mixed_precision"),
        (mlp, {"device_mesh": object()}, NotImplementedError, "device_mesh"),
        (mlp, {"bucket_cap_mb_list": [1]}, NotImplementedError, "bucket_cap_mb_list"),
        (mlp, {"delay_all_reduce_named_params": []}, NotImplementedError, "delay_all_reduce"),
        (mlp, {"param_to_hook_all_reduce": 1}, NotImplementedError, "param_to_hook_all_reduce"),
        (mlp, {"skip_all_reduce_unused_params": True}, NotImplementedError, "skip_all_reduce"),
        (mlp, {"batched_grad_copy": True}, NotImplementedError, "batched_grad_copy"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    make: Any, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tw.GradientSharing(make(), **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dim": 1},
        {"find_unused_parameters": True},
        {"check_reduction": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"init_sync": False},
        {"bucket_cap_mb": 25},
        {"mixed_precision": None, "device_mesh": None, "batched_grad_copy": False},
        {"device_ids": None, "output_device": None},
        {"device_ids": []},
    ],
)
def test_keywords_of_distributed_data_parallel_are_taken(keywords: dict[str, Any]) -> None:
    model = tw.GradientSharing(mlp(), **keywords)
    model._set_static_graph()
    assert equal(gradients_of(model, batch(0)), gradients_of(mlp(), batch(0)))


def test_hooks_on_buckets_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="codec='bf16'"):
        tw.GradientSharing(mlp()).register_comm_hook(None, lambda state, bucket: None)
