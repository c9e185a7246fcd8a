"""What can be wrong with a checkpoint, or with the directory of checkpoints, by name.

`CheckpointError` and `DamagedCheckpointError` are the native module's: C++ raises them too."""

from __future__ import annotations

from tradewind._core import native

CheckpointError = native.CheckpointError
DamagedCheckpointError = native.DamagedCheckpointError


class FencedError(CheckpointError):
    """A later attempt owns the directory: this process may not commit there any more."""


class DirectoryInUseError(CheckpointError):
    """A live process on this machine owns the directory."""


class VanishedCheckpointError(CheckpointError):
    """The checkpoint is not there any more: its owner retired it, or somebody removed it."""


class NotACheckpointDirectoryError(CheckpointError, ValueError):
    """What is at the path is no directory of checkpoints; nothing of it was touched."""


class NewerVersionError(CheckpointError):
    """The checkpoint is whole, but of a format version that this tradewind does not read."""


class StateMismatchError(CheckpointError, ValueError):
    """The state to fill has other names, shapes or kinds than the checkpoint."""


class NoSuchCheckpointError(CheckpointError, LookupError):
    """There is no checkpoint of that step, or none at all."""


class WeightsError(CheckpointError, ValueError):
    """A file of weights that cannot be read as one, or not safely."""
