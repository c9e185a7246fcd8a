"""How an Engine takes what a checkpoint holds. Where names, dtypes and shapes are the Engine's own,
tensors are read straight into its memory; otherwise the whole state comes in fresh memory and is
converted: another precision, other masters, another way to store states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tradewind.checkpoint import random_state
from tradewind.checkpoint.errors import StateMismatchError
from tradewind.checkpoint.parts import PartialTensor, PerRank
from tradewind.checkpoint.targets import Stored
from tradewind.engine import saved_state
from tradewind.engine.adoption import clean_name
from tradewind.engine.converted_state import convert
from tradewind.engine.periodic import PeriodicSharing

if TYPE_CHECKING:
    from tradewind.engine.engine import Engine

Target = torch.Tensor | PartialTensor
_MOST_SHOWN = 4


class Restoring:
    """One restore of one Engine, which has made no update yet: `into` says where tensors go, `take`
    makes the rest of what came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_direct = False
        self._random: dict[str, Any] | None = None
        self._groups: Mapping[str, Any] = {}

    def into(self, saved: Any) -> dict[str, Target]:
        """By name of a stored tensor: the memory that is to be filled with it as it is.

        `saved` has Stored in place of tensors. Raises StateMismatchError that says which names or
        shapes differ, before anything changes.
        """
        if not isinstance(saved, Mapping) or not {"model", "optimizer", "progress"} <= set(saved):
            raise StateMismatchError(
                "checkpoint: expected the state of an Engine, got one that something else saved; "
                "read it with tw.Checkpointer(path).restore(...), and give the Engine another "
                "directory"
            )
        model = saved_state.model_state(self._engine)
        _check_model(model, saved["model"])
        found = _direct(model, saved["model"])
        states = self._states_of(saved)
        of_optimizer = self._optimizer_targets(saved["optimizer"], states)
        self._is_direct = found is not None and of_optimizer is not None
        if found is None or of_optimizer is None:
            return {}
        return {**found, **of_optimizer}

    def take(self, state: Mapping[str, Any]) -> None:
        """`state` as saved, with its tensors where `into` wanted them and in fresh memory."""
        engine = self._engine
        states = self._states_of(state)
        if self._is_direct:
            _set_steps(engine, states["steps"] if states else None)
        else:
            convert(engine, state["model"], state["optimizer"], states)
        _take_extra_state(engine.model, state["model"])
        self._groups = state["optimizer"]
        self.take_options()
        own = state["own"].value if state["own"].is_known else None
        self._take_sharing(state, own)
        _ = engine.optimizer.native_table  # masters meet their parameters before the next forward
        self._take_progress(state["progress"])
        engine._untracked_state = {
            name: self._tracked(found, own) for name, found in state["tracked"].items()
        }
        for name, target in engine._tracked.items():
            if name in engine._untracked_state:
                target.load_state_dict(engine._untracked_state.pop(name))
        self._random = own["random"] if own is not None else None
        self.restore_random()

    def take_options(self) -> None:
        """The param groups' options as they were saved."""
        _take_options(self._engine, self._groups)

    def restore_random(self) -> None:
        """Random numbers go on as on this rank, where there was one."""
        if self._random is not None:
            random_state.restore(self._random)

    # --- the optimizer's states -----------------------------------------------------------------

    def _states_of(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """`states`, `steps` and their order: alike on all ranks, or this rank's own."""
        optimizer: Mapping[str, Any] = state["optimizer"]
        if "states" in optimizer:
            return optimizer
        own = state["own"]
        if not own.is_known or own.value["world_size"] != self._engine.world_size:
            return None
        if self._engine.world_size > 1 and not isinstance(self._engine._sharing, PeriodicSharing):
            return None
        found: Mapping[str, Any] = own.value["optimizer"]
        return found

    def _optimizer_targets(
        self, saved: Mapping[str, Any], states: Mapping[str, Any] | None
    ) -> dict[str, Target] | None:
        """Where the states go; None where they must be converted."""
        engine = self._engine
        optimizer = engine.optimizer
        storage = (type(optimizer).__name__, optimizer.masters, optimizer.state_dtype)
        if states is None or storage != (saved["rule"], saved["masters"], saved["state_dtype"]):
            return None
        names = saved_state.parameter_names(engine)
        of_name = {name: parameter for parameter, name in names.items()}
        if not set(states["states"]) <= set(of_name):
            return None
        chosen = {of_name[name] for name in states["states"]}
        sharded = engine._sharing.sharded if engine._sharing is not None else None
        if sharded is not None:
            sharded.prepare_states(chosen)
            mine = saved_state.sharded_states(engine, sharded, names)
        else:
            optimizer.prepare_states(chosen)
            mine = saved_state.whole_states(optimizer, names)
        return _matched(mine, states)

    # --- what is not the model's or the optimizer's ---------------------------------------------

    def _take_sharing(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        sharing = self._engine._sharing
        if sharing is None:
            return
        if own is not None:
            sharing.load_own_state(own)
        if not isinstance(sharing, PeriodicSharing):
            return
        is_same = own is not None and own.get("world_size") == sharing.size and "num_local" in own
        sharing.resume(state.get("outer"), int(own["num_local"]) if is_same and own else 0)
        if is_same and own:
            _load_some(self._engine.model, own["model"])

    def _take_progress(self, progress: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.num_steps = int(progress["num_steps"])
        not_read = progress["not_yet_read_vetoes"]
        engine._num_skipped = int(progress["num_skipped"]) + (
            int(not_read) if not_read is not None else 0
        )
        scale = progress["loss_scale"]
        if engine._loss_scale is not None and scale is not None:
            engine._loss_scale.load_state_dict(
                {"scale": float(scale["scale"]), "growth_tracker": int(scale["growth_tracker"])}
            )
        if engine.run is not None:
            engine.run.step = engine.num_steps

    def _tracked(self, found: Mapping[str, Any], own: Any) -> Any:
        """Of this rank, as many ranks as then; else rank 0's."""
        mine: PerRank | None = found.get("own")
        is_same = own is not None and own.get("world_size", 1) == self._engine.world_size
        if mine is not None and mine.is_known and is_same:
            return mine.value
        return found["alike"]


def _check_model(model: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    tensors = {name for name, value in model.items() if isinstance(value, torch.Tensor)}
    stored = {name for name, value in saved.items() if isinstance(value, Stored)}
    problems = [f"{name!r} is not in the checkpoint" for name in sorted(tensors - stored)]
    problems += [f"{name!r} is in the checkpoint alone" for name in sorted(stored - tensors)]
    for name in sorted(tensors & stored):
        have, was = model[name], saved[name]
        if tuple(have.shape) != was.shape:
            problems.append(f"{name!r}: expected shape {tuple(have.shape)}, was {was.shape}")
        elif have.dtype != was.dtype and not (
            have.dtype.is_floating_point and was.dtype.is_floating_point
        ):
            problems.append(f"{name!r}: expected {have.dtype}, was {was.dtype}")
    if problems:
        shown = "; ".join(problems[:_MOST_SHOWN])
        more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        fits = len(tensors & stored)
        raise StateMismatchError(
            f"checkpoint: is of another model: {shown}{more}. Nothing was changed. Partial mode "
            f"would fill the {fits} tensors whose names are alike, where shapes fit: "
            "tw.Checkpointer(PATH).restore({'model': model}, partial=True) before the Engine is "
            "made, which then gets another directory"
        )


def _direct(model: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Target] | None:
    found: dict[str, Target] = {}
    for name, stored in saved.items():
        if isinstance(stored, Stored):
            if model[name].dtype != stored.dtype:
                return None
            found[stored.name] = model[name]
    return found


def _matched(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Target] | None:
    """Where each state goes, if all of them fit as they are."""
    found: dict[str, Target] = {}
    for name, states in saved["states"].items():
        here = mine["states"].get(name, {})
        if set(here) != set(states):
            return None
        lay = saved["memory_order"].get(name) if saved["is_in_memory_order"] else None
        lies = mine["memory_order"].get(name) if mine["is_in_memory_order"] else None
        order_then, order_now = (s["memory_order"].get(name) for s in (saved, mine))
        for key, stored in states.items():
            target = here[key]
            has_shape = not saved_state.is_exponents(key)
            if isinstance(target, torch.Tensor) and lay is not None and has_shape:
                target = target.permute(lay)
            elif isinstance(target, PartialTensor) and lay != lies and has_shape:
                return None
            if not has_shape and order_then != order_now:
                return None
            if target.dtype != stored.dtype or tuple(target.shape) != stored.shape:
                return None
            found[stored.name] = target
    return found


def _set_steps(engine: Engine, steps: Mapping[str, Any] | None) -> None:
    if not steps or steps["values"] is None:
        return
    counts = dict(zip(steps["names"], steps["values"].tolist(), strict=True))
    for parameter, entry in _entries(engine):
        name = saved_state.parameter_names(engine)[parameter]
        if "step" in entry and name in counts:
            entry["step"].fill_(counts[name])


def _entries(engine: Engine) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    sharded = engine._sharing.sharded if engine._sharing is not None else None
    if sharded is not None:
        return [(parameter, entry) for parameter, _, entry in sharded.states()]
    return [(p, entry) for p, entry in engine.optimizer.state.items() if entry]


# --- options and what is no tensor ----------------------------------------------------------------


def _take_options(engine: Engine, saved: Mapping[str, Any]) -> None:
    """The groups' options as they were, schedules' values among them, where the groups are the
    same."""
    optimizer = engine.optimizer
    names = saved_state.parameter_names(engine)
    here = [{names[p] for p in group["params"]} for group in optimizer.param_groups]
    there = [set(group["params"]) for group in saved["groups"]]
    if saved["rule"] != type(optimizer).__name__:
        return
    if here != there:
        warnings.warn(
            "resume: the optimizer's param groups hold other parameters than they did; their "
            "options are those of the Engine",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    for group, was in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in was.items():
            if key != "params":
                _set_option(group, key, value)


@torch.no_grad()
def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Tensors stay the objects that they are: graphs and schedules hold them."""
    have = group.get(key)
    if isinstance(have, torch.Tensor):
        have.copy_(value) if isinstance(value, torch.Tensor) else have.fill_(value)
    elif isinstance(value, torch.Tensor):
        group[key] = float(value) if key in group and value.numel() == 1 else value
    else:
        group[key] = value


def _take_extra_state(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """What modules keep by `get_extra_state`."""
    keys = {key: clean_name(key) for key in model.state_dict() if key.endswith("_extra_state")}
    extra = {key: saved[clean] for key, clean in keys.items() if clean in saved}
    if extra:
        model.load_state_dict(extra, strict=False)


def _load_some(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    here = {clean_name(name): name for name in model.state_dict()}
    model.load_state_dict({here[name]: value for name, value in saved.items()}, strict=False)
