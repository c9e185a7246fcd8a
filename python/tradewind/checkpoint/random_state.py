"""The random numbers of this process as values that a checkpoint can hold: Python's `random`,
numpy's legacy global generator, torch's CPU generator and that of every GPU. Restored bit for bit.
From the thread that draws; a GPU's generator is read without waiting for its kernels."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Every generator's state, as JSON values and CPU tensors. GPUs are asked only where this
    process has used them: nothing was drawn from the others."""
    found = capture_cpu()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
        found["cuda_current"] = torch.cuda.current_device()
    return found


def restore(state: dict[str, Any]) -> None:
    """Set what `capture` found. With other GPUs than then, the one that was in use gives its state
    to the one in use now, and a warning says which states were left out.

    Raises ValueError, before anything is set, for a state of another kind of generator.
    """
    restore_cpu(state)
    devices = state.get("cuda", [])
    if not devices:
        return
    if not torch.cuda.is_available():
        warnings.warn(
            f"random state: the checkpoint has that of {len(devices)} GPU(s), this process sees "
            "none; what they would have drawn is drawn from the CPU's generator",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    num_gpus, then, now = (
        torch.cuda.device_count(),
        int(state["cuda_current"]),
        torch.cuda.current_device(),
    )
    for index, value in enumerate(devices[:num_gpus]):
        torch.cuda.set_rng_state(value.cpu(), index)
    if then != now:
        torch.cuda.set_rng_state(devices[then].cpu(), now)
    if len(devices) > num_gpus:
        warnings.warn(
            f"random state: the checkpoint has that of {len(devices)} GPUs, this process sees "
            f"{num_gpus}; the rest is left out",
            RuntimeWarning,
            stacklevel=2,
        )


def capture_cpu() -> dict[str, Any]:
    """As `capture`, of this process's CPU generators alone."""
    return {
        "python": _of_python(random.getstate()),
        "numpy": _encoded(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }


def restore_cpu(state: dict[str, Any]) -> None:
    """As `restore`, of this process's CPU generators alone."""
    of_numpy = _decoded(state["numpy"])
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if of_numpy["bit_generator"] != kind:
        raise ValueError(
            f"random state: the checkpoint has that of numpy's {of_numpy['bit_generator']}, "
            f"np.random uses {kind} here; set the same one with np.random.set_bit_generator"
        )
    random.setstate(_to_python(state["python"]))
    np.random.set_state(of_numpy)
    torch.set_rng_state(state["torch"].cpu())


def _of_python(state: Any) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _to_python(state: Any) -> tuple[Any, ...]:
    return int(state["version"]), tuple(state["words"].tolist()), state["gauss"]


def _encoded(value: Any) -> Any:
    """numpy's state: nested dicts of whole numbers, floats, text and arrays of whole numbers."""
    if isinstance(value, dict):
        return {key: _encoded(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        return {"dtype": str(value.dtype), "bytes": torch.from_numpy(flat.view(np.uint8).copy())}
    return value.item() if isinstance(value, np.generic) else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "bytes"}:
        return value["bytes"].cpu().numpy().view(np.dtype(value["dtype"])).copy()
    return {key: _decoded(inner) for key, inner in value.items()}


def generator_state(generator: Any) -> Any:
    """State of one generator object: a CPU `torch.Generator`, `random.Random`, or numpy's
    `Generator` or `RandomState`. None for anything else."""
    if isinstance(generator, torch.Generator):
        return generator.get_state() if generator.device.type == "cpu" else None
    if isinstance(generator, random.Random):
        try:
            return _of_python(generator.getstate())
        except NotImplementedError:  # random.SystemRandom has none
            return None
    if isinstance(generator, np.random.Generator):
        return _encoded(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _encoded(generator.get_state(legacy=False))
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    """Set what `generator_state` found, in a generator of the same kind.

    Raises TypeError where it is of another.
    """
    if isinstance(generator, torch.Generator) and isinstance(state, torch.Tensor):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random) and "words" in state:
        generator.setstate(_to_python(state))
    elif isinstance(generator, np.random.Generator) and "bit_generator" in state:
        generator.bit_generator.state = _decoded(state)
    elif isinstance(generator, np.random.RandomState) and "bit_generator" in state:
        generator.set_state(_decoded(state))
    else:
        raise TypeError(
            f"random state: the checkpoint has that of another kind of generator than "
            f"{type(generator).__name__}; make the same one as before"
        )
