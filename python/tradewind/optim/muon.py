"""Muon as `torch.optim.Muon` defines it: native passes around torch's matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tradewind._core import native
from tradewind.optim.fused import (
    FusedOptimizer,
    Masters,
    Measuring,
    StateDtype,
    check_range,
)


def listed_matrices(params: Any) -> list[Any]:
    """`params` of a group as a list. Raises ValueError, by shape, for what is no matrix."""
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    for item in listed:
        parameter = item[1] if isinstance(item, tuple) else item
        if isinstance(parameter, torch.Tensor) and parameter.ndim != 2:
            raise ValueError(
                "Muon only supports 2D parameters whereas we found a parameter with size: "
                f"{parameter.size()}; give it to AdamW"
            )
    return listed


class Muon(FusedOptimizer):
    """Muon for the hidden matrices of a network (Jordan, 2024; Liu et al., 2025, arXiv:2502.16982).

    Same mathematics, defaults, param groups and state dict as `torch.optim.Muon` (2.13). Everything
    that is not a hidden matrix (embeddings, heads, norms, biases) belongs to AdamW: make two
    optimizers, or one :class:`tradewind.optim.MuonWithAdamW`; `tw.Muon` is the recipe of that.

    Args:
        params: matrices, dicts of param groups, or (name, matrix) pairs.
        lr: learning rate, a float or a one-element tensor.
        weight_decay: decoupled decay, per unit of lr.
        momentum: decay of the running average of the gradient.
        nesterov: look ahead along the momentum.
        ns_coefficients: of the Newton-Schulz polynomial.
        eps: least norm that the momentum is divided by.
        ns_steps: Newton-Schulz iterations, fewer than 100.
        adjust_lr_fn: "original" (None; lr times sqrt(max(1, rows / columns))) or "match_rms_adamw"
            (lr times 0.2 sqrt(max(rows, columns))).
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
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
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
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of matrices. Raises ValueError for anything else, by shape."""
        matrices = listed_matrices(param_group["params"])
        super().add_param_group({**param_group, "params": matrices})

    @staticmethod
    def _matrix_options(group: dict[str, Any]) -> native.MatrixOptions:
        return native.MatrixOptions(
            list(group["ns_coefficients"]),
            float(group["eps"]),
            int(group["ns_steps"]),
            group["adjust_lr_fn"] or "original",
        )

    @staticmethod
    def _rule_name(group: dict[str, Any]) -> str:
        return "muon"

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        names = ("lr", "momentum", "nesterov", "weight_decay")
        return [float(group[name]) for name in names]

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_range("lr", group["lr"], low=0.0)
        check_range("momentum", group["momentum"], low=0.0)
        check_range("weight_decay", group["weight_decay"], low=0.0)
        check_range("eps", group["eps"], low=0.0)
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"Adjust learning rate function {group['adjust_lr_fn']} is not supported: expected "
                "None, 'original' or 'match_rms_adamw'"
            )
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(
                f"ns_coefficients: expected three numbers, got {group['ns_coefficients']!r}"
            )
        if not 0 <= int(group["ns_steps"]) < 100:
            raise ValueError(f"ns_steps: expected 0 to 99, got {group['ns_steps']!r}")
