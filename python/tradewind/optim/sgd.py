"""Stochastic gradient descent as `torch.optim.SGD` defines it, in one native pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tradewind.optim.fused import FusedOptimizer, Masters, Measuring, StateDtype, check_range


class SGD(FusedOptimizer):
    """SGD with momentum, dampening, Nesterov momentum and (coupled) weight decay.

    Same mathematics, defaults, param groups and state dict as `torch.optim.SGD` (2.13). As there, a
    parameter's first momentum buffer is its first gradient, undampened.

    Args:
        params: parameters, dicts of param groups, or (name, parameter) pairs; float32, float64,
            bfloat16, float16 or complex.
        lr: learning rate, a float or a one-element tensor.
        momentum: factor of the buffer; 0 keeps no buffer.
        dampening: 1 - dampening is the gradient's weight in the buffer.
        weight_decay: added to the gradient, times the parameter.
        nesterov: look ahead along the buffer; needs momentum > 0 and dampening 0.
        maximize: ascend instead of descend.
        clip_norm, measure, masters, state_dtype, seed: see :class:`tradewind.optim.AdamW`.
        foreach: accepted and ignored: the step is always one pass.
        fused: accepted; True lets `torch.amp.GradScaler` leave unscaling to the step, as in torch.
        differentiable: True raises NotImplementedError.

    Raises:
        ValueError: an option out of range, no parameters, or a parameter given twice.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        clip_norm: float | None = None,
        measure: Measuring = "step",
        masters: Masters | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
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
        return "sgd_momentum" if float(group["momentum"]) != 0.0 else "sgd"

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return [float(group[name]) for name in names]

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_range("lr", group["lr"], low=0.0)
        check_range("momentum", group["momentum"], low=0.0)
        check_range("weight_decay", group["weight_decay"], low=0.0)
        check_range("dampening", group["dampening"])
        if group["nesterov"] and (float(group["momentum"]) <= 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov: expected momentum > 0 and dampening 0, got "
                f"momentum {group['momentum']} and dampening {group['dampening']}"
            )
