"""Optimizers: drop-in `torch.optim.Optimizer`s whose step is one native pass, and schedules."""

from tradewind.optim.adagrad import Adagrad
from tradewind.optim.adam import Adam
from tradewind.optim.adamw import AdamW
from tradewind.optim.batch_scaling import scale_adam, scale_lr
from tradewind.optim.fused import FusedOptimizer
from tradewind.optim.lamb import LAMB
from tradewind.optim.lion import Lion
from tradewind.optim.muon import Muon
from tradewind.optim.muon_with_adamw import MuonWithAdamW
from tradewind.optim.rmsprop import RMSprop
from tradewind.optim.schedules import WarmupCosine, WarmupLinear, WarmupStableDecay
from tradewind.optim.sgd import SGD

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "Lion",
    "Muon",
    "MuonWithAdamW",
    "RMSprop",
    "WarmupCosine",
    "WarmupLinear",
    "WarmupStableDecay",
    "scale_adam",
    "scale_lr",
]
