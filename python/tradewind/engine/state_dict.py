"""`Engine.state_dict()`, for `torch.save`: what a user keeps by hand. Checkpoints have a form of
their own, in saved_state.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tradewind.engine.engine import Engine

_PARTS = {"model", "optimizer", "tracked", "num_steps", "loss_scale"}


def state_dict_of(engine: Engine) -> dict[str, Any]:
    """See `Engine.state_dict`."""
    engine.settle()
    sharing, scale = engine._sharing, engine._loss_scale
    return {
        "model": engine.model.state_dict(),
        "optimizer": _optimizer_state(engine),
        "tracked": {name: value.state_dict() for name, value in engine._tracked.items()},
        "num_steps": engine.num_steps,
        "loss_scale": scale.state_dict() if scale else None,
        **({"sharing": sharing.state_dict()} if sharing else {}),
    }


def _optimizer_state(engine: Engine) -> dict[str, Any]:
    sharing, optimizer = engine._sharing, engine.optimizer
    if sharing is None or sharing.sharded is None:
        return optimizer.state_dict()
    optimizer.state.update(sharing.sharded.gather_state())
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state.clear()


def load_state_dict(engine: Engine, state_dict: dict[str, Any]) -> None:
    """See `Engine.load_state_dict`."""
    if set(state_dict) - {"sharing"} != _PARTS:
        raise ValueError(
            f"state_dict: expected the parts {sorted(_PARTS)}, got {sorted(state_dict)}"
        )
    missing = sorted(set(engine._tracked) - set(state_dict["tracked"]))
    if missing:
        raise ValueError(
            f"state_dict: has no state for the tracked {', '.join(missing)}; it holds "
            f"{sorted(state_dict['tracked'])}"
        )
    sharing, optimizer = engine._sharing, engine.optimizer
    with engine.edit_parameters():
        engine.model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optimizer"])
        if sharing is not None and sharing.sharded is not None:
            sharing.sharded.load_state(dict(optimizer.state))
            optimizer.state.clear()
            optimizer._table = None
        _ = optimizer.native_table  # masters meet their parameters before the next forward
    if sharing is not None:
        sharing.load_state_dict(state_dict.get("sharing", {}))
    engine._untracked_state = dict(state_dict["tracked"])
    for name, value in engine._tracked.items():
        value.load_state_dict(engine._untracked_state.pop(name))
    engine.num_steps = int(state_dict["num_steps"])
    if engine._loss_scale is not None and state_dict["loss_scale"] is not None:
        engine._loss_scale.load_state_dict(state_dict["loss_scale"])
