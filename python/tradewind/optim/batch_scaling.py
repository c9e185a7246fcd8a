"""Options for another batch size than the one they were found for."""

from __future__ import annotations

import math
from typing import Literal, TypedDict

from tradewind.optim.fused import check_betas, check_range

__all__ = ["scale_adam", "scale_lr"]


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
    check_betas(betas)
    for index, beta in enumerate(betas):
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
