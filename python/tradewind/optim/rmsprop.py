"""RMSprop as `torch.optim.RMSprop` defines it, in one native pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tradewind.optim.fused import (
    FusedOptimizer,
    Masters,
    Measuring,
    StateDtype,
    check_range,
)


class RMSprop(FusedOptimizer):
    """RMSprop (Tieleman and Hinton, 2012), optionally centered and with momentum.

    Same mathematics, defaults, param groups and state dict as `torch.optim.RMSprop` (2.13).

    Args:
        params: as for :class:`tradewind.optim.AdamW`.
        lr: learning rate, a float or a one-element tensor.
        alpha: decay of the running average of the squared gradient.
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter.
        momentum: factor of the buffer of steps; 0 keeps none.
        centered: divide by an estimate of the variance (Graves, 2013, arXiv:1308.0850).
        maximize: ascend instead of descend.
        clip_norm, measure, masters, state_dtype, seed: see :class:`tradewind.optim.AdamW`.
        foreach: accepted and ignored: the step is always one pass.
        fused: accepted; True lets `torch.amp.GradScaler` leave unscaling to the step, as in torch.
        capturable: True on the CPU raises NotImplementedError; on CUDA every step is capturable.
        differentiable: True raises NotImplementedError.

    Raises:
        ValueError: an option out of range, no parameters, or a parameter given twice.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        *,
        clip_norm: float | None = None,
        measure: Measuring = "step",
        masters: Masters | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(
            params,
            defaults,
            clip_norm=clip_norm,
            measure=measure,
            masters=masters,
            state_dtype=state_dtype,
            seed=seed,
        )

    @staticmethod
    def _rule_name(group: dict[str, Any]) -> str:
        name = "rmsprop_centered" if group["centered"] else "rmsprop"
        return f"{name}_momentum" if float(group["momentum"]) > 0 else name

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        names = ("lr", "alpha", "eps", "weight_decay", "momentum")
        return [float(group[name]) for name in names]

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_range("lr", group["lr"], low=0.0)
        check_range("alpha", group["alpha"], low=0.0)
        check_range("eps", group["eps"], low=0.0)
        check_range("weight_decay", group["weight_decay"], low=0.0)
        check_range("momentum", group["momentum"], low=0.0)
