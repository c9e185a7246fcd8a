"""Runs a function on several ranks, in processes that wait for the next one between tests.

Every run has a process group of its own (Gloo over a file), which is gone afterwards.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Raised:
    """What a rank raised, in words: not every error can be pickled."""

    type: str
    message: str
    traceback: str


class Ranks:
    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._num_runs = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()
        self._folder.cleanup()

    def run(
        self, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout_s: float = 30
    ) -> list[Any]:
        """`function(rank, *args)` of each rank. Raises AssertionError where one raised."""
        outcomes = self.outcomes(function, *args, num_ranks=num_ranks, timeout_s=timeout_s)
        failed = [f"rank {r}: {o.traceback}" for r, o in enumerate(outcomes) if _is_error(o)]
        assert not failed, "\n".join(failed)
        return outcomes

    def outcomes(
        self, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout_s: float = 30
    ) -> list[Any]:
        """As `run`, with a Raised in the place of the result of a rank that raised.

        `function` is of a module's top level, and imported by its file. Raises TimeoutError.
        """
        while len(self._workers) < num_ranks:
            self._workers.append(_start())
        self._num_runs += 1
        store = Path(self._folder.name) / str(self._num_runs)
        file = inspect.getsourcefile(function)
        chosen = [connection for _, connection in self._workers[:num_ranks]]
        for rank, connection in enumerate(chosen):
            job = (file, function.__name__, args, str(store), rank, num_ranks)
            connection.send_bytes(pickle.dumps(job))
        deadline = time.monotonic() + timeout_s
        late = [
            rank
            for rank, connection in enumerate(chosen)
            if not connection.poll(max(0.0, deadline - time.monotonic()))
        ]
        if late:
            raised = [
                f"; rank {rank} had raised: {outcome.traceback}"
                for rank, connection in enumerate(chosen)
                if rank not in late and _is_error(outcome := pickle.loads(connection.recv_bytes()))
            ]
            self._end()
            raise TimeoutError(
                f"{function.__name__}: ranks {late} did not end within {timeout_s} s"
                + "".join(raised)
            )
        try:
            return [pickle.loads(connection.recv_bytes()) for connection in chosen]
        except EOFError:
            time.sleep(0.1)  # until the system knows how they ended
            ends = [process.exitcode for process, _ in self._workers[:num_ranks]]
            self._end()
            raise AssertionError(
                f"{function.__name__}: expected every rank to live on, got exit codes {ends}"
            ) from None

    def _end(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers.clear()


def _is_error(outcome: Any) -> bool:
    # By name: a worker that loaded this file as another module has another class.
    return type(outcome).__name__ == "Raised"


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_outcome(*job)))


def _outcome(
    file: str, name: str, args: Sequence[Any], store: str, rank: int, num_ranks: int
) -> Any:
    try:
        function = getattr(_module(file), name)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
        )
        try:
            torch.manual_seed(rank)
            return function(rank, *args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())


@cache
def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
