"""What worker processes of a DataLoader are told: random numbers keyed to the batch, and to outlive
signals that go to the whole process group while the trainer makes its last checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from tradewind.engine.random_stream import seed_cpu

_SHIELDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Shield:
    """A worker_init_fn that calls the given one and makes its worker ignore SIGTERM, SIGINT and
    SIGUSR1 for as long as its parent lives and has not called `lower()`.

    After that they act by default again: torch ends a worker that does not come to its end by
    SIGTERM, and so does multiprocessing at exit, which lowers every shield first. Passed to workers
    as they start; it cannot be pickled otherwise.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None, context: Any = None) -> None:
        self._worker_init_fn = worker_init_fn
        self._parent = os.getpid()
        # Its value is 0 while the shield is up. Reading it waits for nobody, so a handler may.
        self._is_lowered = (context or multiprocessing.get_context()).Semaphore(0)
        # The last one registered is the first one called: before torch and multiprocessing end
        # their workers.
        atexit.register(self.lower)

    def __call__(self, worker: int) -> None:
        for number in _SHIELDED:
            signal.signal(number, self._receive)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            # The user's function finds the user's dataset.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)

    def lower(self) -> None:
        """Let signals act again. In the parent; may be called again."""
        atexit.unregister(self.lower)
        if os.getpid() == self._parent:
            self._is_lowered.release()

    def _receive(self, number: int, frame: object) -> None:
        if os.getppid() == self._parent and not self._is_lowered.get_value():
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def shield_worker_init(
    worker_init_fn: Callable[[int], None] | None = None, context: Any = None
) -> Shield:
    """`worker_init_fn` for workers that outlive signals to the process group. `context`: the
    loader's multiprocessing context, where it has one. Call `lower()` on what is returned before
    the loader's workers are ended."""
    return Shield(worker_init_fn, _context_of(context))


@contextlib.contextmanager
def shielded(loader: Any) -> Iterator[Shield | None]:
    """Workers that `loader` starts inside are shielded. None where it starts none."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield None
        return
    given = loader.worker_init_fn
    shield = shield_worker_init(given, loader.multiprocessing_context)
    loader.worker_init_fn = shield
    try:
        yield shield
    finally:
        loader.worker_init_fn = given


class KeyedDataset(Dataset[Any]):
    """The samples of `dataset`, by (seed, index) or, as a batch, (seed, indices): what it and the
    collate function draw for them follows from the seed, in whichever process that is."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keyed: tuple[int, Any]) -> Any:
        seed, index = keyed
        seed_cpu(seed)
        return self.dataset[index]

    def __getitems__(self, keyed: tuple[int, Any]) -> Any:
        seed, indices = keyed
        seed_cpu(seed)
        whole = getattr(self.dataset, "__getitems__", None)
        return whole(indices) if whole else [self.dataset[index] for index in indices]


def _context_of(context: Any) -> Any:
    return multiprocessing.get_context(context) if isinstance(context, str) else context
