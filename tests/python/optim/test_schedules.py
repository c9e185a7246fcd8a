"""Schedules against closed forms in float64 and torch's schedulers, on the host and the device."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import tradewind as tw
from tradewind.optim import (
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    batch_scaling,
    scale_adam,
    scale_lr,
    schedules,
)
from tradewind.optim.scheduler import Schedule

ROOT = Path(__file__).parents[3]
WARMUP, TOTAL, DECAY = 7, 40, 12
STEPS = 50  # past the end
FROM, FINAL = 0.25, 0.1
BASES = (0.3, 0.02)
Make = Callable[..., Schedule]

# name: the class, its arguments, and the factor of the way down for a part in [0, 1] of its time.
SCHEDULES: dict[str, tuple[Make, dict[str, Any], Callable[[float], float]]] = {
    "cosine": (WarmupCosine, {}, lambda p: FINAL + (1 - FINAL) * (1 + math.cos(math.pi * p)) / 2),
    "linear": (WarmupLinear, {}, lambda p: 1 - (1 - FINAL) * p),
    "stable, linear": (
        WarmupStableDecay,
        {"decay_steps": DECAY, "decay": "linear"},
        lambda p: 1 - (1 - FINAL) * p,
    ),
    "stable, 1-sqrt": (
        WarmupStableDecay,
        {"decay_steps": DECAY},
        lambda p: FINAL + (1 - FINAL) * (1 - math.sqrt(p)),
    ),
}
COMMON = {
    "warmup_steps": WARMUP,
    "total_steps": TOTAL,
    "warmup_from": FROM,
    "final_fraction": FINAL,
}


@pytest.fixture(autouse=True)
def optimizer_steps_do_not_matter_here() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def make_optimizer(bases: tuple[Any, ...] = BASES, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [Parameter(torch.ones(3))], "lr": base} for base in bases]
    return tw.optim.AdamW(groups, **options)


def make(name: str, optimizer: torch.optim.Optimizer, **options: Any) -> Schedule:
    kind, arguments, _ = SCHEDULES[name]
    return kind(optimizer, **{**COMMON, **arguments, **options})


def oracle(name: str, step: int) -> float:
    """The factor, written down a second time, by cases."""
    _, arguments, down = SCHEDULES[name]
    start = TOTAL - arguments.get("decay_steps", TOTAL - WARMUP)
    if step < WARMUP:
        return FROM + (1 - FROM) * step / WARMUP
    if step < start:
        return 1.0
    return FINAL if step >= TOTAL else down((step - start) / (TOTAL - start))


def held(optimizer: torch.optim.Optimizer, option: str = "lr") -> list[float]:
    return [float(group[option]) for group in optimizer.param_groups]


def walk(
    scheduler: Any, optimizer: torch.optim.Optimizer, steps: int, option: str = "lr"
) -> list[list[float]]:
    """The values in the groups before each of `steps` steps."""
    values = []
    for _ in range(steps):
        values.append(held(optimizer, option))
        scheduler.step()
    return values


# float64 against float64: a handful of roundings of 1.1e-16 each.
def close(values: list[list[float]], expected: list[list[float]]) -> bool:
    return values == [pytest.approx(row, rel=2e-15, abs=1e-17) for row in expected]


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_closed_form(name: str, option: str) -> None:
    optimizer = make_optimizer()
    for group, value in zip(optimizer.param_groups, BASES, strict=True):
        group[option] = value
    scheduler = make(name, optimizer, option=option)
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    values = walk(scheduler, optimizer, STEPS, option)
    assert close(values, [[base * oracle(name, step) for base in BASES] for step in range(STEPS)])
    assert values[WARMUP] == list(BASES)  # exact where the factor is 1
    assert values[TOTAL] == values[-1] == [base * FINAL for base in BASES]
    assert scheduler.get_last_lr() == scheduler.get_last_value() == held(optimizer, option)
    assert scheduler.last_epoch == STEPS


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_left_of_zero_fractions(name: str) -> None:
    optimizer = make_optimizer()
    values = walk(make(name, optimizer, warmup_from=0, final_fraction=0), optimizer, STEPS)
    assert values[0] == values[TOTAL] == values[-1] == [0.0, 0.0]
    assert all(rate > 0 for row in values[1:TOTAL] for rate in row)


def test_without_warmup_the_first_value_is_the_base() -> None:
    optimizer = make_optimizer()
    WarmupCosine(optimizer, warmup_steps=0, total_steps=1)
    assert held(optimizer) == list(BASES)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_same_as_torchs_sequence(name: str) -> None:
    ours, theirs = make_optimizer(), make_optimizer()
    rest = TOTAL - WARMUP
    with warnings.catch_warnings():  # of SequentialLR's, about its own call
        warnings.simplefilter("ignore")
        # CosineAnnealingLR has one absolute minimum for all groups, so 0 here.
        final = 0.0 if name == "cosine" else FINAL
        down = {
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(theirs, rest),
            "linear": lambda: lr_scheduler.LinearLR(theirs, 1.0, FINAL, rest),
        }[name]()
        up = lr_scheduler.LinearLR(theirs, FROM, 1.0, WARMUP)
        torchs = lr_scheduler.SequentialLR(theirs, [up, down], [WARMUP])
    scheduler = make(name, ours, final_fraction=final)
    for step in range(TOTAL + 1):
        # torch's chainable forms round at every step; the error grows with their number.
        assert held(ours) == pytest.approx(held(theirs), rel=1e-12, abs=1e-16), step
        scheduler.step()
        torchs.step()


def test_in_torchs_sequence_and_chain() -> None:
    optimizer = make_optimizer(weight_decay=0.5)
    first = WarmupLinear(optimizer, warmup_steps=2, total_steps=10)
    second = WarmupCosine(optimizer, warmup_steps=3, total_steps=20, warmup_from=0.5)
    decay = WarmupLinear(
        optimizer, warmup_steps=0, total_steps=10, final_fraction=3.0, option="weight_decay"
    )
    sequence = lr_scheduler.SequentialLR(optimizer, [first, second], [5])
    chain = lr_scheduler.ChainedScheduler([sequence, decay])
    for step in range(12):
        part = step / 2 if step < 2 else 1 - (step - 2) / 8
        if step >= 5:
            ramp = (step - 5) / 3
            part = 0.5 + 0.5 * ramp if ramp < 1 else (1 + math.cos(math.pi * (step - 8) / 17)) / 2
        assert held(optimizer) == pytest.approx([base * part for base in BASES], rel=1e-14)
        grown = 0.5 * (1 + 2 * min(step / 10, 1))
        assert held(optimizer, "weight_decay") == pytest.approx([grown] * 2, rel=1e-14)
        chain.step()
    assert chain.get_last_lr() == held(optimizer)


def test_other_options_leave_the_learning_rate_alone() -> None:
    optimizer = make_optimizer(weight_decay=0.5)
    scheduler = WarmupCosine(optimizer, warmup_steps=2, total_steps=9, option="weight_decay")
    for group in optimizer.param_groups:
        assert "initial_lr" not in group and group["initial_weight_decay"] == 0.5
        group["lr"] = 0.7
    scheduler.step()
    assert held(optimizer) == [0.7, 0.7] and held(optimizer, "weight_decay") == [0.25, 0.25]


def test_drives_the_update() -> None:
    optimizer = tw.optim.SGD([Parameter(torch.zeros(1))], lr=1.0)
    scheduler = WarmupLinear(optimizer, warmup_steps=2, total_steps=4)
    [parameter] = optimizer.param_groups[0]["params"]
    for _ in range(6):
        parameter.grad = -torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert parameter.item() == 0.0 + 0.5 + 1.0 + 0.5


# --- resuming ---------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
@pytest.mark.parametrize("at", [0, 3, 20, 45])
def test_a_resume_resets_nothing(order: str, capturable: bool, option: str, at: int) -> None:
    """Whether the scheduler is made before or after the optimizer's state is loaded."""
    options = {"option": option, "capturable": capturable}
    whole = make_optimizer(weight_decay=0.1)
    expected = walk(make("cosine", whole, **options), whole, STEPS, option)

    first = make_optimizer(weight_decay=0.1)
    scheduler = make("cosine", first, **options)
    walk(scheduler, first, at)
    states = through_a_file({"o": first.state_dict(), "s": scheduler.state_dict()})

    second = make_optimizer(bases=(9.0, 9.0), weight_decay=9.0)
    if order == "before":
        resumed = make("cosine", second, **options)
    second.load_state_dict(states["o"])
    if order == "after":
        resumed = make("cosine", second, **options)
    resumed.load_state_dict(states["s"])
    assert resumed.last_epoch == at
    assert walk(resumed, second, STEPS - at, option) == expected[at:]


def test_last_epoch_continues_under_another_plan() -> None:
    optimizer = make_optimizer()
    plan = {"warmup_steps": 2, "decay_steps": 5, "decay": "linear"}
    scheduler = WarmupStableDecay(optimizer, total_steps=1000, **plan)  # type: ignore[arg-type]
    walk(scheduler, optimizer, 30)
    epoch = scheduler.last_epoch
    longer = WarmupStableDecay(optimizer, total_steps=35, last_epoch=epoch - 1, **plan)  # type: ignore[arg-type]
    assert longer.last_epoch == 30
    values = walk(longer, optimizer, 6)
    assert close(values, [[base * (1 - k / 5) for base in BASES] for k in range(6)])


@pytest.mark.parametrize("at", [3, 5, 9])
def test_a_sequence_resumes(at: int) -> None:
    def start() -> tuple[torch.optim.Optimizer, lr_scheduler.SequentialLR]:
        optimizer = make_optimizer()
        parts = [
            WarmupCosine(optimizer, warmup_steps=w, total_steps=20, warmup_from=0.1) for w in (2, 3)
        ]
        return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [5])  # type: ignore[arg-type]

    whole, scheduler = start()
    expected = walk(scheduler, whole, 15)
    first, scheduler = start()
    walk(scheduler, first, at)
    second, resumed = start()
    resumed.load_state_dict(scheduler.state_dict())
    assert walk(resumed, second, 15 - at) == expected[at:]


def test_a_tracked_schedule_resumes_with_the_engine() -> None:
    def start() -> tuple[tw.Engine, Schedule]:
        engine = tw.Engine(torch.nn.Linear(2, 1), tw.SGD(lr=0.5))
        return engine, WarmupLinear(engine.optimizer, warmup_steps=4, total_steps=20)

    first, scheduler = start()
    first.track(schedule=scheduler)
    walk(scheduler, first.optimizer, 6)
    second, late = start()
    second.load_state_dict(first.state_dict())
    second.track(schedule=late)
    assert held(second.optimizer) == held(first.optimizer) == [0.5 * (1 - 2 / 16)]
    for engine in (first, second):
        engine.close()


def test_state_of_another_plan_is_refused() -> None:
    optimizer = make_optimizer()
    scheduler = make("cosine", optimizer)
    walk(scheduler, optimizer, 5)
    state = scheduler.state_dict()
    for other, message in [
        (
            make("cosine", make_optimizer(), total_steps=99),
            r"total_steps 99, got 40;.*last_epoch=4 ",
        ),
        (make("linear", make_optimizer()), "decay 'linear', got 'cosine'"),
        (make("cosine", make_optimizer(), option="weight_decay"), "option 'weight_decay', got"),
        (make("cosine", make_optimizer((1.0,))), "param groups: expected 2, as in the state dict"),
    ]:
        now = held(other.optimizer)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert held(other.optimizer) == now and other.last_epoch == 0
    assert make("cosine", optimizer, total_steps=99, last_epoch=4).last_epoch == 5  # as advised
    with pytest.raises(ValueError, match=r"expected one of WarmupCosine\.state_dict"):
        scheduler.load_state_dict(lr_scheduler.StepLR(make_optimizer(), 3).state_dict())


# --- on the device ----------------------------------------------------------------------------


class NoWayBack(TorchDispatchMode):
    """Fails on whatever is not in place or into given memory: reads by the host and allocations."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, overload = func._schema.name, func._overloadname
        in_place = name.endswith("_") or overload.endswith("out") or name == "aten::view"
        assert in_place, f"{name}.{overload} in a step on the device"
        return func(*args, **(kwargs or {}))


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(base, dtype=dtype, device=device) for base in BASES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", ["tensors", "capturable"])
def test_the_device_counts_for_itself(name: str, how: str) -> None:
    optimizer = make_optimizer(tensors() if how == "tensors" else BASES)
    scheduler = make(name, optimizer, **({} if how == "tensors" else {"capturable": True}))
    bases = [float(base) for base in tensors()] if how == "tensors" else BASES
    rates = [group["lr"] for group in optimizer.param_groups]
    places = [rate.data_ptr() for rate in rates]
    for step in range(STEPS):
        expected = [base * oracle(name, step) for base in bases]
        # float64 throughout, rounded once to float32: half of its 1.2e-7.
        assert held(optimizer) == pytest.approx(expected, rel=6e-8, abs=0)
        with NoWayBack():
            scheduler.step()
        for group, rate, place in zip(optimizer.param_groups, rates, places, strict=True):
            assert group["lr"] is rate and rate.data_ptr() == place
            assert rate.dtype == torch.float32
    assert scheduler.last_epoch == STEPS


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_device_and_host_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    host, device = make_optimizer(tensors(dtype)), make_optimizer(tensors(dtype))
    on_host = make(name, host, capturable=False)
    on_device = make(name, device)
    # Both multiply in float64 and round once.
    assert walk(on_device, device, STEPS) == walk(on_host, host, STEPS)


def test_the_mode_that_watches_the_device_sees_reads() -> None:
    rate = torch.tensor(1.0)
    with NoWayBack(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        rate.item()


@pytest.mark.parametrize("order", ["os", "so", "o"])
def test_loading_keeps_the_tensors(order: str) -> None:
    """As a captured graph knows their addresses; torch's load_state_dict puts copies in."""
    optimizer = make_optimizer(tensors())
    scheduler = make("cosine", optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    walk(scheduler, optimizer, 10)
    states = through_a_file({"o": optimizer.state_dict(), "s": scheduler.state_dict()})
    expected = walk(scheduler, optimizer, 10)
    for part in order:
        {"o": optimizer, "s": scheduler}[part].load_state_dict(states[part])
    scheduler.step()
    if "s" in order:
        assert held(optimizer) == expected[1]
    assert all(g["lr"] is rate for g, rate in zip(optimizer.param_groups, rates, strict=True))


def test_copies_are_handed_out() -> None:
    optimizer = make_optimizer(tensors())
    scheduler = make("cosine", optimizer)
    last = scheduler.get_last_lr()
    assert all(isinstance(rate, torch.Tensor) for rate in last)
    expected = held(optimizer)
    scheduler.step()
    assert [float(rate) for rate in last] == expected != held(optimizer)


def test_capturable_takes_the_parameters_device() -> None:
    parameters = [Parameter(torch.ones(2, device="meta"))]
    wrong = torch.optim.SGD(parameters, lr=torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"lr: expected a tensor on meta, .* got one on cpu"):
        make("cosine", wrong, capturable=True)
    make("cosine", wrong)  # torch's optimizers take a rate on the host


def test_captured_in_a_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU answers here")
    groups = [{"params": [Parameter(torch.ones(3, device="cuda"))], "lr": b} for b in BASES]
    optimizer = torch.optim.AdamW(groups, capturable=True)
    scheduler = make("cosine", optimizer, capturable=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scheduler.step()
    for step in range(STEPS):
        expected = [base * oracle("cosine", step) for base in BASES]
        assert held(optimizer) == pytest.approx(expected, rel=6e-8, abs=0)  # one float32 rounding
        graph.replay()
    assert scheduler.last_epoch == STEPS
    assert scheduler.state_dict()["last_epoch"] == STEPS


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 0}, "total_steps: expected an integer >= 1, got 0; count optimizer steps"),
        ({"total_steps": 9.5}, "total_steps: expected an integer >= 1, got 9.5"),
        ({"total_steps": True}, "total_steps: expected an integer"),
        ({"warmup_steps": -1}, "warmup_steps: expected an integer from 0 to 39, got -1"),
        ({"warmup_steps": 40}, "warmup_steps: .* from 0 to 39, got 40; the warm-up must end"),
        ({"warmup_from": -0.1}, r"warmup_from: expected a number in \[0, inf\), got -0.1"),
        ({"final_fraction": math.nan}, "final_fraction: expected a number"),
        ({"final_fraction": math.inf}, "final_fraction: expected a number"),
        ({"final_fraction": "all"}, "final_fraction: expected a number"),
        ({"option": "lrr"}, "option: expected a numeric option of .*lr, .*got 'lrr'"),
        ({"option": "betas"}, r"option: .*got 'betas', which is \(0.9, 0.999\)"),
        ({"option": "amsgrad"}, "option: expected a numeric option"),
        ({"last_epoch": -2}, "last_epoch: expected an integer >= -1, got -2"),
        ({"last_epoch": 4}, "last_epoch: expected initial_lr in param group 0, .* load the opt"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    optimizer = make_optimizer()
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=message):
        make("cosine", optimizer, **options)
    assert optimizer.param_groups == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay_steps": 0}, "decay_steps: expected an integer >= 1, got 0"),
        ({"decay_steps": None}, "decay_steps: expected an integer >= 1, got None"),
        ({"decay_steps": 34}, "decay_steps: .* from 1 to 33, got 34; warm-up and decay must fit"),
        ({"decay": "sqrt"}, "decay: expected one of cosine, linear, 1-sqrt, got 'sqrt'"),
    ],
)
def test_bad_decays(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("stable, linear", make_optimizer(), **options)


def test_bad_optimizers() -> None:
    with pytest.raises(TypeError, match="optimizer: expected an Optimizer, got Linear"):
        make("cosine", torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    mixed = make_optimizer((0.1, torch.tensor(0.1)))
    with pytest.raises(ValueError, match="lr: expected tensors in all param groups or in none"):
        make("cosine", mixed)
    make("cosine", mixed, capturable=False)
    grown = make_optimizer()
    scheduler = make("cosine", grown)
    grown.add_param_group({"params": [Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"param groups: expected 2, .*got 3; add all groups"):
        scheduler.step()


# --- other batch sizes ------------------------------------------------------------------------


def test_scaling_rules() -> None:
    assert scale_lr(0.1, batch=8192, base_batch=256) == pytest.approx(3.2, rel=1e-15)
    assert scale_lr(0.1, batch=64, base_batch=256, rule="sqrt") == 0.05
    # By hand: kappa = 4.
    scaled = scale_adam(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, batch=1024, base_batch=256)
    assert scaled["lr"] == 2e-3 and scaled["eps"] == 5e-9
    assert scaled["betas"] == pytest.approx((0.6, 0.96), rel=1e-15)
    tw.optim.AdamW([Parameter(torch.ones(1))], **scaled)


def test_scaling_adam_keeps_the_averages_in_samples() -> None:
    """1 / (1 - beta) steps of `batch` samples: as many samples as before, up and down."""
    for batch, index in itertools.product((16, 100, 400), (0, 1)):
        betas = scale_adam(lr=1.0, betas=(0.8, 0.9), eps=1.0, batch=batch, base_batch=100)["betas"]
        assert batch / (1 - betas[index]) == pytest.approx(100 / (0.2, 0.1)[index], rel=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scale_lr(-1, batch=1, base_batch=1), "lr: expected"),
        (lambda: scale_lr(1, batch=0, base_batch=1), "batch: expected a number of samples above 0"),
        (lambda: scale_lr(1, batch=1, base_batch=-2), "base_batch: expected"),
        (lambda: scale_lr(1, batch=math.nan, base_batch=1), "batch: expected a number"),
        (lambda: scale_lr(1, batch=1, base_batch=1, rule="cube"), "rule: .*'sqrt'.*got 'cube'"),
        (lambda: adam(betas=(0.9, 1.0)), r"betas\[1\]: expected"),
        (lambda: adam(betas=0.9), "betas: expected two numbers"),
        (lambda: adam(eps=-1.0), "eps: expected"),
        (lambda: adam(lr=-1.0), "lr: expected"),
        (lambda: adam(batch=41), r"batch: expected at most base_batch / \(1 - betas\[0\]\) = 40"),
    ],
)
def test_bad_scaling(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def adam(**changes: Any) -> Any:
    options = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "batch": 8, "base_batch": 4}
    return scale_adam(**{**options, **changes})


# --- the page ---------------------------------------------------------------------------------


def test_the_page_runs() -> None:
    page = (ROOT / "docs/schedules.md").read_text()
    blocks = page.split("```python\n")[1:]
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block.split("```")[0], namespace)
    for name in (*schedules.__all__, *batch_scaling.__all__):
        assert name in page
