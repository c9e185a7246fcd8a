"""Measuring while hot: sums count only for the very gradient that was measured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, bits, small_net
from torch import nn
from torch.utils.checkpoint import checkpoint

import tradewind as tw
from tradewind.engine import StepResult

NUM_PARAMETERS = 5


def run(change=None, **options: object) -> tuple[StepResult, dict[str, bytes]]:  # type: ignore[no-untyped-def]
    """One step on a fresh model; `change` edits it between backward and step."""
    model = small_net()
    x, y = batches(1)[0]
    with tw.Engine(model, tw.SGD(lr=0.1), **options) as engine:
        engine.backward(F.cross_entropy(engine(x), y))
        if change is not None:
            change(model)
        return engine.step(), bits(model)


def expected_norm(change=None) -> float:  # type: ignore[no-untyped-def]
    model = small_net()
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    if change is not None:
        change(model)
    return torch.linalg.vector_norm(
        torch.cat([p.grad.flatten().double() for p in model.parameters()])
    ).item()


def test_hot_and_cold_measures_agree_to_the_bit() -> None:
    hot, hot_bits = run(clip_norm=0.1)
    cold, cold_bits = run(
        lambda model: [setattr(p, "grad", p.grad.clone()) for p in model.parameters()],
        clip_norm=0.1,
    )
    assert (hot.num_hot, cold.num_hot) == (NUM_PARAMETERS, 0)
    assert hot.grad_norm == cold.grad_norm and hot_bits == cold_bits
    assert hot.grad_norm == pytest.approx(expected_norm(), rel=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.grad.mul_(3),
        lambda model: setattr(model[0].weight, "grad", 2 * model[0].weight.grad),
        lambda model: model[0].weight.grad.set_(torch.ones_like(model[0].weight)),
    ],
    ids=["in place", "another object", "other memory"],
)
def test_changed_gradients_are_measured_again(change) -> None:  # type: ignore[no-untyped-def]
    result, _ = run(change)
    assert result.num_hot == NUM_PARAMETERS - 1
    assert result.grad_norm == pytest.approx(expected_norm(change), rel=1e-6)


def test_plain_optimizers_measure_at_the_step() -> None:
    """Edits through .grad.data leave no trace, so tw.optim alone trusts no hook."""
    model = small_net()
    optimizer = tw.optim.SGD(model.parameters(), lr=0.1, clip_norm=1e9)
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    model[0].weight.grad.data.mul_(7)
    optimizer.step()
    change = lambda m: m[0].weight.grad.data.mul_(7)  # noqa: E731
    assert optimizer.outcome.num_hot == 0
    assert optimizer.outcome.norm == pytest.approx(expected_norm(change), rel=1e-6)


@pytest.mark.parametrize("make", [tw.optim.SGD, tw.optim.AdamW])
def test_plain_optimizers_measure_in_backward_on_request(make) -> None:  # type: ignore[no-untyped-def]
    x, y = batches(1)[0]
    outcomes = []
    for measure in ("step", "backward"):
        model = small_net()
        optimizer = make(model.parameters(), lr=0.1, clip_norm=0.1, measure=measure)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        outcomes.append((optimizer.outcome.norm, bits(model)))
        assert optimizer.outcome.num_hot == (NUM_PARAMETERS if measure == "backward" else 0)
    assert outcomes[0] == outcomes[1]
    with pytest.raises(ValueError, match=r"measure: expected one of .*, got 'forward'"):
        make(small_net().parameters(), lr=0.1, measure="forward")


def test_parameters_used_twice_keep_the_last_arrival() -> None:
    layer = nn.Linear(4, 4)
    with tw.Engine(layer, tw.SGD(lr=0.1)) as engine:
        x = torch.randn(2, 4)
        engine.backward(engine(engine(x)).square().mean())
        expected = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
        assert engine.step().grad_norm == pytest.approx(expected, rel=1e-6)


def test_two_backwards_into_one_gradient() -> None:
    layer = nn.Linear(4, 4)
    with tw.Engine(layer, tw.SGD(lr=0.1)) as engine:
        layer(torch.randn(2, 4)).sum().backward()
        layer(torch.randn(2, 4)).sum().backward()  # accumulates in place
        expected = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
        assert engine.step().grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, recompute: bool) -> torch.Tensor:
            if recompute:
                return self.second(checkpoint(self.first, x, use_reentrant=use_reentrant).relu())
            return self.second(self.first(x).relu())

    outcomes = []
    for recompute in (False, True):
        net = Net()
        with tw.Engine(net, tw.SGD(lr=0.1), clip_norm=0.01) as engine:
            torch.manual_seed(1)
            x = torch.randn(2, 4, requires_grad=True)
            outcomes.append((engine.step(engine(x, recompute).sum()).grad_norm, bits(net)))
    assert outcomes[0] == outcomes[1]


def test_gradients_from_autograd_grad_are_measured_at_the_step() -> None:
    layer = nn.Linear(4, 4)
    with tw.Engine(layer, tw.SGD(lr=0.1)) as engine:
        gradients = torch.autograd.grad(layer(torch.randn(2, 4)).sum(), list(layer.parameters()))
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            parameter.grad = gradient
        result = engine.step()
    assert result.num_hot == 0 and result.applied


def test_only_the_last_microbatch_is_measured() -> None:
    model = small_net()
    with tw.Engine(model, tw.SGD(lr=0.1), accumulate=2) as engine:
        for x, y in batches(2):
            result = engine.step(F.cross_entropy(engine(x), y))
    assert result.num_hot == NUM_PARAMETERS
    model = small_net()
    with tw.Engine(model, tw.SGD(lr=0.1), accumulate=3) as engine:
        for x, y in batches(2):
            engine.step(F.cross_entropy(engine(x), y))
        assert engine.flush().num_hot == 0  # the third never came


def test_backward_on_another_thread() -> None:
    import threading

    model = small_net()
    x, y = batches(1)[0]
    with tw.Engine(model, tw.SGD(lr=0.1)) as engine:
        loss = F.cross_entropy(engine(x), y)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        result = engine.step()
    assert result.grad_norm == pytest.approx(expected_norm(), rel=1e-6)


def test_large_gradients_on_two_threads_give_the_bits_of_one() -> None:
    norms = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            layer = nn.Linear(700, 700)  # above the size from which a hook uses the pool
            with tw.Engine(layer, tw.SGD(lr=0.1)) as engine:
                engine.backward((layer.weight * torch.randn(700, 700)).sum())
                norms.add(engine.step().grad_norm)
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1


def test_compiled_autograd_takes_all_gradients_at_the_step() -> None:
    from torch._dynamo import compiled_autograd

    ours, theirs = small_net(), small_net()
    x, y = batches(1)[0]
    with tw.Engine(ours, tw.SGD(lr=0.1)) as engine, tw.Engine(theirs, tw.SGD(lr=0.1)) as reference:
        with compiled_autograd._enable(torch.compile(backend="eager")):
            result = engine.step(F.cross_entropy(engine(x), y))
        expected = reference.step(F.cross_entropy(reference(x), y))
        assert result.num_hot == 0
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        # Back to hot afterwards.
        assert engine.step(F.cross_entropy(engine(x), y)).num_hot == NUM_PARAMETERS


def test_hooks_are_gone_after_close() -> None:
    model = small_net()
    engine = tw.Engine(model, tw.SGD(lr=0.1))
    x, y = batches(1)[0]
    loss = F.cross_entropy(engine(x), y)
    engine.close()
    loss.backward()  # the graph outlived the engine
    assert all(parameter.grad is not None for parameter in model.parameters())
