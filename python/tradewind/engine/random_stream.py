"""Random numbers for reading data, apart from those of the model: with checkpoints, what is drawn
for a batch depends on the seed, the epoch and the batch alone. CPU generators only: Python's
`random`, numpy's global one and torch's. From the thread that trains."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tradewind.checkpoint.random_state import capture_cpu, restore_cpu


def seed_of(*key: int | str) -> int:
    """63 bits that follow from `key`: the same on every machine, unrelated for unlike keys."""
    text = "/".join(map(str, key))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_cpu(seed: int) -> None:
    """Seed this process's CPU generators. GPUs are left alone, as torch.manual_seed would not."""
    random.seed(seed)
    # One word more than Python takes: both are the same algorithm, and would draw alike.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What is drawn or seeded inside changes no random number outside."""
    kept = _states()
    try:
        yield
    finally:
        _set_states(kept)


class RandomStream:
    """A stream of its own: inside `with stream:` the process's generators are the stream's, and go
    on from where the last such block left them. Not to be entered twice at once."""

    def __init__(self, seed: int) -> None:
        with unseen():
            seed_cpu(seed)
            self._own = _states()
        self._outer: tuple[Any, ...] | None = None

    def __enter__(self) -> RandomStream:
        self._outer = _states()
        _set_states(self._own)
        return self

    def __exit__(self, *exception: object) -> None:
        self._own = _states()
        assert self._outer is not None
        _set_states(self._outer)

    def position(self) -> Any:
        """Where the stream is, for `state_of`; costs nothing."""
        return self._own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with unseen():
            restore_cpu(state)
            self._own = _states()


def state_of(position: Any) -> dict[str, Any]:
    """A stream's position as values that a checkpoint can hold."""
    with unseen():
        _set_states(position)
        return capture_cpu()


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
