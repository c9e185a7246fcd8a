"""The step on CUDA: native tables over device memory, one for each device of an optimizer, behind
the interface of the CPU's table. Nothing here waits for a device; a `DeviceOutcome` may."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tradewind._core import native

if TYPE_CHECKING:
    from tradewind.optim.device_outcome import JoinedReadings
    from tradewind.optim.fused import Group, Orders, Outcome

    Reading: TypeAlias = native.StepReading | JoinedReadings

LIBRARY_PATH = Path(__file__).parent.parent / "libtradewind_cuda.so"
# Of Muon's directions that are there at a time, beside the model: matrices beyond that take turns.
MAX_DIRECTION_BYTES = 256 << 20
# Readings of statistics that nobody has asked for yet: the newest ones are kept.
_KEPT_READINGS = 4
_COLUMNS = (
    "parameter_idx",
    "num_elements",
    "gradient_squares",
    "gradient_max",
    "num_zeros",
    "parameter_squares",
    "change_squares",
)


@lru_cache(maxsize=1)
def library() -> native.CudaLibrary:
    """The CUDA library of this package. Raises RuntimeError with the command that builds it."""
    import tradewind

    # In an editable install the library lies beside the native module, not beside this file.
    candidates = [LIBRARY_PATH, Path(str(native.__file__)).parent / LIBRARY_PATH.name]
    path = next((path for path in candidates if path.exists()), LIBRARY_PATH)
    loaded = native.CudaLibrary(str(path))
    code, text, num_devices, _ = loaded.probe()
    if code or not num_devices:
        raise RuntimeError(
            f"tradewind {tradewind.__version__}: CUDA tensors are here, but the CUDA library finds "
            f"no GPU ({text}); check the driver with nvidia-smi"
        )
    return loaded


def devices_of(parameters: Iterable[torch.Tensor], device_type: str) -> list[torch.device]:
    """The devices of this type that parameters lie on, in order of appearance."""
    return list(dict.fromkeys(p.device for p in parameters if p.device.type == device_type))


def device_lr(group: Mapping[str, Any], device_type: str) -> torch.Tensor | None:
    """The group's lr if it is a tensor that the device reads itself."""
    lr = group["lr"]
    return lr if isinstance(lr, torch.Tensor) and lr.device.type == device_type else None


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class DeviceTables:
    """The parameters of one optimizer on its devices; indices count over all of them.

    Parameters that lie elsewhere are kept by name, and refused once they have a gradient.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        masters: str,
        state_dtype: str,
        seed: int,
    ) -> None:
        self._tables = {
            device: native.DeviceTable(
                library(), device, masters, state_dtype, seed, MAX_DIRECTION_BYTES
            )
            for device in devices
        }
        self._indices: dict[torch.device, list[int]] = {device: [] for device in devices}
        self._places: list[tuple[native.DeviceTable, int] | None] = []
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._elsewhere: list[int] = []
        self._given: dict[int, dict[str, Any]] = {}  # state tensors by parameter
        self._readings: deque[Sequence[Reading]] = deque(maxlen=_KEPT_READINGS)

    def add_group(
        self, rule_name: str, parameters: Sequence[torch.Tensor], names: Sequence[str]
    ) -> None:
        start = len(self._parameters)
        for device, table in self._tables.items():
            chosen = [i for i, p in enumerate(parameters) if p.device == device]
            table.add_group(
                rule_name,
                [parameters[i] for i in chosen],
                [names[i] for i in chosen],
                [start + i for i in chosen],
            )
            self._indices[device] += [start + i for i in chosen]
        self._parameters += parameters
        self._names += names
        places = {
            index: (self._tables[device], local)
            for device, indices in self._indices.items()
            for local, index in enumerate(indices)
        }
        self._places = [places.get(index) for index in range(len(self._parameters))]
        self._elsewhere = [index for index, place in enumerate(self._places) if place is None]

    # --- as native.OptimizerTable ---------------------------------------------------------------

    def collect(self) -> int:
        for index in self._elsewhere:
            if self._parameters[index].grad is not None:
                raise NotImplementedError(
                    f"parameter {self._names[index]!r} is on {self._parameters[index].device}, "
                    f"others are on {next(iter(self._tables))}: parameters on the CPU and on CUDA "
                    "in one optimizer are not built yet; make one optimizer for each device"
                )
        total = 0
        for table in self._tables.values():
            num_collected = table.collect()
            if num_collected == native.NO_LONGER_FITS:
                return num_collected
            total += num_collected
        return total

    def missing_state(self) -> list[int]:
        return sorted(
            self._indices[device][local]
            for device, table in self._tables.items()
            for local in table.missing_state()
        )

    def add_state(self, parameter_idx: int, entry: dict[str, Any], is_first: bool) -> None:
        table, local = self._place(parameter_idx)
        table.add_state(local, entry, is_first)
        self._given[parameter_idx] = dict(entry)

    def set_state(self, parameter_idx: int, state_idx: int, values: torch.Tensor) -> None:
        table, local = self._place(parameter_idx)
        table.set_state(local, state_idx, values)

    def set_master(self, parameter_idx: int, values: torch.Tensor) -> None:
        table, local = self._place(parameter_idx)
        table.set_master(local, values)

    def owns_states(self) -> bool:
        return all(table.owns_states() for table in self._tables.values())

    def release_gradients(self) -> None:
        for table in self._tables.values():
            table.release_gradients()

    def statistics(self) -> dict[str, list[float]]:
        """Columns over the parameters of the newest step whose numbers have arrived; empty before.

        Never waits: as a rule they are those of the step before the last one.
        """
        ready = [r for r in self._readings if all(reading.is_ready() for reading in r)]
        if not ready:
            return {name: [] for name in _COLUMNS}
        while self._readings[0] is not ready[-1]:
            self._readings.popleft()
        columns: dict[str, list[float]] = {name: [] for name in _COLUMNS}
        for device, reading in zip(self._tables, ready[-1], strict=True):
            for name, values in reading.statistics().items():
                if name == "parameter_idx":
                    values = [self._indices[device][int(local)] for local in values]
                columns[name].extend(values)
        return columns

    # Gradients are measured at the step, in one launch. Measuring them in backward would read them
    # from the device's cache, but a launch pays only for some 16M elements at a time: as many as
    # the 50 MB of an H100 hold in 16 bits, and a few microseconds of its bandwidth. Not built yet.
    def set_hot(self, measures: bool) -> None: ...

    def hook_gradients(self, action: str) -> None:
        if action == "sum":
            for table in self._tables.values():
                table.hook_sums()
        elif action == "update":
            for table in self._tables.values():
                table.hook_updates()

    def install_hooks(self) -> None:
        for table in self._tables.values():
            table.install_hooks()

    def remove_hooks(self) -> None:
        for table in self._tables.values():
            table.remove_hooks()

    def sum_gradients(self) -> None:
        for table in self._tables.values():
            table.sum_gradients()

    def take_gradients(self, given: Sequence[torch.Tensor | None]) -> None:
        for device, table in self._tables.items():
            table.take_gradients([given[index] for index in self._indices[device]])

    # --- the update in backward -----------------------------------------------------------------

    def missing_state_anywhere(self) -> list[int]:
        return sorted(
            self._indices[device][local]
            for device, table in self._tables.items()
            for local in table.missing_state_anywhere()
        )

    def begin_backward_update(
        self,
        groups: list[Group],
        param_groups: Sequence[Mapping[str, Any]],
        *,
        wants_changes: bool,
    ) -> None:
        for device, table in self._tables.items():
            rates = [_moved(device_lr(group, device.type), device) for group in param_groups]
            table.begin_backward_update(groups, rates, wants_changes, _stream(device))

    def is_updating(self) -> bool:
        return any(table.is_updating() for table in self._tables.values())

    def end_backward_update(self) -> Outcome:
        from tradewind.optim.device_outcome import DeviceBackwardOutcome, JoinedReadings

        joined = [JoinedReadings(table.end_backward_update()) for table in self._tables.values()]
        self._readings.append(joined)
        return DeviceBackwardOutcome(joined, self._global_index, self._names)

    def _global_index(self, device_idx: int, local: int) -> int:
        return list(self._indices.values())[device_idx][local]

    # --- the step -------------------------------------------------------------------------------

    def step(
        self,
        groups: list[Group],
        param_groups: Sequence[Mapping[str, Any]],
        orders: Orders,
        clip_norm: float | None,
    ) -> Outcome:
        """Queue one step over what `collect()` took, for which all state is there."""
        measures = _measures(orders, clip_norm)
        for device, table in self._tables.items():
            table.prepare(
                groups,
                [_moved(device_lr(group, device.type), device) for group in param_groups],
                gradient_multiplier=orders.gradient_multiplier,
                max_norm=-1.0 if clip_norm is None else float(clip_norm),
                grad_scale=_moved(orders.grad_scale, device),
                found_inf=_moved(orders.found_inf, device),
                measures=measures,
                vetoes_nonfinite=orders.veto_nonfinite,
                wants_statistics=orders.measure,
                wants_changes=orders.wants_changes,
                is_capturing=_is_capturing(device),
            )
        if measures:
            for device, table in self._tables.items():
                table.measure(_stream(device))
            self._add_up_sums()
        readings = [table.update(_stream(device)) for device, table in self._tables.items()]
        return self._outcome(readings, orders, measures)

    def read_again(self, orders: Orders, clip_norm: float | None) -> Outcome:
        """The outcome of a graph's replay of the last step, which was of these orders."""
        kept = [each for each in self._readings if not any(r.is_captured for r in each)]
        self._readings = deque(kept, maxlen=_KEPT_READINGS)  # replays overwrite the captured ones
        readings = [table.read_again() for table in self._tables.values()]
        return self._outcome(readings, orders, _measures(orders, clip_norm))

    def _outcome(
        self, readings: Sequence[native.StepReading | None], orders: Orders, measures: bool
    ) -> Outcome:
        from tradewind.optim.device_outcome import DeviceOutcome

        arriving = [reading for reading in readings if reading is not None]
        if arriving and (orders.measure or orders.wants_changes):
            self._readings.append(arriving)
        return DeviceOutcome(
            arriving,
            self._nonfinite_name,
            vetoed=self.vetoed,
            measured=measures,
            gradient_multiplier=orders.gradient_multiplier,
        )

    def _add_up_sums(self) -> None:
        """The norm is joint, and one device's veto everybody's: in order of the devices."""
        if len(self._tables) == 1:
            return
        sums = [table.sums() for table in self._tables.values()]
        total = sums[0].clone()
        for other in sums[1:]:
            total += other.to(total.device, non_blocking=True)
        for each in sums:
            each.copy_(total, non_blocking=True)

    def _nonfinite_name(self, locals_: Sequence[int]) -> str:
        found = [
            self._indices[device][local]
            for device, local in zip(self._tables, locals_, strict=True)
            if local >= 0
        ]
        return self._names[min(found)] if found else ""

    def keep_loss_scale(
        self,
        initial: float,
        *,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        floor: float = 0.0,
    ) -> None:
        """From now on the device keeps a loss scale by `torch.amp.GradScaler`'s rules, not below
        `floor`: every step divides gradients by it and moves it, by its own veto and without a
        pass or a wait. It needs steps that measure and veto (`Orders`)."""
        for table in self._tables.values():
            table.keep_loss_scale(initial, growth_factor, backoff_factor, growth_interval, floor)

    def loss_scale(self) -> torch.Tensor:
        """The kept loss scale, in the device's memory: 0-d, float32. A table that is made anew,
        for edited groups, has its own."""
        return next(iter(self._tables.values())).loss_scale()

    def vetoed(self) -> torch.Tensor:
        """Of the last step, on the first device: a 0-d int32, not 0 where nothing was updated.
        The next step overwrites it."""
        return next(iter(self._tables.values())).vetoed()

    def carry_over(self, before: DeviceTables, states: Mapping[torch.Tensor, Any]) -> _Carrying:
        """What the table before this one knew of parameters whose state is still the one it gave.
        Call before their state is moved in, and the result afterwards."""
        kept = {
            id(parameter): index
            for index, parameter in enumerate(before._parameters)
            if index in before._given and _has_all(states.get(parameter), before._given[index])
        }
        return _Carrying(self, before, kept)

    @property
    def num_uploads(self) -> int:
        """Copies of descriptors to devices so far: none in a step where nothing has changed."""
        return sum(table.num_uploads for table in self._tables.values())

    def _place(self, index: int) -> tuple[native.DeviceTable, int]:
        place = self._places[index]
        assert place is not None
        return place


def _measures(orders: Orders, clip_norm: float | None) -> bool:
    return clip_norm is not None or orders.measure or orders.veto_nonfinite


class _Carrying:
    def __init__(self, table: DeviceTables, before: DeviceTables, kept: dict[int, int]) -> None:
        self._table = table
        self._before = before
        self._kept = kept  # id of a parameter: its index in the table before

    def apply(self) -> None:
        for device, table in self._table._tables.items():
            before = self._before._tables.get(device)
            if before is None:
                continue
            local_before = {i: n for n, i in enumerate(self._before._indices[device])}
            parameters = [self._table._parameters[i] for i in self._table._indices[device]]
            found = [self._kept.get(id(parameter), -1) for parameter in parameters]
            table.carry_over(before, [local_before.get(index, -1) for index in found])


def _has_all(entry: Mapping[str, Any] | None, given: Mapping[str, Any]) -> bool:
    return entry is not None and all(entry.get(name) is value for name, value in given.items())


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)
