"""Lion in one native pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tradewind.optim.fused import (
    FusedOptimizer,
    Masters,
    Measuring,
    StateDtype,
    check_betas,
    check_range,
)


class Lion(FusedOptimizer):
    """Lion: the sign of an interpolated momentum (Chen et al., 2023, arXiv:2302.06675).

    Half of Adam's state. The paper's advice: an lr 3 to 10 times smaller than AdamW's, and a weight
    decay larger by as much.

    Args:
        params: as for :class:`tradewind.optim.AdamW`.
        lr: learning rate, a float or a one-element tensor.
        betas: weight of the momentum in the update, and its decay, each in [0, 1).
        weight_decay: decoupled decay, per unit of lr.
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
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        clip_norm: float | None = None,
        measure: Measuring = "step",
        masters: Masters | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
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
        return "lion"

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        beta1, beta2 = group["betas"]
        return [float(x) for x in (group["lr"], beta1, beta2, group["weight_decay"])]

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_range("lr", group["lr"], low=0.0)
        check_range("weight_decay", group["weight_decay"], low=0.0)
        check_betas(group["betas"])
