"""
The native core of Tradewind. Import it through tradewind._core, which checks torch.
"""

from __future__ import annotations

import collections.abc
import typing

import torch

__all__: list[str] = [
    "LAYOUT_VERSION",
    "NORM_BLOCK_ELEMENTS",
    "NO_LONGER_FITS",
    "BackwardUpdateResult",
    "Bucket",
    "C10dComm",
    "CheckpointError",
    "CollectiveGradients",
    "CollectiveOptions",
    "CudaLibrary",
    "DamagedCheckpointError",
    "DeviceTable",
    "Env",
    "ExchangeStatistics",
    "FileLock",
    "FileStatus",
    "GateClosing",
    "GradientRounds",
    "Layout",
    "MatrixOptions",
    "MeasureResult",
    "NonFiniteGradient",
    "OptimizerTable",
    "ParameterArena",
    "RecordingEnv",
    "RoundOptions",
    "Rule",
    "ShardResult",
    "ShardWrite",
    "ShardWriter",
    "ShareOptions",
    "SharedGradients",
    "SharingError",
    "Slot",
    "StepReading",
    "clip_factor",
    "close_gate",
    "crc32c",
    "crc32c_combine",
    "decode_blocks",
    "isa",
    "join_floats",
    "oracle_step",
    "posix_env",
    "read_shard",
    "rule",
    "supported_isas",
    "wait_for_gate",
]

class SharingError(RuntimeError): ...
class CheckpointError(RuntimeError): ...
class DamagedCheckpointError(CheckpointError): ...

class FileStatus:
    @property
    def file_id(self) -> tuple[int, int]:
        """
        Device and inode: equal for two names of one file, as long as it lives.
        """
    @property
    def is_directory(self) -> bool: ...
    @property
    def is_file(self) -> bool: ...
    @property
    def modified_s(self) -> float:
        """
        Since the epoch.
        """
    @property
    def num_links(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class FileLock:
    """
    A lock on a file, until it is released or its process ends; forked children do not have it.
    """
    def __enter__(self) -> FileLock: ...
    def __exit__(self, *args) -> None: ...
    def release(self) -> None:
        """
        Idempotent.
        """

class Env:
    """
    A file system; all methods raise OSError with errno and filename, and release the GIL.
    """
    def list_directory(self, path: str) -> list[str]:
        """
        Sorted names, by bytes.
        """
    def lock_file(self, path: str, exclusive: bool) -> FileLock | None:
        """
        Never waits; None where another open file holds it. An exclusive lock makes a missing file, a shared one raises FileNotFoundError.
        """
    def make_directories(self, path: str) -> None:
        """
        What is missing of it; syncs each new directory's parent.
        """
    def make_directory(self, path: str) -> None:
        """
        One level; FileExistsError where the name is taken.
        """
    def read_file(self, path: str, max_bytes: typing.SupportsInt | typing.SupportsIndex) -> bytes:
        """
        OSError with EFBIG where it is larger.
        """
    def remove(self, path: str) -> None:
        """
        A file's name.
        """
    def remove_directory(self, path: str) -> None:
        """
        An empty one.
        """
    def rename(self, old: str, new: str) -> None:
        """
        Replaces what has the new name.
        """
    def status(self, path: str) -> FileStatus | None:
        """
        None where there is nothing of this name.
        """
    def sync_directory(self, path: str) -> None:
        """
        What was made, renamed and removed in it is on stable storage after this.
        """
    def write_file(
        self, path: str, data: bytes, exclusive: bool = False, sync: bool = True
    ) -> None:
        """
        Creates, or empties and fills; exclusive: FileExistsError where the name is taken. Its directory is not synced, and what a failure leaves is not removed.
        """

class RecordingEnv(Env):
    """
    The POSIX file system with a record of every call that changes something, and chosen ones failing: for tests of crashes.
    """
    def __init__(self, keep_data: bool = True) -> None: ...
    def clear(self) -> None:
        """
        Forgets the operations, not the faults.
        """
    def drop_syncs(self, files: bool, directories: bool) -> None:
        """
        Syncs of these succeed, and are neither done nor recorded.
        """
    def heal(self) -> None:
        """
        No faults from now on.
        """
    def inject(
        self,
        index: typing.SupportsInt | typing.SupportsIndex,
        error: typing.SupportsInt | typing.SupportsIndex = 0,
        short_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
        sticky: bool = False,
    ) -> None:
        """
        The index-th recorded call from now on, from 0, fails with this errno and does nothing; or, where it is a write, stops after short_bytes (with both: and then fails). sticky: all later ones too, until heal(); not EINTR.
        """
    def operations(self) -> list[dict[str, typing.Any]]:
        """
        In the order in which they took effect. kind: create, open (to write), write, truncate, allocate, sync, rename, remove, make_directory, remove_directory, sync_directory, lock. path; to (of a rename); file: the file itself by whatever name, never used again, -1 where there was none; offset: where a write or allocation begins, the new size of a truncation; size_bytes and data written; error: an errno, or 0.
        """
    def refuse_direct(self, refuse: bool) -> None:
        """
        Files are buffered, as on a file system without direct I/O.
        """

class GateClosing:
    """
    Ranges of memory that no sweep may write until they are opened, at the latest when this is let go.
    """
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def open(self) -> None:
        """
        All of what is left. Idempotent.
        """
    @property
    def held_bytes(self) -> int: ...
    @property
    def waited_s(self) -> float:
        """
        Seconds for which at least one thread has waited for these ranges.
        """

class ShardResult:
    @property
    def block_crc32c(self) -> bytes:
        """
        u32 little-endian, one for each block of the file.
        """
    @property
    def crc32c(self) -> int:
        """
        Of the whole file.
        """
    @property
    def size_bytes(self) -> int: ...

class ShardWrite:
    """
    A save under way.
    """
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def cancel(self) -> None:
        """
        Opens the gate and ends it as soon as calls under way return; does not wait.
        """
    def result(self) -> ShardResult:
        """
        After wait(): the file is on stable storage, its name is not (sync the directory). Raises what ended it: OSError with errno and filename, ECANCELED after cancel().
        """
    def wait(self, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """
        Whether it is over, well or not.
        """

class ShardWriter:
    """
    A pool of threads that writes one shard file at a time.
    """
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(self, num_threads: typing.SupportsInt | typing.SupportsIndex = 16) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def close(self) -> None:
        """
        Cancels what is under way and ends the threads. Idempotent.
        """
    def start(
        self,
        env: Env,
        path: str,
        header: bytes,
        regions: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ],
        block_bytes: typing.SupportsInt | typing.SupportsIndex = 4194304,
        recycle: bool = False,
        closing: GateClosing | None = None,
    ) -> ShardWrite:
        """
        header: whole pages of 4096 bytes, at offset 0. regions: (file offset, a multiple of 4096; address; size in bytes), ascending; between them and up to the next page the file is zero. The memory stays valid until the save is over, and unchanged until `closing` lets it go. recycle: the file is there and is overwritten in place. Raises ValueError for other offsets, RuntimeError while another save is under way.
        """

class Slot:
    @property
    def arena_idx(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def num_elements(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def size_bytes(self) -> int: ...

class Bucket:
    @property
    def arena_idx(self) -> int: ...
    @property
    def first_slot_idx(self) -> int: ...
    @property
    def num_norm_blocks(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def range_bytes(self) -> tuple[int, int]: ...

class Layout:
    def __init__(
        self,
        specs: collections.abc.Sequence[
            tuple[str, collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], str]
        ],
        *,
        slot_alignment_bytes: typing.SupportsInt | typing.SupportsIndex = 64,
        arena_alignment_bytes: typing.SupportsInt | typing.SupportsIndex = 4096,
        bucket_bytes: typing.SupportsInt | typing.SupportsIndex = 26214400,
    ) -> None:
        """
        specs: (name, shape, dtype name) of each parameter in registration order.
        """
    def shard(
        self,
        bucket_idx: typing.SupportsInt | typing.SupportsIndex,
        rank: typing.SupportsInt | typing.SupportsIndex,
        world_size: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[int, int]: ...
    @property
    def arena_bytes(self) -> list[tuple[str, int]]: ...
    @property
    def buckets(self) -> list[Bucket]: ...
    @property
    def digest(self) -> str: ...
    @property
    def slots(self) -> list[Slot]: ...

class ParameterArena:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(
        self,
        parameters: collections.abc.Sequence[torch.Tensor],
        names: collections.abc.Sequence[str],
    ) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def bring_home(self) -> list[int]:
        """
        Copies parameters whose memory left the arena back in; returns their indices.
        """
    def memory_ranges(self) -> list[tuple[int, int]]:
        """
        (address, size in bytes) of each arena in host memory; [] where they are a device's.
        """
    @property
    def layout(self) -> Layout: ...
    @property
    def size_bytes(self) -> int: ...

class Rule:
    @property
    def counts_steps(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def option_names(self) -> list[str]: ...
    @property
    def state_is_positive(self) -> list[bool]: ...
    @property
    def state_names(self) -> list[str]: ...

class MeasureResult:
    @property
    def first_nonfinite_name(self) -> str: ...
    @property
    def norm(self) -> float: ...
    @property
    def num_hot(self) -> int: ...
    @property
    def num_nonfinite(self) -> int: ...

class BackwardUpdateResult:
    @property
    def first_nonfinite_name(self) -> str: ...
    @property
    def norm(self) -> float: ...
    @property
    def num_nonfinite(self) -> int: ...
    @property
    def num_updated(self) -> int: ...
    @property
    def num_withheld(self) -> int: ...

class MatrixOptions:
    def __init__(
        self,
        coefficients: typing.Annotated[
            collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(3)"
        ],
        eps: typing.SupportsFloat | typing.SupportsIndex,
        num_iterations: typing.SupportsInt | typing.SupportsIndex,
        adjust_lr: str,
    ) -> None: ...

class OptimizerTable:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(
        self,
        masters: str = "none",
        state_dtype: str = "parameter",
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def add_group(
        self,
        rule_name: str,
        parameters: collections.abc.Sequence[torch.Tensor],
        names: collections.abc.Sequence[str],
    ) -> None: ...
    def add_state(
        self,
        parameter_idx: typing.SupportsInt | typing.SupportsIndex,
        entry: dict[str, typing.Any],
        is_first: bool,
    ) -> None: ...
    def begin_backward_update(
        self,
        groups: collections.abc.Sequence[
            tuple[
                collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
                bool,
                MatrixOptions | None,
            ]
        ],
        wants_changes: bool,
    ) -> None: ...
    def collect(self) -> int: ...
    def end_backward_update(self) -> BackwardUpdateResult: ...
    def end_parts(self) -> MeasureResult: ...
    def hook_gradients(self, action: str) -> None: ...
    def install_hooks(self) -> None: ...
    def is_updating(self) -> bool: ...
    def measure(self) -> MeasureResult: ...
    def memory_ranges(self) -> list[tuple[int, int]]:
        """
        (address, size in bytes) of the arenas of states, exponents and masters: memory that nothing but this table writes. Step counts are not in it.
        """
    def missing_state(self) -> list[int]:
        """
        Indices of collected parameters that have no state yet.
        """
    def missing_state_anywhere(self) -> list[int]: ...
    def owns_states(self) -> bool: ...
    def release_gradients(self) -> None: ...
    def remove_hooks(self) -> None: ...
    def set_hot(self, measures: bool) -> None: ...
    def set_master(
        self, parameter_idx: typing.SupportsInt | typing.SupportsIndex, values: torch.Tensor
    ) -> None: ...
    def set_state(
        self,
        parameter_idx: typing.SupportsInt | typing.SupportsIndex,
        state_idx: typing.SupportsInt | typing.SupportsIndex,
        values: torch.Tensor,
    ) -> None: ...
    def skip(self) -> None: ...
    def statistics(self) -> dict[str, list[float]]:
        """
        Columns over the parameters that the last step went over, by name.
        """
    def sum_gradients(self) -> None: ...
    def sweep(
        self,
        groups: collections.abc.Sequence[
            tuple[
                collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
                bool,
                MatrixOptions | None,
            ]
        ],
        gradient_multiplier: typing.SupportsFloat | typing.SupportsIndex,
        wants_changes: bool = False,
    ) -> None: ...
    def sweep_part(
        self,
        parameter_idx: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        groups: collections.abc.Sequence[
            tuple[
                collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
                bool,
                MatrixOptions | None,
            ]
        ],
        gradient_multiplier: typing.SupportsFloat | typing.SupportsIndex,
        wants_changes: bool = False,
    ) -> None: ...
    def take_gradients(self, arg0: collections.abc.Sequence[torch.Tensor | None]) -> None: ...

class CudaLibrary:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(self, path: str) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def probe(self) -> tuple[int, str, int, int]:
        """
        (error code, its text, devices, compute capability of the first as 10 * major + minor)
        """

class StepReading:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def is_ready(self) -> bool:
        """
        Whether the device has come so far; never waits.
        """
    def outcome(self) -> tuple[float, float, bool, int, int, float]:
        """
        (norm, clip factor, applied, non-finite gradients, index of the first or -1, loss
        scale)

        Waits for the device.
        """
    def statistics(self) -> dict[str, list[float]]:
        """
        Columns over the step's parameters, by name; waits for the device.
        """
    @property
    def is_captured(self) -> bool: ...

class DeviceTable:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(
        self,
        library: CudaLibrary,
        device: torch.device,
        masters: str,
        state_dtype: str,
        seed: typing.SupportsInt | typing.SupportsIndex,
        max_direction_bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def add_group(
        self,
        rule_name: str,
        parameters: collections.abc.Sequence[torch.Tensor],
        names: collections.abc.Sequence[str],
        numbers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def add_state(
        self,
        parameter_idx: typing.SupportsInt | typing.SupportsIndex,
        entry: dict[str, typing.Any],
        is_first: bool,
    ) -> None: ...
    def begin_backward_update(
        self,
        groups: collections.abc.Sequence[
            tuple[
                collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
                bool,
                MatrixOptions | None,
            ]
        ],
        learning_rates: collections.abc.Sequence[torch.Tensor | None],
        wants_changes: bool,
        stream: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def carry_over(
        self,
        before: DeviceTable,
        from_idx: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def collect(self) -> int: ...
    def end_backward_update(self) -> list[StepReading]:
        """
        The numbers of each step that was queued.
        """
    def hook_sums(self) -> None: ...
    def hook_updates(self) -> None: ...
    def install_hooks(self) -> None: ...
    def is_updating(self) -> bool: ...
    def keep_loss_scale(
        self,
        initial: typing.SupportsFloat | typing.SupportsIndex,
        growth_factor: typing.SupportsFloat | typing.SupportsIndex,
        backoff_factor: typing.SupportsFloat | typing.SupportsIndex,
        growth_interval: typing.SupportsInt | typing.SupportsIndex,
        floor: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    def loss_scale(self) -> torch.Tensor: ...
    def measure(self, stream: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def missing_state(self) -> list[int]:
        """
        Indices of collected parameters that have no state yet.
        """
    def missing_state_anywhere(self) -> list[int]:
        """
        Indices of parameters that require a gradient and have no state yet.
        """
    def owns_states(self) -> bool: ...
    def prepare(
        self,
        groups: collections.abc.Sequence[
            tuple[
                collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
                bool,
                MatrixOptions | None,
            ]
        ],
        learning_rates: collections.abc.Sequence[torch.Tensor | None],
        *,
        gradient_multiplier: typing.SupportsFloat | typing.SupportsIndex,
        max_norm: typing.SupportsFloat | typing.SupportsIndex,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        measures: bool,
        vetoes_nonfinite: bool,
        wants_statistics: bool,
        wants_changes: bool,
        is_capturing: bool,
    ) -> None: ...
    def read_again(self) -> StepReading: ...
    def release_gradients(self) -> None: ...
    def remove_hooks(self) -> None: ...
    def set_master(
        self, parameter_idx: typing.SupportsInt | typing.SupportsIndex, values: torch.Tensor
    ) -> None: ...
    def set_state(
        self,
        parameter_idx: typing.SupportsInt | typing.SupportsIndex,
        state_idx: typing.SupportsInt | typing.SupportsIndex,
        values: torch.Tensor,
    ) -> None: ...
    def sum_gradients(self) -> None: ...
    def sums(self) -> torch.Tensor: ...
    def take_gradients(self, gradients: collections.abc.Sequence[torch.Tensor | None]) -> None: ...
    def update(self, stream: typing.SupportsInt | typing.SupportsIndex) -> StepReading: ...
    def vetoed(self) -> torch.Tensor: ...
    @property
    def num_uploads(self) -> int: ...

class RoundOptions:
    codec: str
    error_feedback: bool
    settles_itself: bool
    sums_microbatches: bool
    @property
    def bucket_bytes(self) -> int: ...
    @bucket_bytes.setter
    def bucket_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def buffers(self) -> list[torch.Tensor]: ...
    @buffers.setter
    def buffers(self, arg0: collections.abc.Sequence[torch.Tensor]) -> None: ...
    @property
    def deadline_s(self) -> float: ...
    @deadline_s.setter
    def deadline_s(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def end_bucket_bytes(self) -> int: ...
    @end_bucket_bytes.setter
    def end_bucket_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def patience_s(self) -> float: ...
    @patience_s.setter
    def patience_s(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class ShareOptions(RoundOptions):
    measures: bool
    shards_update: bool
    def __init__(self) -> None: ...
    @property
    def hosts(self) -> list[str]: ...
    @hosts.setter
    def hosts(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def low_rank(self) -> int: ...
    @low_rank.setter
    def low_rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def piece_bytes(self) -> int: ...
    @piece_bytes.setter
    def piece_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def sockets(self) -> list[str]: ...
    @sockets.setter
    def sockets(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def window_bytes(self) -> int: ...
    @window_bytes.setter
    def window_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class NonFiniteGradient:
    @property
    def microbatch(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def parameter_name(self) -> str: ...
    @property
    def rank(self) -> int: ...

class ExchangeStatistics:
    @property
    def between_hosts_bytes(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def num_rounds(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def waited_s(self) -> float: ...

class GradientRounds:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def abandon(self, arg0: str) -> None: ...
    def bucket_of(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def digest(self) -> str: ...
    def end_microbatch(self) -> None: ...
    def fail(self, arg0: str) -> None: ...
    def feedback(self) -> dict[str, torch.Tensor]:
        """
        name -> float32 values: what a lossy codec still owes. Between rounds.
        """
    def finish_backward(self, has_next: bool = True) -> None: ...
    def install_hooks(self) -> None: ...
    def is_backward_open(self) -> bool: ...
    def is_open(self) -> bool: ...
    def is_syncing(self) -> bool: ...
    def leave(self, arg0: str) -> None: ...
    def load_feedback(self, arg0: collections.abc.Mapping[str, torch.Tensor]) -> None:
        """
        As feedback() gave it. Raises ValueError, and changes nothing, where names or sizes differ.
        """
    def mean(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor: ...
    def memory_bytes(self) -> int: ...
    def nonfinite(self) -> list[NonFiniteGradient]: ...
    def num_buckets(self) -> int: ...
    def num_contributors_next(self) -> int: ...
    def open_backward(self, arg0: bool) -> None: ...
    def parameters_of(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    def remove_hooks(self) -> None: ...
    def scale(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def set_divide_by_all(self, arg0: bool) -> None: ...
    def set_syncing(self, arg0: bool) -> None: ...
    def set_wishes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def settle(self) -> None: ...
    def shadow_round(self, has_next: bool = True) -> None: ...
    def statistics(self) -> ExchangeStatistics: ...
    def take_buffers(self) -> None: ...
    def tell(self, arg0: str) -> None: ...
    def use_all(self) -> None: ...
    def wishes(self) -> int:
        """
        All ranks' of the newest round, which it waits for: the same on each.
        """

class SharedGradients(GradientRounds):
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(
        self,
        parameters: collections.abc.Sequence[torch.Tensor],
        names: collections.abc.Sequence[str],
        backend: typing.Any,
        store: typing.Any,
        prefix: str,
        options: ShareOptions,
    ) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def assign_gradients(self) -> None: ...
    def fragments(self) -> list[tuple[int, int, int]]:
        """
        (parameter, first element, end) of each run that this rank updates.
        """
    def give_measures(
        self,
        arg0: OptimizerTable,
        arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def is_mean_final(self) -> bool: ...
    def release(
        self,
        groups: collections.abc.Sequence[
            tuple[
                collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
                bool,
                MatrixOptions | None,
            ]
        ],
        gradient_multiplier: typing.SupportsFloat | typing.SupportsIndex,
        is_vetoed: bool = False,
    ) -> None: ...
    def set_deferred(self, arg0: bool) -> None: ...
    def set_forward_order(
        self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    def set_shards(
        self,
        arg0: OptimizerTable,
        arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def settle_bucket(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class C10dComm:
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(
        self, group: typing.Any, timeout_s: typing.SupportsFloat | typing.SupportsIndex
    ) -> None:
        """
        On host memory.
        """
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def abort(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def all_gather(self, arg0: torch.Tensor, arg1: torch.Tensor) -> None: ...
    def all_reduce(self, arg0: torch.Tensor, arg1: str) -> None: ...
    def all_to_all(self, arg0: torch.Tensor, arg1: torch.Tensor) -> None: ...
    def barrier(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def broadcast(
        self, arg0: torch.Tensor, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def check(self) -> None: ...
    def reduce_scatter(self, arg0: torch.Tensor, arg1: torch.Tensor, arg2: str) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class CollectiveOptions(RoundOptions):
    cuda_library: str
    emulates_device: bool
    is_deterministic: bool
    def __init__(self) -> None: ...

class CollectiveGradients(GradientRounds):
    def __copy__(self, *args) -> typing.Any: ...
    def __deepcopy__(self, *args) -> typing.Any: ...
    def __init__(
        self,
        parameters: collections.abc.Sequence[torch.Tensor],
        names: collections.abc.Sequence[str],
        values: typing.Any,
        facts: typing.Any,
        store: typing.Any,
        prefix: str,
        options: CollectiveOptions,
    ) -> None: ...
    def __reduce_ex__(self, *args) -> typing.Any: ...
    def found_inf(self) -> torch.Tensor: ...
    def nonfinite_facts(self) -> torch.Tensor: ...
    def nonfinite_of(self, arg0: torch.Tensor) -> list[NonFiniteGradient]: ...

def clip_factor(
    norm: typing.SupportsFloat | typing.SupportsIndex,
    max_norm: typing.SupportsFloat | typing.SupportsIndex,
) -> float: ...
def close_gate(
    ranges: collections.abc.Sequence[
        tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
    ],
) -> GateClosing:
    """
    ranges: (address, size in bytes). Sweeps and native writers wait for them from now on; no sweep may be under way. ValueError for a negative size.
    """

def crc32c(data: bytes, crc: typing.SupportsInt | typing.SupportsIndex = 0) -> int:
    """
    CRC-32C (RFC 3720) of these bytes, after those that `crc` is the sum of.
    """

def crc32c_combine(
    first: typing.SupportsInt | typing.SupportsIndex,
    second: typing.SupportsInt | typing.SupportsIndex,
    second_bytes: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    CRC-32C of two runs of bytes one after the other, from their own and the second's size.
    """

def decode_blocks(codes: torch.Tensor, exponents: torch.Tensor, has_sign: bool) -> torch.Tensor:
    """
    What 8-bit state stands for, in float32.
    """

def isa() -> str:
    """
    The instruction set that this process's kernels use.
    """

def join_floats(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """
    The float32 values of parameters with split masters.
    """

def oracle_step(
    rule_name: str,
    options: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    step: typing.SupportsInt | typing.SupportsIndex,
    is_first: bool,
    parameter: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    gradient: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    states: collections.abc.Sequence[
        collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]
    ],
) -> tuple[list[float], list[list[float]]]:
    """
    One step in float64, element by element: (new parameter, new states).
    """

def posix_env() -> Env:
    """
    The system's own file system; one a process.
    """

def read_shard(
    env: Env,
    path: str,
    size_bytes: typing.SupportsInt | typing.SupportsIndex,
    block_bytes: typing.SupportsInt | typing.SupportsIndex,
    block_crc32c: bytes,
    targets: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ],
    num_threads: typing.SupportsInt | typing.SupportsIndex = 8,
    verify_all: bool = False,
) -> None:
    """
    targets: (file offset, size in bytes, address), in any order; the same part may be wanted in several places. Reads and checks the blocks that they touch (verify_all: all blocks). Raises DamagedCheckpointError naming the file and the block or size, OSError (BlockingIOError where the file is being overwritten), ValueError for targets outside the file. After an error targets may hold anything.
    """

def rule(name: str) -> Rule: ...
def supported_isas() -> list[str]: ...
def wait_for_gate(
    address: typing.SupportsInt | typing.SupportsIndex,
    size_bytes: typing.SupportsInt | typing.SupportsIndex,
    timeout_s: typing.SupportsFloat | typing.SupportsIndex,
) -> None:
    """
    Until the memory may be written; for writers other than sweeps. RuntimeError at the deadline.
    """

LAYOUT_VERSION: int = 1
NORM_BLOCK_ELEMENTS: int = 4096
NO_LONGER_FITS: int = -1
