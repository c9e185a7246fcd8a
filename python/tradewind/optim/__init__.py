"""Optimizers: drop-in `torch.optim.Optimizer`s whose step is one native pass."""

from tradewind.optim.adamw import AdamW
from tradewind.optim.fused import FusedOptimizer
from tradewind.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "FusedOptimizer"]
