"""Workers of a DataLoader outlive signals to the process group, and end when they should."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.data_cases import Noisy, engine_of
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tradewind.engine.data_position import DataPosition
from tradewind.engine.loader_workers import KeyedDataset, shield_worker_init, shielded
from tradewind.engine.loop import run_batches

TESTS = Path(__file__).parents[1]
DEADLINE_S = 120


class Pids(Dataset[torch.Tensor]):
    """Which process loads a sample."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), index])


def pids(num_workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Pids(), batch_size=2, num_workers=num_workers, **options)


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
def test_a_worker_goes_on_after_a_signal(number: signal.Signals) -> None:
    shield = shield_worker_init()
    batches = iter(pids(worker_init_fn=shield))
    workers = {int(next(batches)[0, 0]) for _ in range(2)}
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, number)
    rest = list(batches)
    assert len(rest) == 98 and {int(batch[0, 0]) for batch in rest} == workers
    shield.lower()


def test_a_worker_that_is_not_shielded_dies() -> None:
    batches = iter(pids())
    worker = int(next(batches)[0, 0])
    os.kill(worker, signal.SIGTERM)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(batches)


def listen(shield: Any, told: Any) -> None:
    shield(0)
    told.send("listening")
    told.recv()


@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_a_lowered_shield_lets_a_signal_act(method: str) -> None:
    context = multiprocessing.get_context(method)
    shield = shield_worker_init(context=method)
    here, there = context.Pipe()
    worker = context.Process(target=listen, args=(shield, there), daemon=True)
    worker.start()
    there.close()
    assert here.poll(DEADLINE_S) and here.recv() == "listening"
    worker.terminate()
    worker.join(0.5)
    assert worker.is_alive()  # at least until the signal was handled, and so it stays
    shield.lower()
    shield.lower()
    worker.terminate()
    worker.join(DEADLINE_S)
    assert worker.exitcode == -signal.SIGTERM


def run_python(code: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_a_signal_to_the_group_leaves_the_trainer_its_workers() -> None:
    """The trainer handles SIGTERM itself, trains on, and ends in good order."""
    trainer = run_python(
        """
        import os, signal
        from engine.data_cases import engine_of, loader
        from tradewind.engine.data_position import DataPosition
        from tradewind.engine.loop import run_batches

        noticed = []
        signal.signal(signal.SIGTERM, lambda *told: noticed.append(told))
        made = loader(shuffle=True, num_workers=2, prefetch_factor=1)
        with engine_of() as engine:
            num_batches = 0
            for batch in run_batches(engine, engine._meter, made, 3, "off", DataPosition()):
                engine.step(engine(batch).sum())
                num_batches += 1
                if num_batches == 2:
                    print("training", flush=True)
                    input()
        print(len(noticed), num_batches, flush=True)
        """,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert trainer.stdout is not None and trainer.stdin is not None
    assert trainer.stdout.readline() == "training\n"
    os.killpg(trainer.pid, signal.SIGTERM)
    out, err = trainer.communicate("go on\n", timeout=DEADLINE_S)
    assert (out, trainer.returncode) == ("1 18\n", 0), err


def test_a_worker_that_hangs_does_not_hold_up_the_end() -> None:
    """torch and multiprocessing end such workers by SIGTERM, which must reach them then."""
    trainer = run_python(
        """
        import time, torch
        from torch.utils.data import DataLoader, Dataset
        from engine.data_cases import engine_of
        from tradewind.engine.data_position import DataPosition
        from tradewind.engine.loop import run_batches

        class Hangs(Dataset):
            def __len__(self):
                return 100

            def __getitem__(self, index):
                if index >= 8:
                    time.sleep(3600)
                return torch.ones(4)

        made = DataLoader(Hangs(), batch_size=4, num_workers=2)
        engine = engine_of()
        reading = run_batches(engine, engine._meter, made, 1, "off", DataPosition())
        engine.step(engine(next(reading)).sum())
        print("done", flush=True)
        # At exit with all of it alive.
        """
    )
    out, err = trainer.communicate(timeout=DEADLINE_S)
    assert (out, trainer.returncode) == ("done\n", 0), err


def test_workers_end_with_a_parent_that_is_killed() -> None:
    trainer = run_python(
        """
        import time
        from engine.test_loader_workers import pids
        from tradewind.engine.loader_workers import shield_worker_init
        batches = iter(pids(worker_init_fn=shield_worker_init()))
        print(int(next(batches)[0, 0]), int(next(batches)[0, 0]), flush=True)
        time.sleep(3600)
        """
    )
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    trainer.kill()
    trainer.wait(DEADLINE_S)
    ended = [os.pidfd_open(pid) for pid in workers if _lives(pid)]
    for descriptor in ended:
        assert select.select([descriptor], [], [], DEADLINE_S)[0], "a worker lives on"
        os.close(descriptor)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# --- what else a worker is told -------------------------------------------------------------------


class TellsItsDataset(Noisy):
    name = "what worker_init_fn wrote"

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.name == "seen by the worker"), 0.0, 0.0, 0.0])


def change_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.name = "seen by the worker"
    np.random.seed(worker)


def test_a_workers_own_function_finds_its_dataset() -> None:
    made = DataLoader(TellsItsDataset(), 4, num_workers=2, worker_init_fn=change_dataset)
    with engine_of() as engine:
        found = run_batches(engine, engine._meter, made, 1, "off", DataPosition())
        assert all(bool((batch[:, 0] == 1).all()) for batch in found)
    assert made.worker_init_fn is change_dataset


def test_a_loader_keeps_its_own_function() -> None:
    made = pids(worker_init_fn=change_dataset)
    with shielded(made) as shield:
        assert made.worker_init_fn is shield
        assert shield is not None
    assert made.worker_init_fn is change_dataset
    shield.lower()
    for loader in ([1, 2], pids(num_workers=0)):
        with shielded(loader) as shield:
            assert shield is None


def test_samples_draw_by_their_key() -> None:
    keyed = KeyedDataset(Noisy())
    assert len(keyed) == 22
    first, again, other = keyed[7, 3], keyed[7, 3], keyed[8, 3]
    assert torch.equal(first, again) and not torch.equal(first, other)
    both = keyed.__getitems__((7, [3, 4]))
    assert torch.equal(both[0], first) and both[1][0] == 4
    assert len(set(torch.stack([first, other])[:, 1:].flatten().tolist())) == 6  # all unlike
