"""Schedules of the learning rate, or of any option of the param groups: named curves (`curves`)
under one scheduler (`scheduler`)."""

from __future__ import annotations

from typing import ClassVar

from torch.optim.optimizer import Optimizer

from tradewind.optim.curves import Curve, Decay, check_count
from tradewind.optim.scheduler import Schedule

__all__ = ["WarmupCosine", "WarmupLinear", "WarmupStableDecay"]


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
        decay_steps = check_count("decay_steps", decay_steps, 1, None, advice)
        curve = Curve(decay, warmup_steps, total_steps, decay_steps, warmup_from, final_fraction)
        super().__init__(
            optimizer, curve, option=option, last_epoch=last_epoch, capturable=capturable
        )
