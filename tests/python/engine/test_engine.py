"""The Engine's loop against the same loop in plain torch."""

from __future__ import annotations

import copy
import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, bits, small_net, twins
from torch import nn

import tradewind as tw


def torch_loop(model: nn.Module, data: list, *, lr: float, clip_norm: float | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_trains_as_a_plain_loop_does(clip_norm: float | None) -> None:
    ours, theirs = twins()
    data = batches(12)
    expected = torch_loop(theirs, data, lr=1e-3, clip_norm=clip_norm)
    with tw.Engine(ours, tw.AdamW(lr=1e-3), clip_norm=clip_norm) as engine:
        losses = [
            engine.step(F.cross_entropy(engine(x), y)).loss
            for x, y in engine.batches(data, progress="off")
        ]
    # Same formulas in another order of operations: some float32 ulp per step.
    assert losses == pytest.approx(expected, rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_result_has_the_norm_before_clipping() -> None:
    ours, theirs = twins()
    (x, y), *_ = batches(1)
    F.cross_entropy(theirs(x), y).backward()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01).item()
    with tw.Engine(ours, tw.SGD(lr=0.1), clip_norm=0.01) as engine:
        result = engine.step(F.cross_entropy(engine(x), y))
    assert result.applied and not result.vetoed and result.step == 1
    assert result.grad_norm == pytest.approx(expected, rel=1e-6)
    assert result.clip_factor == pytest.approx(0.01 / (expected + 1e-6), rel=1e-6)
    assert result.num_hot == 5  # every gradient was measured in backward


def test_accumulation_equals_one_batch_of_the_microbatches_mean() -> None:
    model = nn.Linear(5, 3)
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    with tw.Engine(model, tw.SGD(lr=0.1), accumulate=4) as engine:
        results = [
            engine.step(F.mse_loss(engine(a), b))
            for a, b in zip(x.split(2), y.split(2), strict=True)
        ]
    assert [result.applied for result in results] == [False, False, False, True]
    assert [result.step for result in results] == [1, 1, 1, 1]
    assert math.isnan(results[0].grad_norm)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss = F.mse_loss(twin(x), y)
    loss.backward()
    optimizer.step()
    assert results[-1].loss == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_short_last_group_is_divided_by_its_own_count() -> None:
    model, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    data = [(torch.randn(2, 5), torch.randn(2, 3)) for _ in range(5)]
    with tw.Engine(model, tw.SGD(lr=0.1), accumulate=3) as engine:
        for x, y in engine.batches(data, progress="off"):
            engine.step(F.mse_loss(engine(x), y))
        assert engine.num_steps == 2
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for group in (data[:3], data[3:]):
        optimizer.zero_grad()
        (sum(F.mse_loss(twin(x), y) for x, y in group) / len(group)).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_backward_and_step_may_be_called_apart() -> None:
    ours, theirs = twins()
    (x, y), *_ = batches(1)
    with tw.Engine(ours, tw.SGD(lr=0.1)) as engine, tw.Engine(theirs, tw.SGD(lr=0.1)) as other:
        engine.backward(F.cross_entropy(engine(x), y))
        assert engine.step().applied
        F.cross_entropy(theirs(x), y).backward()  # plain torch's backward is taken as well
        assert other.step().applied
    assert bits(ours) == bits(theirs)


def test_gradients_are_released_after_the_update() -> None:
    with tw.Engine(small_net(), tw.SGD(lr=0.1)) as engine:
        (x, y), *_ = batches(1)
        engine.step(F.cross_entropy(engine(x), y))
        assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_non_finite_gradients_veto_the_update() -> None:
    model = small_net()
    data = batches(3)
    with tw.Engine(model, tw.AdamW(lr=1e-3), clip_norm=1.0) as engine:
        x, y = data[0]
        engine.step(F.cross_entropy(engine(x), y))
        before = bits(model)
        state = copy.deepcopy(engine.optimizer.state_dict()["state"])
        output = engine(data[1][0])  # moves batch norm's buffers, as any forward does
        names = [name for name, _ in model.named_parameters()]
        with pytest.warns(RuntimeWarning, match=r"step 2: the gradient of '0\.weight'.*skipped"):
            result = engine.step(output.mean() * float("inf"))
        assert result.vetoed and not result.applied
        assert result.num_nonfinite > 0 and result.first_nonfinite == "0.weight"
        after = bits(model)
        assert all(after[name] == before[name] for name in names)
        for index, entry in engine.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, state[index][name])
        assert engine.step(F.cross_entropy(engine(x), y)).applied


def test_one_nan_is_found_and_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with tw.Engine(model, tw.SGD(lr=0.1)) as engine:
        engine.backward(engine(torch.randn(2, 4)).mean())
        model[1].bias.grad[2] = float("nan")
        with pytest.warns(RuntimeWarning, match="1 NaN or infinite"):
            result = engine.step()
    assert (result.num_nonfinite, result.first_nonfinite) == (1, "1.bias")


def test_autocast_keeps_float32_outside() -> None:
    seen: list[torch.dtype] = []
    model = small_net()
    model[4].register_forward_hook(lambda *arguments: seen.append(arguments[2].dtype))
    with tw.Engine(model, tw.AdamW(lr=1e-3), precision="amp-bf16") as engine:
        (x, y), *_ = batches(1)
        output = engine(x)
        assert seen == [torch.bfloat16]
        assert output.dtype == torch.float32
        assert engine.step(F.cross_entropy(output, y)).applied
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_autocast_trains_as_torch_autocast_does() -> None:
    ours, theirs = twins()
    data = batches(5)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    with tw.Engine(ours, tw.AdamW(lr=1e-3), precision="amp-bf16") as engine:
        for x, y in data:
            engine.step(F.cross_entropy(engine(x), y))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = theirs(x)
            F.cross_entropy(output.float(), y).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_outputs_of_any_structure_are_widened() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"a": self.layer(x), "b": [self.layer(x), "text"], "c": x.argmax()}

    with tw.Engine(Many(), tw.SGD(lr=0.1), precision="amp-bf16") as engine:
        output = engine(torch.randn(2, 3))
    assert output["a"].dtype == output["b"][0].dtype == torch.float32
    assert output["b"][1] == "text" and output["c"].dtype == torch.int64


def test_learning_rate_schedulers_drive_the_engine() -> None:
    ours, theirs = twins()
    data = batches(6)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    with tw.Engine(ours, tw.AdamW(lr=1e-2)) as engine:
        mine = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 1e-2, total_steps=10)
        for x, y in data:
            engine.step(F.cross_entropy(engine(x), y))
            mine.step()
            optimizer.zero_grad()
            F.cross_entropy(theirs(x), y).backward()
            optimizer.step()
            schedule.step()
        assert mine.get_last_lr() == schedule.get_last_lr()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_compiled_model_trains() -> None:
    ours, theirs = twins()
    data = batches(3)
    with tw.Engine(torch.compile(ours, backend="aot_eager"), tw.AdamW(lr=1e-3)) as engine:
        for x, y in data:
            result = engine.step(F.cross_entropy(engine(x), y))
        names = [group["param_names"] for group in engine.optimizer.param_groups]
    assert result.num_hot == 5
    assert names == [[name for name, _ in theirs.named_parameters()]]  # no _orig_mod.
    torch_loop(theirs, data, lr=1e-3, clip_norm=None)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_evaluation_leaves_no_trace() -> None:
    model = small_net()
    with tw.Engine(model, tw.SGD(lr=0.1)) as engine:
        before = bits(model)
        assert engine.eval() is engine and not model.training
        with torch.no_grad():
            engine(batches(1)[0][0])
        assert engine.train().model.training
        assert bits(model) == before


def test_several_engines_in_one_process() -> None:
    first, second = tw.Engine(small_net(0), tw.SGD(lr=0.1)), tw.Engine(small_net(1), tw.AdamW())
    for x, y in batches(2):
        assert first.step(F.cross_entropy(first(x), y)).applied
        assert second.step(F.cross_entropy(second(x), y)).applied
    first.close()
    second.close()


def test_state_dict_continues_bit_for_bit() -> None:
    data = batches(8)

    def run(engine: tw.Engine, part: list) -> None:
        for x, y in part:
            engine.step(F.cross_entropy(engine(x), y))
            engine_schedule[engine].step()

    engine_schedule: dict[tw.Engine, torch.optim.lr_scheduler.LRScheduler] = {}

    def make() -> tw.Engine:
        engine = tw.Engine(small_net(), tw.AdamW(lr=1e-3), clip_norm=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.9)
        engine.track(schedule=schedule)
        engine_schedule[engine] = schedule
        return engine

    whole, first, second = make(), make(), make()
    run(whole, data)
    run(first, data[:3])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, data[3:])
    assert second.num_steps == whole.num_steps == 8
    assert bits(second.model) == bits(whole.model)


def test_state_waits_for_what_is_tracked_later() -> None:
    first, second = tw.Engine(small_net(), tw.SGD(lr=0.1)), tw.Engine(small_net(), tw.SGD(lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(first.optimizer, 5)
    first.track(schedule=schedule)
    for _ in range(3):
        first.optimizer.step()
        schedule.step()
    second.load_state_dict(first.state_dict())
    late = torch.optim.lr_scheduler.StepLR(second.optimizer, 5)
    assert late.last_epoch == 0
    second.track(schedule=late)
    assert late.last_epoch == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("optimizer"), "expected the parts.*'optimizer'"),
        (lambda state: state["tracked"].clear(), "no state for the tracked schedule"),
    ],
)
def test_wrong_state_loads_nothing(change, message: str) -> None:  # type: ignore[no-untyped-def]
    with tw.Engine(small_net(0), tw.SGD(lr=0.1)) as engine:
        engine.track(schedule=torch.optim.lr_scheduler.StepLR(engine.optimizer, 5))
        state = copy.deepcopy(engine.state_dict())
        state["model"]["0.weight"].add_(1)
        before = bits(engine.model)
        change(state)
        with pytest.raises(ValueError, match=message):
            engine.load_state_dict(state)
        assert bits(engine.model) == before


def test_track_wants_a_state() -> None:
    with (
        tw.Engine(small_net(), tw.SGD(lr=0.1)) as engine,
        pytest.raises(TypeError, match=r"track\(ema=\.\.\.\).*state_dict.*got int"),
    ):
        engine.track(ema=3)


def test_closed_engine_says_so_and_leaves_the_model_usable() -> None:
    model = small_net()
    engine = tw.Engine(model, tw.SGD(lr=0.1))
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step(torch.zeros((), requires_grad=True))
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    with tw.Engine(model, tw.SGD(lr=0.1)) as again:
        assert again.step().applied


def test_optimizer_made_before_adoption_keeps_its_groups() -> None:
    model = small_net()
    optimizer = tw.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[4].parameters()}], lr=0.1
    )
    with tw.Engine(model, optimizer) as engine:
        assert engine.optimizer is optimizer
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
        x, y = batches(1)[0]
        norm_weight = model[1].weight.detach().clone()
        engine.step(F.cross_entropy(engine(x), y))
        assert torch.equal(model[1].weight, norm_weight)  # in no group: not updated
        assert model[1].weight.grad is None


class Counted(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def test_batches_come_in_the_loaders_order_and_tell_the_epoch() -> None:
    class Sampler(torch.utils.data.Sampler):
        epochs: ClassVar[list[int]] = []

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(10))

        def __len__(self) -> int:
            return 10

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = torch.utils.data.DataLoader(Counted(), batch_size=4, sampler=Sampler())
    with tw.Engine(nn.Linear(1, 1), tw.SGD(lr=0.0)) as engine:
        seen = [batch.flatten().tolist() for batch in engine.batches(loader, 2, progress="off")]
    assert seen == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert Sampler.epochs == [0, 1]


def test_streams_of_unknown_length() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(torch.arange(6.0).split(1))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    with tw.Engine(nn.Linear(1, 1), tw.SGD(lr=0.0)) as engine:
        sizes = [len(batch) for batch in engine.batches(loader, 2, progress="lines")]
    assert sizes == [4, 2, 4, 2]


def test_leaving_the_loop_early_keeps_what_was_done() -> None:
    with tw.Engine(nn.Linear(1, 1), tw.SGD(lr=0.1), accumulate=2) as engine:
        for index, x in enumerate(engine.batches([torch.ones(1, 1)] * 8, progress="off")):
            engine.step(engine(x).mean())
            if index == 4:
                break
        assert engine.num_steps == 2
        assert engine.step(engine(x).mean()).applied  # completes the group of the fifth


def test_nothing_synchronises_or_allocates_gradients_twice() -> None:
    """The gradient that autograd made is read in place: no copy, no view into a zeroed arena."""
    model = nn.Linear(64, 64)
    with tw.Engine(model, tw.SGD(lr=0.1)) as engine:
        engine.backward(engine(torch.randn(2, 64)).mean())
        gradient = model.weight.grad
        version, address = gradient._version, gradient.data_ptr()
        engine.step()
        assert (gradient._version, gradient.data_ptr()) == (version, address)
