"""Checkpoints: written while training goes on, committed crash-safe, restored exactly."""

from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FencedError,
    NewerVersionError,
    NotACheckpointDirectoryError,
    StateMismatchError,
)
from tradewind.checkpoint.parts import PartialTensor, PerRank

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "FencedError",
    "NewerVersionError",
    "NotACheckpointDirectoryError",
    "PartialTensor",
    "PerRank",
    "StateMismatchError",
]
