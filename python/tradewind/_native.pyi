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
    "CudaLibrary",
    "DeviceTable",
    "ExchangeStatistics",
    "Layout",
    "MatrixOptions",
    "MeasureResult",
    "NonFiniteGradient",
    "OptimizerTable",
    "ParameterArena",
    "Rule",
    "ShareOptions",
    "SharedGradients",
    "SharingError",
    "Slot",
    "StepReading",
    "clip_factor",
    "decode_blocks",
    "isa",
    "join_floats",
    "oracle_step",
    "rule",
    "supported_isas",
]

class SharingError(RuntimeError): ...

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
    def update(self, stream: typing.SupportsInt | typing.SupportsIndex) -> StepReading: ...
    def vetoed(self) -> torch.Tensor: ...
    @property
    def num_uploads(self) -> int: ...

class ShareOptions:
    codec: str
    error_feedback: bool
    measures: bool
    settles_itself: bool
    shards_update: bool
    sums_microbatches: bool
    def __init__(self) -> None: ...
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
    def hosts(self) -> list[str]: ...
    @hosts.setter
    def hosts(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def low_rank(self) -> int: ...
    @low_rank.setter
    def low_rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def patience_s(self) -> float: ...
    @patience_s.setter
    def patience_s(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
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

class SharedGradients:
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
    def abandon(self, arg0: str) -> None: ...
    def assign_gradients(self) -> None: ...
    def bucket_of(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def digest(self) -> str: ...
    def end_microbatch(self) -> None: ...
    def fail(self, arg0: str) -> None: ...
    def feedback(self) -> dict[str, torch.Tensor]:
        """
        name -> float32 values: what a lossy codec still owes. Between rounds.
        """
    def finish_backward(self, has_next: bool = True) -> None: ...
    def fragments(self) -> list[tuple[int, int, int]]:
        """
        (parameter, first element, end) of each run that this rank updates.
        """
    def give_measures(
        self,
        arg0: OptimizerTable,
        arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def install_hooks(self) -> None: ...
    def is_backward_open(self) -> bool: ...
    def is_mean_final(self) -> bool: ...
    def is_open(self) -> bool: ...
    def is_syncing(self) -> bool: ...
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
    def remove_hooks(self) -> None: ...
    def scale(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def set_deferred(self, arg0: bool) -> None: ...
    def set_divide_by_all(self, arg0: bool) -> None: ...
    def set_forward_order(
        self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    def set_shards(
        self,
        arg0: OptimizerTable,
        arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None: ...
    def set_syncing(self, arg0: bool) -> None: ...
    def settle(self) -> None: ...
    def settle_bucket(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def shadow_round(self, has_next: bool = True) -> None: ...
    def statistics(self) -> ExchangeStatistics: ...
    def take_buffers(self) -> None: ...
    def tell(self, arg0: str) -> None: ...
    def use_all(self) -> None: ...

def clip_factor(
    norm: typing.SupportsFloat | typing.SupportsIndex,
    max_norm: typing.SupportsFloat | typing.SupportsIndex,
) -> float: ...
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

def rule(name: str) -> Rule: ...
def supported_isas() -> list[str]: ...

LAYOUT_VERSION: int = 1
NORM_BLOCK_ELEMENTS: int = 4096
NO_LONGER_FITS: int = -1
