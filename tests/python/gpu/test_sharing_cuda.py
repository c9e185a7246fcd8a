"""Gradients of modules on a GPU, through NCCL: one rank calls too where it is told to, and where
there are two GPUs, two ranks give what one process does. No wait for the device anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tradewind as tw
from share import test_engine_sharing as engines
from share.gradient_cases import batch, equal, gradients_of, mlp
from share.ranks import Ranks
from tradewind._core import native

SWITCH = "TRADEWIND_SHARE_COLLECTIVE"
# As in share/test_sharing_codecs.py: what a value may lose, of the largest one.
CODEC_STEPS = {"none": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127}


@pytest.fixture
def calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    monkeypatch.setenv(SWITCH, "always")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


def step(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    loss.backward()
    return loss


@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_rank_gets_its_own_gradients(deterministic: bool) -> None:
    model, alone = mlp().cuda(), mlp().cuda()
    shared = tw.GradientSharing(model, bucket_cap_mb=0.0005, deterministic=deterministic)
    assert isinstance(shared._native, native.CollectiveGradients)
    assert shared._native.num_buckets() > 1
    for number in range(3):
        inputs = batch(0, number).cuda()
        assert equal(gradients_of(shared, inputs), gradients_of(alone, inputs))


@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("codec", CODEC_STEPS)
def test_codecs_on_the_device(codec: Any) -> None:
    shared, inputs = tw.GradientSharing(mlp().cuda(), codec=codec), batch(0).cuda()
    given, exact = gradients_of(shared, inputs), gradients_of(mlp().cuda(), inputs)
    largest = max(g.abs().max().item() for g in exact)
    for one, other in zip(given, exact, strict=True):
        assert (one - other).abs().max().item() <= 2 * CODEC_STEPS[codec] * largest


@pytest.mark.usefixtures("calls_alone")
def test_nonfinite_gradients_are_named() -> None:
    shared = tw.GradientSharing(mlp().cuda())
    step(shared, batch(0).cuda())
    assert shared.nonfinite == []
    shared.zero_grad()
    step(shared, batch(0).cuda() * float("nan"))
    (found,) = shared.nonfinite
    assert (found.rank, found.microbatch) == (0, 1)
    assert found.num_parameters == len(list(shared.parameters()))


@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_round_waits_for_nothing(codec: Any) -> None:
    shared = tw.GradientSharing(mlp().cuda(), codec=codec)
    data = [batch(0, number).cuda() for number in range(6)]
    for inputs in data[:3]:
        shared.zero_grad()
        step(shared, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in data[3:]:
            shared.zero_grad()
            step(shared, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_the_engine_waits_for_nothing(precision: str, accumulate: int) -> None:
    engine = tw.Engine(
        mlp().cuda(),
        tw.AdamW(lr=1e-2),
        precision=precision,
        accumulate=accumulate,
        clip_norm=1.0,
        share=tw.Share(),
    )
    data = [batch(0, number).cuda() for number in range(8)]

    def microbatch(inputs: torch.Tensor) -> None:
        engine.step(engine(inputs).square().mean())

    for inputs in data[:4]:
        microbatch(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in data[4:]:
            microbatch(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats()["sharing"]["num_rounds"] == len(data) // accumulate
    engine.close()


@pytest.mark.usefixtures("calls_alone")
def test_an_engine_trains_as_without_sharing() -> None:
    engines_made = [
        tw.Engine(mlp().cuda(), tw.AdamW(lr=1e-2), clip_norm=0.3, share=share)
        for share in (None, tw.Share())
    ]
    for number in range(4):
        inputs = batch(0, number).cuda()
        alone, shared = (engine.step(engine(inputs).square().mean()) for engine in engines_made)
        assert alone.grad_norm == shared.grad_norm
    parameters = [[p.detach() for p in engine.model.parameters()] for engine in engines_made]
    assert equal(*parameters)
    bad = engines_made[1]
    with pytest.warns(RuntimeWarning, match="the update was skipped"):
        result = bad.step(bad(batch(0).cuda()).square().mean() * float("nan"))
        bad.close()
    assert result.vetoed and result.nonfinite[0].rank == 0
    assert equal([p.detach() for p in bad.model.parameters()], parameters[0])


@pytest.mark.usefixtures("calls_alone")
def test_a_round_in_a_cuda_graph() -> None:
    shared, alone = tw.GradientSharing(mlp().cuda()), mlp().cuda()
    inputs = batch(0).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # connects, and learns what backward reaches
            shared.zero_grad()
            step(shared, inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    shared.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(shared, inputs)
    for number in range(1, 4):
        inputs.copy_(batch(0, number))
        graph.replay()
        expected = gradients_of(alone, inputs)
        for given, exact in zip(shared.parameters(), expected, strict=True):
            # A graph may choose other algorithms for its products.
            torch.testing.assert_close(given.grad, exact, rtol=1e-5, atol=1e-7)


# --- what is taken, and what is refused ----------------------------------------------------------


def test_device_ids_are_those_of_distributed_data_parallel() -> None:
    shared = tw.GradientSharing(mlp().cuda(0), device_ids=[0])
    assert equal(gradients_of(shared, batch(0)), gradients_of(mlp().cuda(), batch(0).cuda()))
    with pytest.raises(ValueError, match="device_ids: expected one device for each process"):
        tw.GradientSharing(mlp().cuda(0), device_ids=[0, 1])
    with pytest.raises(ValueError, match="expected the module's own device cuda:0, got cuda:7"):
        tw.GradientSharing(mlp().cuda(0), device_ids=[7])
    with pytest.raises(NotImplementedError, match="output_device"):
        tw.GradientSharing(mlp().cuda(0), device_ids=[0], output_device=0)


def test_a_module_on_two_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a module on one device"):
        tw.GradientSharing(nn.Sequential(nn.Linear(2, 2).cuda(), nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "powersgd"}, "use codec='int8' or 'bf16'"),
        ({"overlap": "next-forward"}, "use overlap='backward' or 'auto'"),
    ],
)
def test_what_only_the_cpu_does_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        tw.GradientSharing(mlp().cuda(), **options)


# --- two ranks -----------------------------------------------------------------------------------


def trains_on_its_gpu(rank: int, deterministic: bool) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    model = tw.GradientSharing(mlp(seed=rank).to(device), deterministic=deterministic)
    alone = mlp(seed=0).to(device)
    for number in range(4):
        model.zero_grad()
        step(model, batch(rank, number).to(device))
        sums = [gradients_of(alone, batch(r, number).to(device)) for r in (0, 1)]
        expected = [(a + b) / 2 for a, b in zip(*sums, strict=True)]
        assert equal([p.grad for p in model.parameters()], expected), number


def trains_an_engine(rank: int, options: dict[str, Any]) -> str:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    share = tw.Share(deterministic=True)
    engine = tw.Engine(engines.Net(seed=rank).to(device), tw.AdamW(lr=1e-2), share=share, **options)
    for number in range(4):
        tokens, targets = (t.to(device) for t in engines.batch_of(rank, number))
        engine.step(engines.loss_of(engine(tokens), targets))
    digest = engines.digest_of(engine.model.cpu())
    engine.close()
    return digest


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are needed, {torch.cuda.device_count()} is here")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_ranks_get_the_bits_of_one_process(ranks: Ranks, deterministic: bool) -> None:
    ranks.run(trains_on_its_gpu, deterministic, timeout_s=120)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_engines_stay_alike(ranks: Ranks, precision: str) -> None:
    digests = ranks.run(trains_an_engine, {"precision": precision}, timeout_s=120)
    assert len(set(digests)) == 1
