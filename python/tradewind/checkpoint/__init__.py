"""Checkpoints: written while training goes on, committed crash-safe, restored exactly.

Names load on first use (PEP 562): the upload process runs below this package and starts without
torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tradewind.checkpoint.checkpointer import Checkpointer as Checkpointer
    from tradewind.checkpoint.errors import CheckpointError as CheckpointError
    from tradewind.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
    from tradewind.checkpoint.errors import DirectoryInUseError as DirectoryInUseError
    from tradewind.checkpoint.errors import FencedError as FencedError
    from tradewind.checkpoint.errors import NewerVersionError as NewerVersionError
    from tradewind.checkpoint.errors import NoSuchCheckpointError as NoSuchCheckpointError
    from tradewind.checkpoint.errors import (
        NotACheckpointDirectoryError as NotACheckpointDirectoryError,
    )
    from tradewind.checkpoint.errors import StateMismatchError as StateMismatchError
    from tradewind.checkpoint.errors import VanishedCheckpointError as VanishedCheckpointError
    from tradewind.checkpoint.errors import WeightsError as WeightsError
    from tradewind.checkpoint.options import Checkpoint as Checkpoint
    from tradewind.checkpoint.parts import PartialTensor as PartialTensor
    from tradewind.checkpoint.parts import PerRank as PerRank
    from tradewind.checkpoint.save import Save as Save
    from tradewind.checkpoint.weights import Started as Started
    from tradewind.checkpoint.weights import load_weights as load_weights
    from tradewind.checkpoint.weights import start_from as start_from

_MODULE_OF = {
    "Checkpoint": "options",
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "DamagedCheckpointError": "errors",
    "DirectoryInUseError": "errors",
    "FencedError": "errors",
    "NewerVersionError": "errors",
    "NoSuchCheckpointError": "errors",
    "NotACheckpointDirectoryError": "errors",
    "PartialTensor": "parts",
    "PerRank": "parts",
    "Save": "save",
    "Started": "weights",
    "StateMismatchError": "errors",
    "VanishedCheckpointError": "errors",
    "WeightsError": "errors",
    "load_weights": "weights",
    "start_from": "weights",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tradewind.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tradewind.checkpoint.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
