"""Schedules: a factor of the base value for each step, written into an option of the param groups.

A `Curve` is a function from the step to that factor. `Schedule` is the one scheduler around it, on
the host or on the device; `WarmupCosine`, `WarmupLinear` and `WarmupStableDecay` name curves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from tradewind.optim.fused import check_range

__all__ = ["WarmupCosine", "WarmupLinear", "WarmupStableDecay", "scale_adam", "scale_lr"]

Decay = Literal["cosine", "linear", "1-sqrt"]
# How much of the way down is done, given how much of its time has passed.
_DONE: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: (1.0 - math.cos(math.pi * part)) / 2.0,
    "linear": lambda part: part,
    "1-sqrt": math.sqrt,
}


def _check_count(name: str, value: Any, low: int, high: int | None, advice: str) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = low - 1
    if isinstance(value, bool) or count < low or (high is not None and count > high):
        expected = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {expected}, got {value!r}; {advice}")
    return count


def _part(steps: int, of: int) -> float:
    return min(max(steps / of, 0.0), 1.0) if of else 1.0


def _blend(start: float, end: float, part: float) -> float:
    # Unlike start + part * (end - start), this is exact at both ends.
    return start * (1.0 - part) + end * part


@dataclass(frozen=True)
class Curve:
    """Factor after `step` steps: a linear ramp from `warmup_from` to 1 within `warmup_steps`, then
    1, then down to `final_fraction` within the last `decay_steps` of `total_steps`; it stays there.

    Raises ValueError for counts that do not fit into each other and factors that are not finite
    numbers >= 0.
    """

    decay: Decay
    warmup_steps: int
    total_steps: int
    decay_steps: int | None  # None: all that the warm-up leaves
    warmup_from: float
    final_fraction: float

    def __post_init__(self) -> None:
        if self.decay not in _DONE:
            raise ValueError(f"decay: expected one of {', '.join(_DONE)}, got {self.decay!r}")
        advice = "count optimizer steps, for instance epochs * len(loader)"
        total = _check_count("total_steps", self.total_steps, 1, None, advice)
        advice = "the warm-up must end before total_steps"
        warmup = _check_count("warmup_steps", self.warmup_steps, 0, total - 1, advice)
        advice = "warm-up and decay must fit into total_steps"
        decay = total - warmup if self.decay_steps is None else self.decay_steps
        decay = _check_count("decay_steps", decay, 1, total - warmup, advice)
        for name in ("warmup_from", "final_fraction"):
            check_range(name, getattr(self, name), low=0.0, below=math.inf)
            object.__setattr__(self, name, float(getattr(self, name)))
        for name, count in zip(_COUNTS, (warmup, total, decay), strict=True):
            object.__setattr__(self, name, count)

    def __call__(self, step: int) -> float:
        assert self.decay_steps is not None
        up = _part(step, self.warmup_steps)
        down = _part(step - (self.total_steps - self.decay_steps), self.decay_steps)
        return _blend(self.warmup_from, 1.0, up) * _blend(
            1.0, self.final_fraction, _DONE[self.decay](down)
        )


_COUNTS = ("warmup_steps", "total_steps", "decay_steps")


class _Clock:
    """The step count on one device and the factor at it. Moving it asks the host for nothing.

    The factors are a table, so that any curve takes three small kernels and its float64 values are
    the host's own, whatever the device's cosine rounds to. 8 bytes per step of the schedule.
    """

    def __init__(self, factors: torch.Tensor, device: torch.device) -> None:
        self.factors = factors.to(device)
        self.step = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._index = torch.empty_like(self.step)
        self.factor = torch.empty(1, dtype=torch.float64, device=device)

    def move(self, to: int | None) -> None:
        if to is None:
            self.step.add_(1)
        else:
            self.step.fill_(to)
        torch.clamp(self.step, 0, self.factors.numel() - 1, out=self._index)
        torch.index_select(self.factors, 0, self._index, out=self.factor)


class Schedule(LRScheduler):
    """Writes base * curve(step) into `option` of every param group; base is the group's value when
    its first schedule was made, kept in the group as ``initial_<option>``, as torch keeps
    ``initial_lr``. The classes below document the arguments."""

    def __init__(
        self,
        optimizer: Optimizer,
        curve: Curve,
        *,
        option: str = "lr",
        last_epoch: int = -1,
        capturable: bool | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected an Optimizer, got {type(optimizer).__name__}")
        last_epoch = _check_count("last_epoch", last_epoch, -1, None, "-1 starts a schedule")
        self.option, self.curve = option, curve
        self._tensors: list[torch.Tensor] = []  # one per group where the device keeps the count
        self._clocks: dict[torch.device, _Clock] = {}
        groups = optimizer.param_groups
        for index, group in enumerate(groups):
            _check_group(index, group, option, needs_initial=last_epoch >= 0)
        on_device = _is_for_device(groups, option, capturable)
        for group in groups:
            value = group[option]
            group.setdefault(
                self._initial, value.clone() if isinstance(value, torch.Tensor) else value
            )
        if on_device:
            self._move_to_device(groups)
        # torch's constructor wants initial_lr; the schedule of another option leaves none behind.
        borrowed = [group for group in groups if "initial_lr" not in group]
        for group in borrowed:
            group["initial_lr"] = group.get("lr")
        super().__init__(optimizer, last_epoch)
        for group in borrowed:
            del group["initial_lr"]

    @property
    def _initial(self) -> str:
        return f"initial_{self.option}"

    @property
    def last_epoch(self) -> int:
        """Steps taken. With the count on the device, asking waits for the device."""
        for clock in self._clocks.values():
            return int(clock.step.item())
        return self._host_epoch

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        self._host_epoch = value
        for clock in self._clocks.values():
            clock.step.fill_(value)

    def _initial_step(self) -> None:
        self.base_lrs = [float(group[self._initial]) for group in self.optimizer.param_groups]
        super()._initial_step()

    def _move_to_device(self, groups: list[dict[str, Any]]) -> None:
        steps = range(self.curve.total_steps + 1)
        factors = torch.tensor([self.curve(step) for step in steps], dtype=torch.float64)
        for group in groups:
            if not isinstance(group[self.option], torch.Tensor):
                device = group["params"][0].device if group["params"] else None
                group[self.option] = torch.tensor(
                    float(group[self.option]), dtype=torch.float32, device=device
                )
            tensor: torch.Tensor = group[self.option]
            self._tensors.append(tensor)
            if tensor.device not in self._clocks:
                self._clocks[tensor.device] = _Clock(factors, tensor.device)

    # torch's step() and SequentialLR call this one.
    def _update_lr(self, epoch: int | None = None) -> None:
        self._check_number_of_groups(len(self.base_lrs), "when the schedule was made")
        if self._clocks:
            self._update_on_device(epoch)
            return
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._write(self.get_lr())

    @torch.no_grad()
    def _update_on_device(self, epoch: int | None) -> None:
        for clock in self._clocks.values():
            clock.move(epoch)
        for group, tensor, base in zip(
            self.optimizer.param_groups, self._tensors, self.base_lrs, strict=True
        ):
            # optimizer.load_state_dict() puts copies in; a captured graph knows only the first.
            group[self.option] = tensor
            factor = self._clocks[tensor.device].factor
            torch.mul(factor.view(tensor.shape), base, out=tensor)

    @torch.no_grad()
    def _write(self, values: list[float | torch.Tensor]) -> None:
        for index, (group, value) in enumerate(
            zip(self.optimizer.param_groups, values, strict=True)
        ):
            if self._tensors:
                group[self.option] = self._tensors[index]
            if isinstance(group[self.option], torch.Tensor):
                group[self.option].fill_(value)
            else:
                group[self.option] = value
        self._last_lr = values

    def get_lr(self) -> list[float | torch.Tensor]:
        """The values at `last_epoch`, one per group, whatever the groups hold now."""
        factor = self.curve(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The values of `option` last written, one per group: floats, or copies of the tensors."""
        return [tensor.clone() for tensor in self._tensors] if self._tensors else self._last_lr

    get_last_value = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings. With the count on the device, waits for the device.

        ``values`` are those the groups hold now: with several schedules on one option
        (SequentialLR), loading any of them then restores what was in force.
        """
        return {
            "plan": self._plan(),
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": list(self.base_lrs),
            "values": [float(group[self.option]) for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: count, bases and the groups' present values.

        Raises ValueError, with nothing changed, where the state is of another plan (other steps,
        curve or option) or of another number of groups.
        """
        saved, plan = state_dict.get("plan"), self._plan()
        if not isinstance(saved, dict):
            raise ValueError(
                f"state dict: expected one of {type(self).__name__}.state_dict(), got keys "
                f"{sorted(state_dict)}; load it into a scheduler of the class that saved it"
            )
        other = [
            f"{key} {value!r}, got {saved.get(key)!r}"
            for key, value in plan.items()
            if saved.get(key) != value
        ]
        if other:
            raise ValueError(
                f"state dict: expected {'; '.join(other)}; make the schedule with the saved values "
                f"to continue it, or with last_epoch={state_dict['last_epoch'] - 1} to change the "
                "plan from here on"
            )
        self._check_number_of_groups(len(state_dict["values"]), "in the state dict")
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self._write(list(state_dict["values"]))

    def _plan(self) -> dict[str, Any]:
        return {"option": self.option, **asdict(self.curve)}

    def _check_number_of_groups(self, expected: int, when: str) -> None:
        now = len(self.optimizer.param_groups)
        if now != expected:
            raise ValueError(
                f"param groups: expected {expected}, as {when}, got {now}; add all groups to the "
                "optimizer before the schedule is made"
            )


def _check_group(index: int, group: dict[str, Any], option: str, *, needs_initial: bool) -> None:
    if not _is_number(group.get(option)):
        names = [k for k in group if _is_number(group[k]) and not k.startswith("initial_")]
        raise ValueError(
            f"option: expected a numeric option of param group {index} ({', '.join(names)}), got "
            f"{option!r}, which is {group.get(option)!r} there"
        )
    if needs_initial and f"initial_{option}" not in group:
        raise ValueError(
            f"last_epoch: expected initial_{option} in param group {index}, as a schedule leaves "
            "it, got none; load the optimizer's state dict first, or start with last_epoch=-1"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_for_device(groups: list[dict[str, Any]], option: str, capturable: bool | None) -> bool:
    are_tensors = [isinstance(group[option], torch.Tensor) for group in groups]
    if capturable is None:
        if any(are_tensors) and not all(are_tensors):
            raise ValueError(
                f"{option}: expected tensors in all param groups or in none, got both; give "
                "capturable=True to make all of them tensors, or capturable=False to keep them"
            )
        return any(are_tensors)
    for index, group in enumerate(groups):
        value, parameters = group[option], group["params"]
        if capturable and isinstance(value, torch.Tensor) and parameters:
            device = parameters[0].device
            if value.device != device:
                raise ValueError(
                    f"{option}: expected a tensor on {device}, as the parameters of group {index}, "
                    f"got one on {value.device}; move it there, or give a float"
                )
    return bool(capturable)


class _WarmupDecay(Schedule):
    """The constructor of the schedules that are a warm-up and a way down."""

    _decay: ClassVar[Decay]

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_steps: int,
        total_steps: int,
        final_fraction: float = 0.0,
        warmup_from: float = 0.0,
        option: str = "lr",
        last_epoch: int = -1,
        capturable: bool | None = None,
    ) -> None:
        curve = Curve(self._decay, warmup_steps, total_steps, None, warmup_from, final_fraction)
        super().__init__(
            optimizer, curve, option=option, last_epoch=last_epoch, capturable=capturable
        )


class WarmupCosine(_WarmupDecay):
    """Linear warm-up, then a half cosine down to `final_fraction`, which stays.

    A `torch.optim.lr_scheduler.LRScheduler` in closed form: the value depends on the step alone, so
    it takes a resume, `SequentialLR` and `ChainedScheduler`, but does not multiply with another
    schedule of the same option. Warm-up: Goyal et al. 2017 (arXiv:1706.02677); cosine: Loshchilov
    and Hutter 2017 (SGDR, arXiv:1608.03983), without restarts.

    Args:
        optimizer: any `torch.optim.Optimizer`; each group's present value is its base.
        warmup_steps: steps from `warmup_from` to the base; 0 starts at the base.
        total_steps: step at which the decay ends. A step is one call of `step()`, after an update.
        final_fraction: last value, in units of the base; above 1 for an option that shall grow.
        warmup_from: first value, in units of the base. With 0, the first update has lr 0.
        option: the option of the param groups to drive: "lr", "weight_decay", ...
        last_epoch: as in torch: -1 starts; n makes a schedule that has taken n + 1 steps, with the
            bases that the groups keep in ``initial_<option>``.
        capturable: True keeps the option as a tensor on the parameters' device (a float becomes a
            float32 tensor) and the count there too, so that `step()` queues device work alone and
            a captured CUDA graph advances the schedule. None: where the option is a tensor. False:
            the host computes, also where it fills a tensor.

    Raises:
        TypeError: `optimizer` is none.
        ValueError: an argument out of range, an option that is no number, tensors in some groups
            only or (capturable=True) on another device than the parameters.
    """

    _decay = "cosine"


class WarmupLinear(_WarmupDecay):
    """Linear warm-up (Goyal et al. 2017, arXiv:1706.02677), then a line down to `final_fraction`.

    Arguments and errors as for :class:`WarmupCosine`.
    """

    _decay = "linear"


class WarmupStableDecay(Schedule):
    """Linear warm-up, the base, then down to `final_fraction` within the last `decay_steps`.

    Hägele et al. 2024 (arXiv:2405.18392): comparable to a cosine, while the end need not be known
    before the decay begins. Their best decay is "1-sqrt", for a final fraction of 0:
    ``1 - sqrt((step - start) / decay_steps)``.

    Args:
        decay_steps: steps of the decay, from 1 to total_steps - warmup_steps.
        decay: "1-sqrt", "linear" or "cosine".

    Other arguments and errors as for :class:`WarmupCosine`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_steps: int,
        total_steps: int,
        decay_steps: int,
        decay: Decay = "1-sqrt",
        final_fraction: float = 0.0,
        warmup_from: float = 0.0,
        option: str = "lr",
        last_epoch: int = -1,
        capturable: bool | None = None,
    ) -> None:
        advice = "give the number of steps of the decay"
        decay_steps = _check_count("decay_steps", decay_steps, 1, None, advice)
        curve = Curve(decay, warmup_steps, total_steps, decay_steps, warmup_from, final_fraction)
        super().__init__(
            optimizer, curve, option=option, last_epoch=last_epoch, capturable=capturable
        )


# --- other batch sizes ------------------------------------------------------------------------


class AdamOptions(TypedDict):
    """Options of Adam, AdamW and LAMB by their names."""

    lr: float
    betas: tuple[float, float]
    eps: float


def scale_lr(
    lr: float, *, batch: float, base_batch: float, rule: Literal["linear", "sqrt"] = "linear"
) -> float:
    """The learning rate for `batch` samples per update, where `lr` is right for `base_batch`.

    With kappa = batch / base_batch: "linear" gives lr * kappa (Goyal et al. 2017,
    arXiv:1706.02677), for SGD with and without momentum, together with a warm-up. "sqrt" gives
    lr * sqrt(kappa) (Krizhevsky 2014, arXiv:1404.5997), for Adam, AdamW and LAMB, where
    :func:`scale_adam` says more. Both assume a loss averaged over the batch, and both fail beyond
    some batch size that depends on the problem.

    Raises:
        ValueError: lr negative, a batch not above 0, an unknown rule.
    """
    check_range("lr", lr, low=0.0, below=math.inf)
    kappa = _kappa(batch, base_batch)
    if rule not in ("linear", "sqrt"):
        raise ValueError(
            f"rule: expected 'linear' (SGD) or 'sqrt' (Adam, AdamW, LAMB), got {rule!r}"
        )
    return float(lr) * (kappa if rule == "linear" else math.sqrt(kappa))


def scale_adam(
    *, lr: float, betas: tuple[float, float], eps: float, batch: float, base_batch: float
) -> AdamOptions:
    """Adam's options for `batch` samples per update, where those given are right for `base_batch`.

    The square root scaling rule of Malladi et al. 2022 (arXiv:2205.10287), which keeps the
    stochastic differential equation that Adam follows. With kappa = batch / base_batch:
    lr * sqrt(kappa), 1 - kappa * (1 - beta) for both betas, eps / sqrt(kappa). Train for 1 / kappa
    as many steps. The rule says nothing of weight decay.

    Raises:
        ValueError: a value out of range, or kappa * (1 - beta) > 1, for which the rule has no beta.
    """
    check_range("eps", eps, low=0.0, below=math.inf)
    kappa = _kappa(batch, base_batch)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas!r}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, low=0.0, below=1.0)
        if kappa * (1.0 - beta) > 1.0:
            raise ValueError(
                f"batch: expected at most base_batch / (1 - betas[{index}]) = "
                f"{base_batch / (1.0 - beta):g}, got {batch!r}; scale less, or scale lr alone by "
                "scale_lr(..., rule='sqrt')"
            )
    beta1, beta2 = (1.0 - kappa * (1.0 - beta) for beta in betas)
    return {
        "lr": scale_lr(lr, batch=batch, base_batch=base_batch, rule="sqrt"),
        "betas": (beta1, beta2),
        "eps": eps / math.sqrt(kappa),
    }


def _kappa(batch: float, base_batch: float) -> float:
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        check_range(name, value, low=0.0, below=math.inf)
        if value == 0:
            raise ValueError(f"{name}: expected a number of samples above 0, got {value!r}")
    return batch / base_batch
