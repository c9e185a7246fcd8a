"""AdamW as `torch.optim.AdamW` defines it, in one native pass."""

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


class AdamW(FusedOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019); optionally AMSGrad.

    Same mathematics, defaults, param groups and state dict as `torch.optim.AdamW` (2.13), so the
    two can load each other's state.

    Args:
        params: parameters, dicts of param groups, or (name, parameter) pairs; float32, float64,
            bfloat16, float16 or complex. Arithmetic is float32 (float64 for float64 parameters).
            Gradients may be of another floating dtype than their parameter.
        lr: learning rate, a float or a one-element tensor.
        betas: decay of the running averages of the gradient and of its square, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled decay, per unit of lr.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend instead of descend.
        clip_norm: scale gradients of this optimizer so that their joint 2-norm is at most this, as
            `torch.nn.utils.clip_grad_norm_` would, without touching `.grad`; None does not clip.
        measure: when the norm for `clip_norm` is taken: "step", or "backward", by hooks while each
            gradient is in cache. A gradient that is changed in between is measured again, but an
            edit through `.grad.data` leaves no trace: keep "step" where code does that.
        masters: for 16-bit parameters, "fp32" keeps their exact value in float32 beside them,
            "split" the 16 bits that a bfloat16 lacks (4 bytes per parameter in all instead of 6);
            None steps the rounded values, as torch does.
        state_dtype: None stores state in the parameter's dtype (float32 beside a master), "fp32" in
            float32, "bf16" and "8bit" (blocks of 256 that share an exponent) rounded at random
            without bias.
        seed: of that rounding; the same seed, step and place give the same bits.
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
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": True,
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as torch's does, whatever Adam's dict says
            group["decoupled_weight_decay"] = True

    @staticmethod
    def _rule_name(group: dict[str, Any]) -> str:
        return "adamw_amsgrad" if group["amsgrad"] else "adamw"

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        beta1, beta2 = group["betas"]
        return [float(x) for x in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])]

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_range("lr", group["lr"], low=0.0)
        check_range("eps", group["eps"], low=0.0)
        check_range("weight_decay", group["weight_decay"], low=0.0)
        check_betas(group["betas"])
