"""`tw.optim` under torch.compile: over a compiled model, and inside a compiled training step, where
the step is a graph break. The backends that generate no code: fast, and the arithmetic of eager
mode, so the bits are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tradewind as tw

# Of a compiler that looks into the native pass.
pytestmark = pytest.mark.filterwarnings("error:Dynamo does not know")
NUM_STEPS = 6
MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: tw.optim.AdamW(params, lr=1e-2, clip_norm=0.5),
    "AdamW-backward": lambda params: tw.optim.AdamW(
        params, lr=1e-2, clip_norm=0.5, measure="backward"
    ),
    "SGD": lambda params: tw.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "LAMB": lambda params: tw.optim.LAMB(params, lr=torch.tensor(1e-2)),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    for _ in range(NUM_STEPS):
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def trained(
    make: Callable[..., torch.optim.Optimizer],
    *,
    compile_model: Callable[[Any], Any] = lambda model: model,
    compile_step: Callable[[Any], Any] = lambda step: step,
) -> list[torch.Tensor]:
    """Parameters and losses after a few steps with a schedule."""
    model = network()
    called = compile_model(model)
    optimizer = make(model.parameters())
    schedule = tw.optim.WarmupLinear(optimizer, warmup_steps=2, total_steps=NUM_STEPS)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(called(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = compile_step(step)
    losses = []
    for inputs, targets in batches():
        losses.append(run(inputs, targets))
        schedule.step()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def assert_same_bits(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MAKES)
def test_a_compiled_model(name: str, backend: str) -> None:
    make = MAKES[name]
    compiled = trained(make, compile_model=lambda model: torch.compile(model, backend=backend))
    assert_same_bits(compiled, trained(make))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MAKES)
def test_a_compiled_training_step(name: str, backend: str) -> None:
    make = MAKES[name]
    compiled = trained(make, compile_step=lambda step: torch.compile(step, backend=backend))
    assert_same_bits(compiled, trained(make))


def test_a_compiled_optimizer_step() -> None:
    """As torch's own documentation compiles an optimizer: a function around `step()`."""
    make = MAKES["AdamW"]

    def train(compile: Callable[[Any], Any]) -> list[torch.Tensor]:
        model = network()
        optimizer = make(model.parameters())
        step = compile(lambda: optimizer.step())
        for inputs, targets in batches():
            F.mse_loss(model(inputs), targets).backward()
            step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    compiled = train(lambda step: torch.compile(step, backend="eager"))
    assert_same_bits(compiled, train(lambda step: step))


def test_the_steps_do_not_recompile() -> None:
    """A learning rate or step count that is baked into a graph would compile one for each step."""
    counter = torch._dynamo.testing.CompileCounter()
    trained(MAKES["AdamW"], compile_step=lambda step: torch.compile(step, backend=counter))
    first = counter.frame_count
    torch.compiler.reset()
    again = torch._dynamo.testing.CompileCounter()
    trained(
        lambda params: tw.optim.AdamW(params, lr=1e-2),
        compile_step=lambda step: torch.compile(step, backend=again),
    )
    assert first <= 4 and again.frame_count <= 4, (first, again.frame_count)
