"""tw.GradScaler against torch.amp.GradScaler, and torch's own with our optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tradewind as tw

OVERFLOWS_AT = (1, 4, 5)


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train(scaler: torch.amp.GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        if step in OVERFLOWS_AT:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("scaler_class", [tw.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("fused", [None, True])
def test_trains_as_torch(
    scaler_class: type[torch.amp.GradScaler], clip_norm: float | None, fused: bool | None
) -> None:
    ours, theirs = make(), make()
    scaler = scaler_class("cpu", growth_interval=2)
    optimizer = tw.optim.AdamW(ours.parameters(), lr=0.01, clip_norm=clip_norm, fused=fused)
    train(scaler, ours, optimizer)

    reference = torch.amp.GradScaler("cpu", growth_interval=2)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    if clip_norm is not None:

        def clip(*_: object) -> None:  # torch's scaler has unscaled by then
            nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)

        optimizer.register_step_pre_hook(clip)
    train(reference, theirs, optimizer)
    assert scaler.state_dict() == reference.state_dict()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_skipped_step_changes_nothing() -> None:
    model = make()
    optimizer = tw.optim.AdamW(model.parameters())
    scaler = tw.GradScaler("cpu")
    train(scaler, model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    scaler.scale(model(torch.full((1, 6), float("nan"))).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert not optimizer.outcome.applied


def test_torchs_scaler_unscales_unless_told_otherwise_as_with_torchs_optimizers() -> None:
    for fused in (None, False, True):
        optimizer = tw.optim.AdamW(make().parameters(), lr=0.01, fused=fused)
        assert optimizer._step_supports_amp_scaling is bool(fused)


@pytest.mark.parametrize("scaler_class", [tw.GradScaler, torch.amp.GradScaler])
def test_float16_gradients_of_float32_parameters(scaler_class: type[torch.amp.GradScaler]) -> None:
    parameter = nn.Parameter(torch.ones(5))
    if not hasattr(parameter, "grad_dtype"):
        pytest.skip("this torch refuses such gradients itself")
    parameter.grad_dtype = None
    optimizer = tw.optim.SGD([parameter], lr=0.5)
    scaler = scaler_class("cpu", init_scale=1024.0)
    parameter.grad = torch.full((5,), 1024.0, dtype=torch.float16)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5] * 5


@pytest.mark.parametrize("scaler_class", [tw.GradScaler, torch.amp.GradScaler])
def test_float16_gradients_are_taken(scaler_class: type[torch.amp.GradScaler]) -> None:
    parameter = nn.Parameter(torch.ones(5, dtype=torch.float16))
    optimizer = tw.optim.SGD([parameter], lr=0.5, clip_norm=1.0, masters="fp32")
    scaler = scaler_class("cpu", init_scale=1024.0)
    parameter.grad = torch.full((5,), 1024.0 * 4, dtype=torch.float16)  # 4 each when unscaled
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    step = 0.5 / 5**0.5
    torch.testing.assert_close(
        optimizer.state[parameter]["master"], torch.full((5,), 1 - step), rtol=1e-6, atol=0
    )


def test_gradients_unscaled_by_hand() -> None:
    ours, theirs = make(), make()
    for model, optimizer, scaler in (
        (ours, tw.optim.SGD(ours.parameters(), lr=0.1), tw.GradScaler("cpu")),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), torch.amp.GradScaler("cpu")),
    ):
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_another_optimizer_is_stepped_as_torch_does() -> None:
    ours, theirs = make(), make()
    train(tw.GradScaler("cpu"), ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    train(torch.amp.GradScaler("cpu"), theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_dict_goes_both_ways() -> None:
    scaler = tw.GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=32.0).state_dict())
    assert scaler.get_scale() == 32.0


def test_misuse_is_told_as_torch_tells_it() -> None:
    model = make()
    optimizer = tw.optim.SGD(model.parameters(), lr=0.1)
    scaler = tw.GradScaler("cpu")
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: 0.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)


def test_disabled_steps_plainly() -> None:
    model = make()
    optimizer = tw.optim.SGD(model.parameters(), lr=0.1)
    scaler = tw.GradScaler("cpu", enabled=False)
    before = [p.clone() for p in model.parameters()]
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    scaler.step(optimizer)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
