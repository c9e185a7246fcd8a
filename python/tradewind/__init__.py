"""Tradewind: a training engine for people who rent their accelerators.

`import tradewind as tw` loads nothing but this page (PEP 562): torch and the native module are
loaded by the first name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tradewind import optim as optim
    from tradewind.checkpoint import Checkpoint as Checkpoint
    from tradewind.checkpoint import Checkpointer as Checkpointer
    from tradewind.checkpoint import CheckpointError as CheckpointError
    from tradewind.checkpoint import DamagedCheckpointError as DamagedCheckpointError
    from tradewind.engine import Engine as Engine
    from tradewind.engine import StepResult as StepResult
    from tradewind.engine.loss_scale import LossScale as LossScale
    from tradewind.optim.grad_scaler import GradScaler as GradScaler
    from tradewind.optim.muon_recipe import Muon as Muon
    from tradewind.optim.recipe import LAMB as LAMB
    from tradewind.optim.recipe import SGD as SGD
    from tradewind.optim.recipe import Adagrad as Adagrad
    from tradewind.optim.recipe import Adam as Adam
    from tradewind.optim.recipe import AdamW as AdamW
    from tradewind.optim.recipe import Lion as Lion
    from tradewind.optim.recipe import Recipe as Recipe
    from tradewind.optim.recipe import RMSprop as RMSprop
    from tradewind.place import Place as Place
    from tradewind.place import place as place
    from tradewind.share import GradientSharing as GradientSharing
    from tradewind.share import Share as Share
    from tradewind.share import SharingError as SharingError
    from tradewind.track import Histogram as Histogram
    from tradewind.track import Image as Image
    from tradewind.track import log as log

_MODULE_OF = {
    "Adagrad": "tradewind.optim.recipe",
    "Adam": "tradewind.optim.recipe",
    "AdamW": "tradewind.optim.recipe",
    "Checkpoint": "tradewind.checkpoint",
    "CheckpointError": "tradewind.checkpoint",
    "Checkpointer": "tradewind.checkpoint",
    "DamagedCheckpointError": "tradewind.checkpoint",
    "Engine": "tradewind.engine",
    "GradScaler": "tradewind.optim.grad_scaler",
    "GradientSharing": "tradewind.share",
    "Histogram": "tradewind.track",
    "Image": "tradewind.track",
    "LAMB": "tradewind.optim.recipe",
    "Lion": "tradewind.optim.recipe",
    "Muon": "tradewind.optim.muon_recipe",
    "LossScale": "tradewind.engine.loss_scale",
    "Place": "tradewind.place",
    "RMSprop": "tradewind.optim.recipe",
    "Recipe": "tradewind.optim.recipe",
    "SGD": "tradewind.optim.recipe",
    "Share": "tradewind.share",
    "SharingError": "tradewind.share",
    "StepResult": "tradewind.engine",
    "log": "tradewind.track",
    "place": "tradewind.place",
}
_SUBMODULES = ("checkpoint", "doctor", "optim", "progress", "report", "share", "track")

__all__ = ["__version__", "optim", *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("tradewind")
        except PackageNotFoundError:
            return "0.0.0+source"
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"tradewind.{name}")
    else:
        raise AttributeError(f"module 'tradewind' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
