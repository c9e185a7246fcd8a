"""Engine(update="in-backward"): the same update, applied while backward runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from engine.models import Tied, batches, bits, small_net, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

import tradewind as tw

RECIPES = [
    tw.AdamW(lr=1e-2, amsgrad=True),
    tw.SGD(lr=0.1, momentum=0.9, nesterov=True),
    tw.LAMB(lr=1e-2),
    tw.Lion(lr=1e-3),
]


def step(engine: tw.Engine, x: torch.Tensor, y: torch.Tensor) -> tw.StepResult:
    return engine.step(F.cross_entropy(engine(x), y))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_same_bits_as_after_backward(recipe: tw.Recipe, precision: str) -> None:
    first, second = twins()
    after = tw.Engine(first, recipe, precision=precision)
    within = tw.Engine(second, recipe, precision=precision, update="in-backward")
    for x, y in batches(4):
        expected, result = step(after, x, y), step(within, x, y)
        assert result.applied
        assert result.grad_norm == expected.grad_norm  # to the bit, whatever the order of arrival
        assert result.loss == expected.loss
        assert within.stats()["parameters"] == after.stats()["parameters"]
    assert bits(first) == bits(second)
    state, kept = after.optimizer.state_dict(), within.optimizer.state_dict()
    torch.testing.assert_close(kept["state"], state["state"], rtol=0, atol=0)


def test_gradients_do_not_live_at_once() -> None:
    width, depth = 512, 24
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    engine = tw.Engine(model, tw.SGD(lr=1e-3), update="in-backward")
    alive: list[int] = []
    for layer in model:
        layer.register_full_backward_pre_hook(
            lambda *_: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    engine.step(engine(torch.randn(4, width)).square().mean())
    # A million elements are four such layers.
    assert max(alive) <= 4
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_withholds_its_own_update() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return self.good.sum() + (self.bad * factor).sum()

    model = Two()
    engine = tw.Engine(model, tw.SGD(lr=0.5), update="in-backward")
    with pytest.warns(RuntimeWarning, match="'bad' is not finite.*its update was skipped"):
        result = engine.step(engine(torch.tensor([1.0, float("nan"), float("inf")])))
    assert (result.vetoed, result.applied) == (True, True)
    assert (result.first_nonfinite, result.num_nonfinite) == ("bad", 2)
    assert torch.equal(model.bad, torch.ones(3))
    assert torch.equal(model.good, torch.full((3,), 0.5))
    assert model.bad.grad is None
    assert step_of_two(engine).applied


def step_of_two(engine: tw.Engine) -> tw.StepResult:
    return engine.step(engine(torch.ones(3)))


def test_tied_frozen_and_unused_parameters() -> None:
    models = Tied(), Tied()
    for model in models:
        model.unused = nn.Parameter(torch.ones(2))
    x = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(0))
    for model, update in zip(models, ("after-backward", "in-backward"), strict=True):
        engine = tw.Engine(model, tw.AdamW(lr=1e-2), update=update)
        for _ in range(3):
            logits = engine(x)
            engine.step(F.cross_entropy(logits.flatten(0, 1), x.flatten()))
    assert bits(models[0]) == bits(models[1])
    assert torch.equal(models[1].unused, torch.ones(2))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return x


def test_checkpointing() -> None:
    engine = tw.Engine(Checkpointed(False), tw.SGD(lr=0.1), update="in-backward")
    assert engine.step(engine(torch.ones(2, 4)).sum()).applied
    engine = tw.Engine(Checkpointed(True), tw.SGD(lr=0.1), update="in-backward")
    with pytest.raises(RuntimeError, match=r"'inner.(weight|bias)': its gradient arrived twice"):
        engine.step(engine(torch.ones(2, 4)).sum())


def test_a_weight_that_backward_still_needs_is_told_by_torch() -> None:
    class Twice(nn.Module):
        """The weight is read a second time outside the graph of its own gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1100, 1100, bias=False)
            self.last = nn.Linear(1100, 1100, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) @ self.last.weight.detach()
            return self.last(hidden)

    engine = tw.Engine(Twice(), tw.SGD(lr=0.1), update="in-backward")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.step(engine(torch.ones(2, 1100)).sum())


def test_compiled_autograd_takes_the_gradients_at_the_end() -> None:
    first, second = twins()
    engine = tw.Engine(first, tw.SGD(lr=0.1), update="in-backward")
    plain = tw.Engine(second, tw.SGD(lr=0.1))
    x, y = batches(1)[0]
    loss = F.cross_entropy(engine(x), y)
    engine.optimizer.native_table.remove_hooks()  # as under compiled autograd
    engine._prepare_hooks = lambda: None  # type: ignore[method-assign]
    assert engine.step(loss).applied
    step(plain, x, y)
    assert bits(first) == bits(second)


def test_a_scheduler_sees_its_optimizer_step() -> None:
    model = small_net()
    optimizer = tw.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = tw.Engine(model, optimizer, update="in-backward")
    first, second = twins()
    for x, y in batches(2):
        step(engine, x, y)
        scheduler.step()  # would warn, had optimizer.step() not been called
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    del first, second
    gc.collect()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: tw.Engine(m, tw.SGD(), update="in-backward", clip_norm=1.0), "clip_norm"),
        (lambda m: tw.Engine(m, tw.SGD(clip_norm=1.0), update="in-backward"), "clip_norm"),
        (lambda m: tw.Engine(m, tw.SGD(), update="in-backward", accumulate=2), "accumulate"),
        (lambda m: tw.Engine(m, tw.SGD(), update="in-backward", precision="fp16"), "precision"),
        (lambda m: tw.Engine(m, tw.SGD(), update="sideways"), "update: expected one of"),
    ],
)
def test_what_excludes_it(make: Callable[[nn.Module], tw.Engine], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(small_net())
