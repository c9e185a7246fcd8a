"""AdamW on the GPU against torch's, and against our own sweep on the CPU to the bit."""

from __future__ import annotations

import pytest
import torch

import tradewind as tw
from tradewind.optim import cuda

SHAPES = [(1,), (0,), (7, 3), (8192,), (8193,), (300, 301)]


def make(device: str, count: int = 1) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in SHAPES * count:
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        parameter.grad = torch.randn(shape, generator=generator).to(device)
        parameters.append(parameter)
    return parameters


def test_probe() -> None:
    code, text, num_devices, capability = cuda.library().probe()
    assert code == 0, text
    major, minor = torch.cuda.get_device_capability(0)
    assert num_devices == torch.cuda.device_count() and capability == 10 * major + minor


@pytest.mark.parametrize("count", [1, 20], ids=["one launch", "several launches"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}])
def test_same_bits_as_on_the_cpu(options: dict[str, bool], count: int) -> None:
    here, there = make("cpu", count), make("cuda", count)
    ours, theirs = (
        tw.optim.AdamW(here, lr=1e-2, **options),
        tw.optim.AdamW(there, lr=1e-2, **options),
    )
    for _ in range(5):
        ours.step()
        theirs.step()
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b.cpu())
        for name, value in ours.state[a].items():
            assert torch.equal(value, theirs.state[b][name].cpu()), name


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
def test_against_torch(clip_norm: float | None) -> None:
    ours, theirs = make("cuda"), make("cuda")
    optimizer = tw.optim.AdamW(ours, lr=1e-2, clip_norm=clip_norm)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(5):
        optimizer.step()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        # The same formulas in another order of operations.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_other_rules_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="SGD on CUDA is not built yet"):
        tw.optim.SGD(make("cuda"), lr=0.1).step()
    half = torch.nn.Parameter(torch.zeros(3, device="cuda", dtype=torch.float16))
    half.grad = torch.zeros_like(half)
    with pytest.raises(NotImplementedError, match="float32 parameters"):
        tw.optim.AdamW([half]).step()


def test_no_host_sync() -> None:
    optimizer = tw.optim.AdamW(make("cuda"), lr=1e-2, clip_norm=1.0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
