"""The step on a GPU: the CPU's bits for every rule and storage, no wait or allocation, few kernels,
and all of it in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_cases import RULES, STORAGES, assert_same_bits, give, make, step_all, tensors
from optimizer_cases import LAYOUTS, bits, parameters_of
from torch.nn import Parameter

import tradewind as tw
from tradewind.optim import cuda
from tradewind.optim.fused import Orders

ELEMENTWISE = [case for case in RULES if case[0] != "Muon"]


def pair(rule: str, given: list[torch.Tensor], **options: Any) -> tuple[Any, Any]:
    return make(rule, given, **options), make(rule, given, "cuda", **options)


def test_probe() -> None:
    code, text, num_devices, capability = cuda.library().probe()
    assert code == 0, text
    major, minor = torch.cuda.get_device_capability(0)
    assert num_devices == torch.cuda.device_count() and capability == 10 * major + minor


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("rule", "options"), ELEMENTWISE)
def test_same_bits_as_on_the_cpu(
    rule: str, options: dict[str, Any], storage: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if "masters" in storage else torch.float32
    here, there = pair(rule, tensors(rule, dtype), clip_norm=3.0, **options, **storage)
    for step in range(3):
        step_all([here, there], 1, first=step)
        assert here.outcome.norm == there.outcome.norm
        assert here.outcome.clip_factor == there.outcome.clip_factor
    assert_same_bits(here, there)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
@pytest.mark.parametrize(("rule", "options"), ELEMENTWISE)
def test_same_bits_by_dtype(rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    here, there = pair(rule, tensors(rule, dtype), clip_norm=3.0, **options)
    step_all([here, there])
    assert_same_bits(here, there)


def test_same_bits_of_large_tensors() -> None:
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(n, generator=generator) for n in (3_000_001, 4096, 1, 1_048_576)]
    for rule in ("AdamW", "LAMB"):
        here, there = pair(rule, given, lr=0.01, clip_norm=1.0)
        step_all([here, there])
        assert here.outcome.norm == there.outcome.norm
        assert_same_bits(here, there)


def test_layouts() -> None:
    generator = torch.Generator().manual_seed(5)
    given = [layout(lambda *s: torch.randn(*s, generator=generator)) for layout in LAYOUTS.values()]
    here, there = pair("AdamW", given, clip_norm=1.0)
    step_all([here, there])
    assert here.outcome.norm == there.outcome.norm
    for a, b in zip(parameters_of(here), parameters_of(there), strict=True):
        assert bits(a) == bits(b.cpu())


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_muon(storage: dict[str, Any]) -> None:
    """Matrix products in bfloat16 are outside of the claim: their order of sums differs."""
    dtype = torch.bfloat16 if "masters" in storage else torch.float32
    given = tensors("Muon", dtype)
    here, there = pair("Muon", given, lr=0.01, clip_norm=1.0, **storage)
    step_all([here, there])
    for start, a, b in zip(given, parameters_of(here), parameters_of(there), strict=True):
        moved = (a.detach().float() - start.float()).norm()
        # A few bfloat16 roundings (2^-8 each) through five iterations, and the parameter's own.
        own = 2**-8 * start.float().norm() if dtype == torch.bfloat16 else 0.0
        assert (a.detach().float() - b.detach().cpu().float()).norm() <= 0.1 * moved + own


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
def test_against_torch(clip_norm: float | None) -> None:
    given = tensors("AdamW", torch.float32)
    ours = make("AdamW", given, "cuda", lr=1e-2, clip_norm=clip_norm)
    theirs = [Parameter(p.detach().clone()) for p in parameters_of(ours)]
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(5):
        give([ours, reference], step)
        ours.step()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
        reference.step()
    for a, b in zip(parameters_of(ours), theirs, strict=True):
        # The same formulas in another order of operations.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- orders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_veto_leaves_everything(rule: str, options: dict[str, Any]) -> None:
    there = make(rule, tensors(rule, torch.float32), "cuda", **options)
    step_all([there], 1)
    give([there], 1)
    parameters_of(there)[2].grad.view(-1)[1] = float("nan")
    before = [bits(p.cpu()) for p in parameters_of(there)]
    states = [{k: bits(v.cpu()) for k, v in entry.items()} for entry in there.state.values()]
    there.order(Orders(measure=True, veto_nonfinite=True))
    there.step()
    assert not there.outcome.applied and there.outcome.first_nonfinite_name == "group0.param2"
    assert [bits(p.cpu()) for p in parameters_of(there)] == before
    assert [
        {k: bits(v.cpu()) for k, v in entry.items()} for entry in there.state.values()
    ] == states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_in_device_memory(dtype: torch.dtype) -> None:
    given = tensors("AdamW", torch.float32)
    here = make("AdamW", given, lr=torch.tensor(0.125, dtype=dtype))
    there = make("AdamW", given, "cuda", lr=torch.tensor(0.125, dtype=dtype, device="cuda"))
    step_all([here, there])
    for optimizer in (here, there):
        optimizer.param_groups[0]["lr"].fill_(0.01)
    step_all([here, there], first=3)
    assert_same_bits(here, there)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, tw.GradScaler])
def test_grad_scalers(scaler_class: Any, clip_norm: float | None) -> None:
    here, there = pair("AdamW", tensors("AdamW", torch.float16), lr=0.1, clip_norm=clip_norm)
    scalers = [scaler_class(d, init_scale=64.0) for d in ("cpu", "cuda")]
    for step in range(4):
        give([here, there], step)
        for optimizer, scaler in zip((here, there), scalers, strict=True):
            parameters = parameters_of(optimizer)
            scaler.scale(torch.ones((), device=parameters[0].device))
            for parameter in parameters:
                parameter.grad.mul_(64.0 if step < 2 else 32.0)
            if step == 1:
                parameters[3].grad[5] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert here.outcome.applied == there.outcome.applied == (step != 1)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
    assert_same_bits(here, there)


def test_a_checkpoint_goes_from_cpu_to_gpu_and_back() -> None:
    for storage in STORAGES:
        dtype = torch.bfloat16 if "masters" in storage else torch.float32
        here, there = pair("AdamW", tensors("AdamW", dtype), lr=0.1, **storage)
        step_all([here])
        with torch.no_grad():
            for a, b in zip(parameters_of(here), parameters_of(there), strict=True):
                b.copy_(a)
        there.load_state_dict(here.state_dict())
        step_all([here, there], first=3)
        here.load_state_dict(there.state_dict())
        step_all([here, there], first=6)
        assert_same_bits(here, there)


def test_statistics_come_without_a_wait() -> None:
    here, there = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1)
    for step in range(2):
        give([here, there], step)
        for optimizer in (here, there):
            optimizer.order(Orders(measure=True, wants_changes=True))
            optimizer.step()
    torch.cuda.synchronize()
    assert here.native_table.statistics() == there.native_table.statistics()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_norm_is_joint_over_devices() -> None:
    given = tensors("AdamW", torch.float32)
    here = make("AdamW", given, clip_norm=0.1)
    moved = [Parameter(t.to(f"cuda:{i % 2}")) for i, t in enumerate(given)]
    there = tw.optim.AdamW(moved, clip_norm=0.1)
    step_all([here, there])
    assert there.outcome.norm == pytest.approx(here.outcome.norm, rel=1e-14)


# --- what a step costs --------------------------------------------------------------------------


def steady(rule: str = "AdamW", count: int = 20, **options: Any) -> Any:
    """An optimizer over `count` tensors that has taken its first steps."""
    given = [torch.ones(64, 32) for _ in range(count)]
    optimizer = make(rule, given, "cuda", lr=0.01, clip_norm=1.0, **options)
    give([optimizer], 0)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    return optimizer


def step_without_waits(optimizer: Any, between: Callable[[], object] = lambda: None) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            between()
            optimizer.step()
            optimizer.outcome.is_ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_no_wait(rule: str, options: dict[str, Any]) -> None:
    step_without_waits(steady(rule, **{k: v for k, v in options.items() if k != "lr"}))


def test_no_wait_for_new_gradients_rates_and_statistics() -> None:
    optimizer = steady()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01, device="cuda")

    def new_step() -> None:
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.ones_like(parameter)
        optimizer.param_groups[0]["weight_decay"] *= 0.5
        optimizer.order(Orders(measure=True, veto_nonfinite=True, wants_changes=True))
        optimizer.native_table.statistics()

    step_without_waits(optimizer, new_step)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_no_allocation(storage: dict[str, Any]) -> None:
    optimizer = steady(**storage)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        optimizer.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def num_kernels(optimizer: Any) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        optimizer.step()
        torch.cuda.synchronize()
    names = [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum("kernel" in name and "tradewind" in name for name in names)


@pytest.mark.parametrize(("rule", "want"), [("AdamW", 6), ("LAMB", 8)])
def test_kernels_of_a_step(rule: str, want: int) -> None:
    """measure 1, combine 2, control 2, sweep 1 (LAMB: two, and a sum between them)."""
    num_kernels(steady(rule))  # the profiler's own start
    for count in (1, 1000):
        assert num_kernels(steady(rule, count)) == want


# --- graphs -------------------------------------------------------------------------------------


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_graph_of_the_step(rule: str, options: dict[str, Any], storage: dict[str, Any]) -> None:
    """Replays are the same steps as without a graph, to the bit; the learning rate is read anew."""
    dtype = torch.bfloat16 if "masters" in storage else torch.float32
    given = tensors(rule, dtype)
    made = []
    for _ in range(2):
        rate = torch.tensor(float(options["lr"]), device="cuda")
        made.append(make(rule, given, "cuda", **{**options, "lr": rate}, clip_norm=1.0, **storage))
    plain, graphed = made
    give(made, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for optimizer in made:
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = capture(graphed.step)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(parameters_of(plain), parameters_of(graphed), strict=True):
            values = torch.randn(a.shape, generator=generator)
            a.grad.copy_(values)
            b.grad.copy_(values)
        for optimizer in made:
            optimizer.param_groups[0]["lr"].mul_(0.5)
        plain.step()
        graph.replay()
        torch.cuda.synchronize()
        assert graphed.outcome.norm == plain.outcome.norm
    if rule != "Muon":  # matrix products are cuBLAS's, and outside of the claim
        assert_same_bits(plain, graphed)
    for a, b in zip(parameters_of(plain), parameters_of(graphed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_a_graph_of_backward_and_step() -> None:
    """Gradients live in the graph's own memory; eager steps between replays do not disturb it."""
    models = [torch.nn.Linear(8, 8, device="cuda") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = torch.randn(4, 8, device="cuda")
    plain, graphed = (tw.optim.AdamW(m.parameters(), lr=0.1, clip_norm=1.0) for m in models)

    def train(model: torch.nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for model, optimizer in zip(models, (plain, graphed), strict=True):
            for _ in range(3):
                train(model, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graphed.zero_grad(set_to_none=True)
    graph = capture(lambda: train(models[1], graphed))
    for _ in range(2):
        graph.replay()
        train(models[0], plain)
    train(models[1], graphed)
    train(models[0], plain)
    graph.replay()
    train(models[0], plain)
    torch.cuda.synchronize()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
