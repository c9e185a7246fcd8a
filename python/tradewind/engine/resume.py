"""Whether an Engine goes on from a checkpoint, and the line that says so."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.options import Checkpoint
from tradewind.engine.restored_state import Restoring
from tradewind.place import place

if TYPE_CHECKING:
    from tradewind.engine.checkpointing import Checkpointing
    from tradewind.engine.engine import Engine

Resume = Literal["auto", "must", "never"]
_MOST_CHANGES = 5


def as_checkpoint(given: Any) -> Checkpoint | None:
    """A directory or URL as the tw.Checkpoint of that path; others as they are."""
    if isinstance(given, (str, os.PathLike)):
        return Checkpoint(path=given)
    if given is not None and not isinstance(given, Checkpoint):
        raise TypeError(
            "checkpoint: expected a tw.Checkpoint, a directory or a URL, got "
            f"{type(given).__name__}"
        )
    return given


def check_resume(resume: Any, checkpoint: Checkpoint | None) -> Resume:
    """Raises ValueError for options that are not as described."""
    if resume not in get_args(Resume):
        raise ValueError(f"resume: expected one of {', '.join(get_args(Resume))}, got {resume!r}")
    if checkpoint is None and resume == "must":
        raise ValueError(
            "resume='must': there is nothing to go on from without checkpoint=; pass "
            "checkpoint=tw.Checkpoint()"
        )
    return cast("Resume", resume)


def path_of(checkpoint: Checkpoint, run: str | os.PathLike[str] | None) -> str:
    """Where the checkpoints are: as given, else the place's, else the run's.

    Raises ValueError where there is none of these.
    """
    given = checkpoint.path or place().checkpoint_dir
    if given is not None:
        return os.fspath(given)
    if run is None:
        raise ValueError(
            "checkpoint: expected a directory, found none; pass tw.Checkpoint(path=...), or "
            "run='runs/NAME' to tw.Engine, or set TRADEWIND_CHECKPOINT_DIR"
        )
    return str(Path(run) / "checkpoints")


def go_on(
    checkpointing: Checkpointing,
    engine: Engine,
    checkpointer: Checkpointer,
    resume: Resume,
    config: Mapping[str, Any],
) -> int | None:
    """Own the directory and fill the Engine from its newest whole checkpoint, as `resume` has it.
    Returns the step, None for a new run.

    Raises:
        CheckpointError: "must" without a checkpoint, none that is whole, or a live owner.
        ValueError: "never" with checkpoints, or a checkpoint of another model.
    """
    _check_steps(checkpointer, resume)
    checkpointer.own()
    restoring = Restoring(engine)
    found = checkpointer.load(into=restoring.into)
    if found is None:
        return None
    step, state = found
    restoring.take(state)
    checkpointing.retake_options = restoring.take_options
    progress = state["progress"]
    position = checkpointing.position
    if progress.get("data") is not None:
        position.load_state_dict(progress["data"])
    position.on_resumed = restoring.restore_random
    if progress.get("interval") is not None:
        failures = 0 if progress.get("is_finished") else 1
        checkpointing._interval.load_state_dict(progress["interval"], num_failures=failures)
    if engine.rank == 0:
        print(_line(checkpointer, engine, step, progress, config), file=sys.stderr, flush=True)
    return step


def _check_steps(checkpointer: Checkpointer, resume: Resume) -> None:
    """Before anything is touched."""
    if resume == "auto":
        return
    steps = checkpointer.steps()
    if resume == "never" and steps:
        raise ValueError(
            f"resume='never': {checkpointer.path!r} has checkpoints, the newest of step "
            f"{steps[-1]}; give another directory, or resume='auto' to go on from it"
        )
    if resume == "must" and not steps:
        raise CheckpointError(
            f"resume='must': there is no checkpoint in {checkpointer.path!r} to go on from; check "
            "the path, or use resume='auto' to start anew"
        )


def _line(
    checkpointer: Checkpointer,
    engine: Engine,
    step: int,
    progress: Mapping[str, Any],
    config: Mapping[str, Any],
) -> str:
    age = _age_text(time.time() - float(progress.get("saved_at_s") or time.time()))
    text = f"tradewind: goes on from step {step} of {checkpointer.path}, saved {age}"
    if progress.get("is_finished"):
        text += ", which had finished: what it was trained on is not trained on again"
    changed = changes(progress.get("config") or {}, config)
    if changed:
        more = f", and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        text += f"; changed: {', '.join(changed[:_MOST_CHANGES])}{more}"
    return text


def changes(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two configurations, one text each. Options of param groups go on as the
    checkpoint has them, which the text says."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            text
            for key in keys
            for text in changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = zip(before, now, strict=True)
        return [t for i, (a, b) in enumerate(pairs) for t in changes(a, b, f"{name}[{i}]")]
    if before == now:
        return []
    kept = " (the checkpoint's stays)" if name.startswith("param_groups[") else ""
    return [f"{name} {_short(before)} -> {_short(now)}{kept}"]


def _short(value: Any) -> str:
    if isinstance(value, (Mapping, list)):
        return f"({len(value)} entries)"
    return repr(value)


def _age_text(seconds: float) -> str:
    """In the one unit that fits; a clock that went back counts as nothing."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"
