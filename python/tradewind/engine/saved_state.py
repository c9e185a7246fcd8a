"""What an Engine's state is in a checkpoint: by names of parameters, so that another strategy,
world size, order of parameters or precision finds it. Tensors are the live ones: nothing is copied.

    model       the module's state dict, names without `_orig_mod.`
    optimizer   rule, storage, groups (options and names), states by parameter, step counts
    own         each rank's alone: random numbers, what a codec owes; under "periodic" its optimizer
    tracked     what `engine.track` was given
    progress    numbers of the Engine: updates, vetoes, loss scale, interval; data position; config
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tradewind.checkpoint import random_state
from tradewind.checkpoint.parts import PartialTensor, PerRank
from tradewind.engine.adoption import clean_name
from tradewind.engine.periodic import PeriodicSharing
from tradewind.engine.sharded import ShardedOptimizer
from tradewind.optim.fused import FusedOptimizer
from tradewind.track.facts import json_safe

if TYPE_CHECKING:
    from tradewind.engine.engine import Engine

Ranges = list[tuple[int, int]]  # (address, bytes)

FORMAT = 1
# What is kept for each rank besides rank 0's: samplers and the like, which may differ.
_MOST_OWN_BYTES = 1 << 20
EXPONENT_BLOCK_ELEMENTS = 256  # of the 8-bit states; as csrc/step/format.h has it


def collect(engine: Engine, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The state between two updates, none of which is half applied. `extra`: of `progress`."""
    sharing = engine._sharing
    periodic = sharing if isinstance(sharing, PeriodicSharing) else None
    state: dict[str, Any] = {
        "format": FORMAT,
        "model": _agreed(engine, model_state(engine)),
        "optimizer": optimizer_state(engine),
        "own": PerRank(_own(engine)),
        "tracked": {name: _tracked(engine, value) for name, value in engine._tracked.items()},
        "progress": {
            "num_steps": engine.num_steps,
            "num_skipped": engine._num_skipped,
            "not_yet_read_vetoes": _not_yet_read_vetoes(engine),
            "loss_scale": _loss_scale(engine),
            "world_size": engine.world_size,
            **extra,
        },
    }
    if periodic is not None:
        state["outer"] = periodic.outer_state()
    return state


def in_place(engine: Engine) -> Ranges:
    """Memory that only sweeps write, (address, bytes), on the CPU."""
    if engine.device.type != "cpu" or engine.optimizer.steps_on_device:
        return []
    table = optimizer_of(engine).native_table
    return [*engine._adopted.arena.memory_ranges(), *table.memory_ranges()]  # type: ignore[union-attr]


# --- the model ------------------------------------------------------------------------------------


def model_state(engine: Engine) -> dict[str, Any]:
    """By clean name. Under "periodic" parameters are where the last outer step ended: what ranks
    have in common."""
    found = {clean_name(name): value for name, value in engine.model.state_dict().items()}
    sharing = engine._sharing
    if isinstance(sharing, PeriodicSharing):
        consensus = sharing.consensus()
        for name, parameter in engine.model.named_parameters(remove_duplicate=False):
            if parameter in consensus and clean_name(name) in found:
                found[clean_name(name)] = consensus[parameter].detach()
    return found


def _agreed(engine: Engine, model: dict[str, Any]) -> dict[str, Any]:
    """Buffers are rank 0's: each rank's own forwards have changed them since they were shared."""
    if engine.world_size == 1:
        return model
    parameters = {clean_name(n) for n, _ in engine.model.named_parameters(remove_duplicate=False)}
    return {
        name: value if name in parameters else of_rank_0(value, engine.rank)
        for name, value in model.items()
    }


def of_rank_0(value: Any, rank: int) -> Any:
    """`value` with rank 0's tensors, where ranks need not have the same."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return PartialTensor(value.shape, value.dtype, [(0, flat)] if rank == 0 else [])
    if isinstance(value, Mapping):
        found = copy.copy(value)
        for key, inner in value.items():
            found[key] = of_rank_0(inner, rank)  # type: ignore[index]
        if hasattr(value, "_metadata"):  # versions that modules put at their state dicts
            found._metadata = value._metadata  # type: ignore[attr-defined]
        return found
    if isinstance(value, (list, tuple)):
        return type(value)(of_rank_0(each, rank) for each in value)
    return value


# --- the optimizer --------------------------------------------------------------------------------


def optimizer_of(engine: Engine) -> FusedOptimizer:
    """The one that holds states: of this rank's shard, where it has one."""
    sharded = _sharded(engine)
    return sharded.inner if sharded is not None else engine.optimizer


def optimizer_state(engine: Engine) -> dict[str, Any]:
    """Names, options and states. Ranks that hold parts give parts."""
    optimizer = engine.optimizer
    names = parameter_names(engine)
    sharded = _sharded(engine)
    state: dict[str, Any] = {
        "rule": type(optimizer).__name__,
        "masters": optimizer.masters,
        "state_dtype": optimizer.state_dtype,
        "groups": [
            {**_options(group), "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
    if isinstance(engine._sharing, PeriodicSharing):
        return state  # the rest is each rank's own
    if sharded is not None:
        return {**state, **sharded_states(engine, sharded, names)}
    return {**state, **whole_states(optimizer, names)}


def parameter_names(engine: Engine) -> dict[torch.Tensor, str]:
    """Of every parameter in the optimizer: the model's name, or its place in the groups."""
    adopted = engine._adopted
    of_model = dict(zip(adopted.parameters, adopted.names, strict=True))
    found: dict[torch.Tensor, str] = {}
    for number, group in enumerate(engine.optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            found[parameter] = of_model.get(parameter, f"group{number}.param{index}")
    return found


def whole_states(optimizer: FusedOptimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """`states` by parameter and state; `steps`, the counts, together in one tensor."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    counted: dict[str, torch.Tensor] = {}
    for parameter, name in names.items():
        entry = optimizer.state.get(parameter)
        if not entry:
            continue
        states[name] = {key: value for key, value in entry.items() if key != "step"}
        if "step" in entry:
            counted[name] = entry["step"]
    return {
        "states": states,
        "memory_order": _memory_order(names),
        "is_in_memory_order": False,
        "steps": _steps(counted),
    }


def _memory_order(names: Mapping[torch.Tensor, str]) -> dict[str, list[int]]:
    orders = ((name, dims_in_memory(parameter)) for parameter, name in names.items())
    return {name: dims for name, dims in orders if dims is not None}


def _steps(counted: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    values = [value.detach().reshape(()).float() for value in counted.values()]
    return {"names": list(counted), "values": torch.stack(values) if values else None}


def sharded_states(
    engine: Engine, sharded: ShardedOptimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, Any]:
    """As `whole_states`, of this rank's fragments, which are runs of elements as they lie: where
    that is not row-major (channels_last), tensors have the dimensions of `memory_order`."""
    kinds = _kinds_of_states(engine, sharded, names)
    shared = [name for parameter, name in names.items() if parameter.requires_grad]
    shapes = {name: _shape_in_memory(parameter) for parameter, name in names.items()}
    runs: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    counted: list[tuple[int, torch.Tensor]] = []
    index_of = {name: index for index, name in enumerate(shared)}
    for parameter, begin, entry in sharded.states():
        name = names[parameter]
        for key, value in entry.items():
            if key != "step":
                start = begin // EXPONENT_BLOCK_ELEMENTS if is_exponents(key) else begin
                runs.setdefault(name, {}).setdefault(key, []).append((start, value.reshape(-1)))
            elif begin == 0:
                counted.append((index_of[name], value.detach().reshape(1).float()))
    states: dict[str, Any] = {}
    for name in shared:
        for key, dtype in kinds.get(name, {}).items():
            whole = shapes[name]
            shape = (num_exponents(whole),) if is_exponents(key) else whole
            parts = sorted(runs.get(name, {}).get(key, []), key=lambda run: run[0])
            if key != "step":
                states.setdefault(name, {})[key] = PartialTensor(shape, dtype, parts)
    counts = any("step" in kind for kind in kinds.values())
    steps = PartialTensor((len(shared),), torch.float32, sorted(counted, key=lambda run: run[0]))
    return {
        "states": states,
        "memory_order": _memory_order(names),
        "is_in_memory_order": True,
        "steps": {"names": shared if counts else [], "values": steps if counts else None},
    }


def _kinds_of_states(
    engine: Engine, sharded: ShardedOptimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, torch.dtype]]:
    """Every parameter's states and their dtypes, also of those that this rank has no part of:
    ranks ask one another whenever that may have changed."""
    groups = [len(group["params"]) for group in engine.optimizer.param_groups]
    key = json.dumps([groups, sharded.has_begun])
    if sharded.known_kinds is None or sharded.known_kinds[0] != key:
        mine: dict[str, dict[str, str]] = {}
        for parameter, _, entry in sharded.states():
            kinds = mine.setdefault(names[parameter], {})
            kinds.update({k: str(v.dtype).removeprefix("torch.") for k, v in entry.items()})
        assert engine._sharing is not None
        told = engine._sharing.tell_all("states", json.dumps(mine))
        found: dict[str, dict[str, torch.dtype]] = {}
        for text in told:
            for name, kinds in json.loads(text).items():
                known = found.setdefault(name, {})
                known.update({k: getattr(torch, dtype) for k, dtype in kinds.items()})
        sharded.known_kinds = (key, found)
    return sharded.known_kinds[1]


def is_exponents(key: str) -> bool:
    return key.endswith("_exponents")


def num_exponents(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return -(-total // EXPONENT_BLOCK_ELEMENTS)


def dims_in_memory(parameter: torch.Tensor) -> list[int] | None:
    """Its dimensions from the outermost in memory; None where they lie in order."""
    if parameter.is_contiguous():
        return None
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))


def _shape_in_memory(parameter: torch.Tensor) -> tuple[int, ...]:
    dims = dims_in_memory(parameter)
    shape = tuple(parameter.shape)
    return shape if dims is None else tuple(shape[dim] for dim in dims)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in group if key not in ("params", "param_names")}


def _sharded(engine: Engine) -> ShardedOptimizer | None:
    return engine._sharing.sharded if engine._sharing is not None else None


# --- the rest -------------------------------------------------------------------------------------


def _own(engine: Engine) -> dict[str, Any]:
    own: dict[str, Any] = {"random": random_state.capture()}
    sharing = engine._sharing
    if sharing is None:
        return own
    own["rank"], own["world_size"] = sharing.rank, sharing.size
    own.update(sharing.own_state())
    if isinstance(sharing, PeriodicSharing):
        names = parameter_names(engine)
        own["optimizer"] = whole_states(engine.optimizer, names)
        own["model"] = _own_model(engine, sharing)
    return own


def _own_model(engine: Engine, sharing: PeriodicSharing) -> dict[str, torch.Tensor]:
    """Buffers, and between outer steps also the parameters."""
    alike = set() if sharing.consensus() else {clean_name(n) for n in engine._adopted.names}
    named = ((clean_name(name), value) for name, value in engine.model.state_dict().items())
    return {n: v for n, v in named if isinstance(v, torch.Tensor) and n not in alike}


def _tracked(engine: Engine, value: Any) -> dict[str, Any]:
    """Rank 0's for everybody; and each rank's own, where it may differ and is small, or the model
    differs, too."""
    state = value.state_dict()
    if engine.world_size == 1:
        return {"alike": state}
    is_own = isinstance(engine._sharing, PeriodicSharing) or (
        not isinstance(value, torch.nn.Module) and _num_bytes(state) <= _MOST_OWN_BYTES
    )
    if not is_own:
        return {"alike": of_rank_0(state, engine.rank)}
    return {"alike": of_rank_0(state, engine.rank), "own": PerRank(state)}


def _num_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(_num_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(_num_bytes(value) for value in state)
    return 0


def _not_yet_read_vetoes(engine: Engine) -> torch.Tensor | None:
    """How many of the updates were vetoed whose numbers a device has not delivered yet."""
    if not engine._awaited:
        return None
    found = [outcome.found_inf(engine.device).reshape(()) for _, outcome, _ in engine._awaited]
    return torch.stack(found).sum()


def _loss_scale(engine: Engine) -> dict[str, torch.Tensor] | None:
    scale = engine._loss_scale
    if scale is None:
        return None
    return {"scale": scale.scale, "growth_tracker": scale._growth_tracker}


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as JSON values, for "what changed"."""
    found: dict[str, Any] = json.loads(json.dumps(json_safe(config)))
    return found
