"""Adagrad as `torch.optim.Adagrad` defines it, in one native pass."""

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


class Adagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011).

    Same mathematics, defaults, param groups and state dict as `torch.optim.Adagrad` (2.13), but for
    sparse gradients, which are refused. As there, state exists from the start.

    Args:
        params: as for :class:`tradewind.optim.AdamW`.
        lr: learning rate, a float or a one-element tensor.
        lr_decay: lr is divided by 1 + (step - 1) * lr_decay.
        weight_decay: added to the gradient, times the parameter.
        initial_accumulator_value: what the sum of squares begins with.
        eps: added to the denominator.
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
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        clip_norm: float | None = None,
        measure: Measuring = "step",
        masters: Masters | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
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
        for group in self.param_groups:
            for parameter in group["params"]:
                self._begin(group, parameter)

    def _begin(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        start = float(group["initial_accumulator_value"])
        value = complex(start, start) if parameter.is_complex() else start
        self.state[parameter] = {
            "step": torch.tensor(0.0),
            "sum": torch.full_like(parameter, value, memory_format=torch.preserve_format),
        }

    @staticmethod
    def _rule_name(group: dict[str, Any]) -> str:
        return "adagrad"

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        return [float(group[name]) for name in ("lr", "lr_decay", "weight_decay", "eps")]

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_range("lr", group["lr"], low=0.0)
        check_range("lr_decay", group["lr_decay"], low=0.0)
        check_range("weight_decay", group["weight_decay"], low=0.0)
        check_range("initial_accumulator_value", group["initial_accumulator_value"], low=0.0)
        check_range("eps", group["eps"], low=0.0)
