"""What every Tradewind optimizer shares: the `torch.optim.Optimizer` contract around the native
table. State tensors live in arenas and are handed out through `self.state`, where users, schedulers
and `state_dict()` find them as they find torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Literal, get_args, overload

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from tradewind._core import native
from tradewind.optim import cuda
from tradewind.optim.deferred import DeferredUpdate
from tradewind.optim.stored_state import master_values, state_values

Measuring = Literal["step", "backward"]
Masters = Literal["fp32", "split"]
StateDtype = Literal["fp32", "bf16", "8bit"]
OnGradient = Literal["measure", "sum", "update", "shared"]


def check_range(
    name: str, value: Any, *, low: float | None = None, below: float | None = None
) -> None:
    """Raise ValueError unless `value` is a number (not NaN) with low <= value < below.

    Tensors must hold one element.
    """
    expected = "a number"
    if low is not None:
        expected = f"a number >= {low:g}" if below is None else f"a number in [{low:g}, {below:g})"
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"{name}: expected a tensor of one element, got shape {tuple(value.shape)}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected {expected}, got {value!r}") from None
    out_of_range = (low is not None and number < low) or (below is not None and number >= below)
    if math.isnan(number) or out_of_range:
        raise ValueError(f"{name}: expected {expected}, got {number:g}")


def check_betas(betas: Any) -> None:
    """Raise ValueError unless `betas` is two numbers in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas!r}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, low=0.0, below=1.0)


@dataclass
class Outcome:
    """What one step did. `norm` is that of the unscaled gradients, before clipping."""

    norm: float | torch.Tensor | None = None
    clip_factor: float = 1.0
    num_nonfinite: int = 0
    first_nonfinite_name: str = ""
    num_hot: int = 0
    applied: bool = True
    gradient_multiplier: float = 1.0  # what gradients are multiplied by to be those of the loss
    num_withheld: int = 0  # parameters not updated, where each has its own veto
    # Whose gradients were not finite before they were summed, where ranks share them.
    nonfinite: tuple[native.NonFiniteGradient, ...] = ()

    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait for a device."""
        return True

    def take(self, measured: native.MeasureResult) -> float:
        """What was measured of gradients as they lie in memory; `gradient_multiplier` is set.
        Returns the norm."""
        self.norm = norm = measured.norm * abs(self.gradient_multiplier)
        self.num_nonfinite = measured.num_nonfinite
        self.first_nonfinite_name = measured.first_nonfinite_name
        self.num_hot = measured.num_hot
        return norm

    def found_inf(self, device: torch.device) -> torch.Tensor:
        """1 where the update was vetoed, else 0: 0-d, float32, on the device, without a wait."""
        return torch.full((), float(not self.applied), device=device)


# Option values in the rule's order, maximize, and what a rule with matrices takes besides.
Group = tuple[list[float], bool, native.MatrixOptions | None]


@dataclass
class Orders:
    """What an Engine asks of the next step, beyond what the optimizer does by itself."""

    gradient_multiplier: float = 1.0
    measure: bool = False
    veto_nonfinite: bool = False
    wants_changes: bool = False  # how far each parameter moved, for statistics
    grad_scale: torch.Tensor | None = None  # a loss scale: gradients are divided by it
    found_inf: torch.Tensor | None = None  # not zero: somebody else's veto

    def multiplier(self) -> float:
        """What gradients are multiplied by to be those of the loss."""
        if self.grad_scale is None:
            return self.gradient_multiplier
        return self.gradient_multiplier / float(self.grad_scale)


def _check_choice(name: str, given: Any, choices: tuple[Any, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {given!r}")


def _is_same(now: list[list[Any]], seen: list[list[Any]]) -> bool:
    """Whether both hold the very same objects in the same lists."""
    return list(map(len, now)) == list(map(len, seen)) and all(
        all(map(is_, a, b)) for a, b in zip(now, seen, strict=True)
    )


class FusedOptimizer(Optimizer):
    """Base of `tw.optim`. A subclass gives its rule's name, option values and checks."""

    # Parameters on devices of this type are stepped there.
    _device_type = "cuda"
    # Rebuilt whenever groups, rules or the state dicts change under us.
    _table: native.OptimizerTable | cuda.DeviceTables | None = None
    _orders: Orders | None = None
    _outcome: Outcome | None = None
    clip_norm: float | None = None
    masters: Masters | None = None
    state_dtype: StateDtype | None = None
    seed: int = 0

    @staticmethod
    def _rule_name(group: dict[str, Any]) -> str:
        raise NotImplementedError

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        raise NotImplementedError

    @staticmethod
    def _matrix_options(group: dict[str, Any]) -> native.MatrixOptions | None:
        """For a rule that needs whole matrices."""
        return None

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling to the step, by grad_scale and found_inf.

        As in torch where fused=True asks for it: Lightning refuses to clip otherwise. And where
        gradients are float16, which torch's scaler does not unscale.
        """
        return bool(self.defaults.get("fused")) or any(
            tensor is not None and tensor.dtype == torch.float16
            for group in self.param_groups
            for parameter in group["params"]
            for tensor in (parameter, parameter.grad)
        )

    @property
    def outcome(self) -> Outcome | None:
        """What the last step did; None before the first."""
        return self._outcome

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        clip_norm: float | None = None,
        measure: Measuring = "step",
        masters: Masters | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
    ) -> None:
        if clip_norm is not None:
            check_range("clip_norm", clip_norm, low=0.0)
        _check_choice("measure", measure, get_args(Measuring))
        _check_choice("masters", masters, (None, *get_args(Masters)))
        _check_choice("state_dtype", state_dtype, (None, *get_args(StateDtype)))
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed: expected a whole number in [0, 2**64), got {seed!r}")
        self._check_group(defaults)
        self._on_gradient: OnGradient | None = None
        self.clip_norm = clip_norm
        self.masters = masters
        self.state_dtype = state_dtype
        self.seed = seed
        super().__init__(params, defaults)
        if measure == "backward":
            self.hook_gradients("measure")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; options it does not set are the optimizer's defaults.

        Raises ValueError, with the optimizer unchanged, for options out of range and for a
        parameter that is already in a group, or twice in this one.
        """
        if "clip_norm" in param_group:
            raise ValueError(
                "param group: expected no clip_norm, as the norm is joint over all groups, got "
                f"{param_group['clip_norm']!r}; give it to {type(self).__name__}(clip_norm=...)"
            )
        merged = {**self.defaults, **param_group}
        self._check_group(merged)
        given = param_group["params"]
        # torch refuses a set (it has no order) and a single tensor itself.
        if not isinstance(given, (torch.Tensor, set)):
            given = param_group["params"] = list(given)
            tensors = [item[1] if isinstance(item, tuple) else item for item in given]
            if len({id(tensor) for tensor in tensors}) != len(tensors):
                raise ValueError(
                    "params: expected each parameter once, got a parameter group with duplicate "
                    "parameters"
                )
        self._check_switches(merged)
        super().add_param_group(param_group)

    def _check_switches(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        if group.get("differentiable"):
            raise NotImplementedError(f"{name}(differentiable=True) is not built yet")
        given = group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else given
        tensors = [item[1] if isinstance(item, tuple) else item for item in listed]
        # On a device every step may be captured.
        if group.get("capturable") and any(t.device.type != self._device_type for t in tensors):
            raise NotImplementedError(
                f"{name}(capturable=True) is not built yet for the CPU: expected every parameter "
                f"on {self._device_type}; move the model before making the optimizer"
            )

    # --- the step -------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # One graph break under torch.compile, as the native pass holds nothing to trace. Unlike
    # torch.compiler.disable, this one imports the compiler at the first call alone.
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Returns the closure's loss, if one is given.

        Raises:
            RuntimeError: a sparse gradient, or one of another dtype, device or shape than its
                parameter; nothing is updated.
            ValueError: an option that has become NaN; nothing is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        orders = self._take_orders()
        groups = self._groups()
        table = self._current_table()
        if table.is_updating():
            self._outcome = self._end_backward_update(table)
            return loss
        num_collected = table.collect()
        if num_collected == native.NO_LONGER_FITS:  # p.data = other, .to(memory_format=...)
            table = self._build_table(self._rule_names)
            num_collected = table.collect()
        if isinstance(table, cuda.DeviceTables):
            self._add_states(table, table.missing_state())
            self._outcome = table.step(groups, self.param_groups, orders, self.clip_norm)
        else:
            self._outcome = self._sweep(table, groups, orders)
        return loss

    def _groups(self) -> list[Group]:
        groups = [
            (
                self._host_values(group),
                bool(group.get("maximize", False)),
                self._matrix_options(group),
            )
            for group in self.param_groups
        ]
        self._check_numbers([values for values, _, _ in groups])
        return groups

    def _end_backward_update(self, table: native.OptimizerTable | cuda.DeviceTables) -> Outcome:
        if isinstance(table, cuda.DeviceTables):
            return table.end_backward_update()
        result = table.end_backward_update()
        return Outcome(
            norm=result.norm,
            num_nonfinite=result.num_nonfinite,
            first_nonfinite_name=result.first_nonfinite_name,
            num_hot=result.num_updated,
            applied=result.num_updated > 0 or result.num_withheld == 0,
            num_withheld=result.num_withheld,
        )

    def _host_values(self, group: dict[str, Any]) -> list[float]:
        """Option values; 0 stands for an lr that the device reads itself, without a wait."""
        is_there = cuda.device_lr(group, self._device_type) is not None and self.steps_on_device
        return self._option_values({**group, "lr": 0.0} if is_there else group)

    def _take_orders(self) -> Orders:
        orders, self._orders = self._orders or Orders(), None
        # Set by torch.amp.GradScaler for the length of one step.
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if grad_scale is None and found_inf is None:
            return orders
        return replace(orders, grad_scale=grad_scale, found_inf=found_inf)

    def _sweep(
        self,
        table: native.OptimizerTable,
        groups: list[Group],
        orders: Orders,
    ) -> Outcome:
        outcome = Outcome()
        if orders.found_inf is not None and float(orders.found_inf):
            outcome.applied = False
            table.skip()
            return outcome
        multiplier = outcome.gradient_multiplier = orders.multiplier()
        if self.clip_norm is not None or orders.measure or orders.veto_nonfinite:
            measured = table.measure()
            norm = outcome.take(measured)
            if orders.veto_nonfinite and measured.num_nonfinite:
                outcome.applied = False
                table.skip()
                return outcome
            if self.clip_norm is not None:
                outcome.clip_factor = native.clip_factor(norm, float(self.clip_norm))
        self._add_states(table, table.missing_state())
        table.sweep(groups, multiplier * outcome.clip_factor, orders.wants_changes)
        return outcome

    def _add_states(
        self, table: native.OptimizerTable | cuda.DeviceTables, indices: list[int]
    ) -> None:
        for index in indices:
            self._add_state(table, index, is_first=True)
        if indices:
            self._entries_seen = list(self.state.values())

    def _check_numbers(self, values_of_groups: list[list[float]]) -> None:
        """Raise before anything is touched: a NaN may come from a scheduler, at any step."""
        for index, values in enumerate(values_of_groups):
            if any(map(math.isnan, values)):
                names = native.rule(self._rule_name(self.param_groups[index])).option_names
                name = next(n for n, v in zip(names, values, strict=True) if math.isnan(v))
                raise ValueError(
                    f"param group {index}: expected a number for {name}, got NaN; nothing was "
                    "updated"
                )

    # --- the table and the state ----------------------------------------------------------------

    def _current_table(self) -> native.OptimizerTable | cuda.DeviceTables:
        table = self._table
        rule_names = [self._rule_name(group) for group in self.param_groups]
        # Users edit groups and state in place: every list and dict is compared by identity.
        if (
            table is None
            or rule_names != self._rule_names
            or not _is_same(self._parameters_of_groups(), self._parameters_seen)
            or self.state is not self._state_seen
            or not _is_same([list(self.state.values())], [self._entries_seen])
            or not table.owns_states()
        ):
            table = self._build_table(rule_names)
        return table

    def _parameters_of_groups(self) -> list[list[torch.Tensor]]:
        return [group["params"] for group in self.param_groups]

    @property
    def steps_on_device(self) -> bool:
        """Whether any parameter is stepped by the device's kernels."""
        parameters = (p for group in self.param_groups for p in group["params"])
        return any(p.device.type == self._device_type for p in parameters)

    def _empty_table(self) -> native.OptimizerTable | cuda.DeviceTables:
        storage = (self.masters or "none", self.state_dtype or "parameter", self.seed)
        parameters = [p for group in self.param_groups for p in group["params"]]
        devices = cuda.devices_of(parameters, self._device_type)
        return cuda.DeviceTables(devices, *storage) if devices else native.OptimizerTable(*storage)

    def _build_table(self, rule_names: list[str]) -> native.OptimizerTable | cuda.DeviceTables:
        """A table over the present groups, with whatever state there is copied into its arenas."""
        table = self._empty_table()
        carried = None
        if isinstance(table, cuda.DeviceTables) and isinstance(self._table, cuda.DeviceTables):
            carried = table.carry_over(self._table, self.state)
        self._table_parameters: list[torch.Tensor] = []
        self._table_names: list[str] = []
        self._table_rules: list[native.Rule] = []
        for group_index, (group, rule_name) in enumerate(
            zip(self.param_groups, rule_names, strict=True)
        ):
            names = group.get("param_names", [])
            if len(names) != len(group["params"]):  # not given, or "params" edited without them
                names = [f"group{group_index}.param{i}" for i in range(len(group["params"]))]
            table.add_group(rule_name, group["params"], names)
            self._table_parameters += group["params"]
            self._table_names += names
            self._table_rules += [native.rule(rule_name)] * len(names)
        for index, parameter in enumerate(self._table_parameters):
            if self.state.get(parameter):
                self._adopt_state(table, index, self.state[parameter])
        if carried is not None:
            carried.apply()
        self._rule_names = rule_names
        self._parameters_seen = [list(parameters) for parameters in self._parameters_of_groups()]
        self._state_seen = self.state
        self._entries_seen = list(self.state.values())
        if self._on_gradient is not None:
            table.hook_gradients(self._on_gradient)
        self._table = table
        return table

    def _add_state(
        self, table: native.OptimizerTable | cuda.DeviceTables, index: int, *, is_first: bool
    ) -> None:
        entry = self.state[self._table_parameters[index]]
        table.add_state(index, entry, is_first)

    def _adopt_state(
        self,
        table: native.OptimizerTable | cuda.DeviceTables,
        index: int,
        entry: dict[str, Any],
    ) -> None:
        """Move the state that stands in `entry` (ours of an older table, torch's, a copy's) in,
        whatever it was stored as."""
        rule = self._table_rules[index]
        parameter = self._table_parameters[index]
        old = dict(entry)
        values = {name: state_values(rule, name, old, parameter) for name in rule.state_names}
        step = old.get("step")
        master = master_values(old, parameter)
        if step is None and master is None and all(value is None for value in values.values()):
            return
        for name, value in (*values.items(), ("master", master)):
            if value is not None and value.shape != parameter.shape:
                raise ValueError(
                    f"state {name!r} of parameter {self._table_names[index]!r}: expected shape "
                    f"{tuple(parameter.shape)}, got {tuple(value.shape)}; this state belongs to "
                    "other parameters"
                )
        # What another way to store it needed, and this one may not.
        for name in ("master", "master_low", *(f"{name}_exponents" for name in values)):
            entry.pop(name, None)
        is_first = not rule.counts_steps and any(value is None for value in values.values())
        self._add_state(table, index, is_first=is_first)
        if step is not None and "step" in entry:
            entry["step"].fill_(float(step))
        if master is not None and ("master" in entry or "master_low" in entry):
            table.set_master(index, master)
        for number, (name, value) in enumerate(values.items()):
            if value is None:
                continue
            same = old[name].dtype == entry[name].dtype
            if same and f"{name}_exponents" in entry:  # to the bit, without decoding
                entry[name].copy_(old[name])
                entry[f"{name}_exponents"].copy_(old[f"{name}_exponents"])
            elif same:
                entry[name].copy_(old[name])
            else:
                table.set_state(index, number, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of its counterpart in `torch.optim`."""
        # torch casts every state but "step" to the parameter's dtype; keep what was saved. Hooks
        # may give another dict, so take it from the one that super() sees.
        kept: dict[int, dict[str, Any]] = {}

        def keep(_optimizer: Optimizer, given: dict[str, Any]) -> None:
            kept.update(given["state"])

        handle = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, own, strict=False):
            for name, value in kept.get(index, {}).items():
                if isinstance(value, torch.Tensor) and name != "step":
                    # Of its own memory: torch's dict may share it with another optimizer.
                    self.state[parameter][name] = value.detach().clone().to(parameter.device)
        self._table = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_on_gradient", None)
        self._outcome = None
        for group in self.param_groups:
            for name, value in self.defaults.items():
                # A dict from before a switch existed was written with the switch off.
                is_switch = isinstance(value, bool) and name != "decoupled_weight_decay"
                group.setdefault(name, False if is_switch else value)
        self._table = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("clip_norm", "masters", "state_dtype", "seed", "_on_gradient")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    # --- for the Engine -------------------------------------------------------------------------

    @property
    def native_table(self) -> native.OptimizerTable | cuda.DeviceTables:
        """The table over the present groups and state, brought up to date."""
        return self._current_table()

    def arena_ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of memory on the CPU that only this optimizer's steps write, which a
        checkpoint may read while training goes on: the next step waits for what is being read."""
        table = self._table
        return table.memory_ranges() if isinstance(table, native.OptimizerTable) else []

    def store(self, *, masters: Masters | None, state_dtype: StateDtype | None) -> None:
        """Store masters and state in another way from now on; state that is there is converted."""
        _check_choice("masters", masters, (None, *get_args(Masters)))
        _check_choice("state_dtype", state_dtype, (None, *get_args(StateDtype)))
        self.masters = masters
        self.state_dtype = state_dtype
        self._table = None

    def start_masters(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give parameters their state now, with a master of these float32 values; the parameters
        become their rounding."""
        table = self._current_table()
        for index, parameter in enumerate(self._table_parameters):
            if parameter in values:
                if not self.state.get(parameter):
                    self._add_state(table, index, is_first=True)
                table.set_master(index, values[parameter])
        self._entries_seen = list(self.state.values())

    def prepare_states(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give these parameters state as if they had stepped before, for whoever fills it now."""
        chosen = {id(parameter) for parameter in parameters}
        table = self._current_table()
        for index, parameter in enumerate(self._table_parameters):
            if id(parameter) in chosen:
                self._add_state(table, index, is_first=False)
        self._entries_seen = list(self.state.values())

    def hook_gradients(self, action: OnGradient) -> None:
        """What happens to a gradient in backward as soon as it is there: it is measured while it is
        in cache ("measure"), 16-bit ones are summed in float32 too ("sum"), its parameter is
        stepped ("update", between `begin_backward_update()` and `step()`), or nothing, as whoever
        shares it brings its measure ("shared")."""
        self._on_gradient = action
        self._table = None
        self._current_table()

    def begin_backward_update(self, *, wants_changes: bool) -> None:
        """Step each parameter as soon as backward has its gradient; `step()` then ends the update.
        Raises as `step()` does, before anything is touched."""
        groups = self._groups()
        table = self._current_table()
        self._add_states(table, table.missing_state_anywhere())
        if isinstance(table, cuda.DeviceTables):
            table.begin_backward_update(groups, self.param_groups, wants_changes=wants_changes)
        else:
            table.begin_backward_update(groups, wants_changes)

    def defer(self, orders: Orders) -> DeferredUpdate:
        """Begin an update that is applied in parts, in place of `step()`, with today's options.
        Raises as `step()` does, before anything is touched."""
        self._outcome = Outcome()
        return DeferredUpdate(self, orders, self._outcome)

    def step_key(self, orders: Orders) -> tuple[Any, ...]:
        """Equal for two steps that queue the same work on the same memory, so that a CUDA graph of
        one is the other. A tensor lr is read by the device and may change."""
        values = [
            (*self._host_values(group), id(group["lr"]), bool(group.get("maximize", False)))
            for group in self.param_groups
        ]
        gradients = [
            None if p.grad is None else (p.grad.data_ptr(), p.grad.dtype, p.grad.stride())
            for p in self._table_parameters
        ]
        facts = (id(self._current_table()), self.clip_norm, orders.gradient_multiplier)
        tensors = (id(orders.grad_scale), id(orders.found_inf))
        flags = (orders.measure, orders.veto_nonfinite, orders.wants_changes)
        return (*facts, *tensors, *flags, *map(tuple, values), *gradients)

    def replayed(self, orders: Orders) -> Outcome:
        """The outcome of a replay of a graph that has captured `step()` under these orders."""
        table = self._current_table()
        assert isinstance(table, cuda.DeviceTables)
        self._outcome = table.read_again(orders, self.clip_norm)
        return self._outcome

    def statistics(self) -> tuple[list[torch.Tensor], dict[str, list[float]]]:
        """The parameters by the table's index, and what the last step saw of those it went over."""
        table = self._current_table()
        return self._table_parameters, table.statistics()

    def release_gradients(self) -> None:
        """Drop the gradients of the parameters that the last `step()` went over."""
        if self._table is not None:
            self._table.release_gradients()

    def order(self, orders: Orders) -> None:
        """Orders for the next `step()` alone."""
        self._orders = orders
