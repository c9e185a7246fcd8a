"""Checkpoints of any state in a directory: saved while training goes on, committed crash-safe,
restored exactly."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tradewind._core import native
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import MAX_STEP, CommitName, shard_name
from tradewind.checkpoint.parts import PartialTensor
from tradewind.checkpoint.peer_memory import PeerMemory
from tradewind.checkpoint.ranks import Ranks
from tradewind.checkpoint.restoring import CommitReader, fills_of, give_fresh
from tradewind.checkpoint.save import Save
from tradewind.checkpoint.saving import Prepared, Ranges, Saver, arenas_of
from tradewind.checkpoint.search import Found, Search, names_of, open_commit
from tradewind.checkpoint.stores.store import is_url
from tradewind.checkpoint.stores.tier import RemoteTier, default_directory
from tradewind.checkpoint.targets import Filling, json_values, match, replace, stored_in

BLOCK_BYTES = 4 << 20
NUM_THREADS = 16
LEAST_HOST_MEMORY_BYTES = 1 << 20
_BLOCK_UNIT_BYTES = 4096

# (kind, text): "save-failed", "retention-failed", "peers-failed", "passed-over".
OnEvent = Callable[[str, str], None]
Into = Callable[[Any], Mapping[str, torch.Tensor | PartialTensor]]


class Checkpointer:
    """Saves and restores states in the directory `path`.

    ::

        with tw.Checkpointer("checkpoints", keep=3) as checkpointer:
            step = checkpointer.restore(state) or 0
            ...
            checkpointer.save(state, step=step)   # returns at once; the disk is written meanwhile
        # close() waits for the last save

    A state is any nested dict, list or tuple of tensors and JSON values; modules, optimizers and
    whatever has `state_dict` and `load_state_dict` stand in it as themselves. A checkpoint exists
    from the moment that all of it is on disk and its manifest was renamed to its place; what a
    crash leaves before that is never restored.

    Where `torch.distributed` is up, every rank of `process_group` makes its own Checkpointer of one
    shared directory and calls the same methods in the same order. A state is then alike on all
    ranks, but for what stands in `PerRank(...)` and `PartialTensor(...)`; each rank writes a part.

    Of a URL (`s3://BUCKET/PREFIX`, or any that fsspec knows; docs/checkpoint-stores.md) saves are
    committed in the directory `local` first, and uploaded behind training by a process of their
    own: `wait()` then means the store. The newest of both is restored.

    Args:
        path: the directory, or a URL; made where missing. One live owner at a time saves there.
        keep: how many of the newest checkpoints stay, at least 1.
        keep_every: checkpoints of steps that are multiples of this stay too.
        process_group: the ranks that save together; None: the default group, where there is one.
        deadline: how long writing, and waiting for other ranks, may take.
        block_bytes: of what a checksum covers, a multiple of 4096.
        num_threads: of writing and of reading.
        host_memory: bytes of memory for copies, None: as much as a state takes. A state that needs
            more is written in rounds, and `save` returns when the last one is copied.
        local: of a URL, the directory of this machine, on a fast disk, which all ranks share; None:
            one below ~/.cache/tradewind that is the same for every run of this URL.
        store_options: of a URL, for `boto3.client("s3", ...)` or `fsspec.filesystem(scheme, ...)`.
        peers: with several ranks, a process beside each rank keeps the newest shard of the rank
            before it in memory, so that ranks that are restarted read no disk.
        on_event: called with (kind, text) for what is told by a warning otherwise: a save that
            failed, a checkpoint that was passed over.

    Thread-safe, but for `restore`, which fills memory of the caller's. In a forked child it can do
    nothing, and `close()` does nothing.

    Raises:
        NotACheckpointDirectoryError: the path is taken by something else; nothing was touched.
        ValueError, TypeError: an argument that is not as described.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int = 3,
        keep_every: int | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        deadline: timedelta = timedelta(minutes=10),
        block_bytes: int = BLOCK_BYTES,
        num_threads: int = NUM_THREADS,
        host_memory: int | None = None,
        peers: bool = False,
        local: str | os.PathLike[str] | None = None,
        store_options: dict[str, Any] | None = None,
        on_event: OnEvent | None = None,
        env: native.Env | None = None,
    ) -> None:
        _check_count("keep", keep)
        if keep_every is not None:
            _check_count("keep_every", keep_every)
        _check_count("num_threads", num_threads)
        _check_count("block_bytes", block_bytes)
        if block_bytes % _BLOCK_UNIT_BYTES:
            raise ValueError(
                f"block_bytes: expected a multiple of {_BLOCK_UNIT_BYTES}, got {block_bytes}"
            )
        if host_memory is not None and host_memory < LEAST_HOST_MEMORY_BYTES:
            raise ValueError(
                f"host_memory: expected at least {LEAST_HOST_MEMORY_BYTES} bytes, got {host_memory}"
            )
        if deadline <= timedelta(0):
            raise ValueError(f"deadline: expected a positive duration, got {deadline}")
        self.keep, self.keep_every = keep, keep_every
        self._env = env if env is not None else native.posix_env()
        self._on_event = on_event
        self._has_tier = is_url(path)
        if not self._has_tier and (local is not None or store_options is not None):
            raise ValueError(
                "local, store_options: expected a URL as path, such as s3://bucket/prefix, got "
                f"{os.fspath(path)!r}"
            )
        here = (local or default_directory(os.fspath(path))) if self._has_tier else path
        self._directory = LocalDirectory(here, self._env)
        self._ranks = Ranks(process_group, deadline=deadline)
        # By one rank for all: it makes the directory a moment later.
        self._ranks.together("check", self._check_directory)
        self._tier: RemoteTier | None = None
        if self._has_tier:
            self._ranks.together("store", lambda: self._open_tier(os.fspath(path), store_options))
        self._deadline_s = deadline.total_seconds()
        self._saver = Saver(
            self._directory,
            self._ranks,
            self._env,
            block_bytes=block_bytes,
            num_threads=num_threads,
            deadline=deadline,
            host_memory=host_memory,
        )
        has_peers = peers and self._ranks.size > 1
        self._peers = PeerMemory(self._directory.where, self._ranks) if has_peers else None
        opener = open_commit(self._directory, self._env, num_threads, self._peers)
        self._open_commit = opener
        self._search = Search(
            self._directory,
            self._ranks,
            opener,
            self._pass_over,
            self._tier,
            has_behind=self._has_tier,
        )
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # save(), wait() and close() from several threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Save | None = None
        self._parent: str | None = None
        self._verified: CommitName | None = None
        self._durable: tuple[int, float] | None = None
        self._is_owner = False
        self._is_closed = False
        self.restored: Any = None
        self.not_restored: list[str] = []
        _open_ones.add(self)

    def _check_directory(self) -> None:
        if self._ranks.is_first:
            self._directory.check()

    def _open_tier(self, url: str, options: dict[str, Any] | None) -> None:
        """Of rank 0. Raises before anything is touched where the store cannot be used."""
        if self._ranks.is_first:
            self._tier = RemoteTier(
                url,
                self._directory,
                keep=self.keep,
                keep_every=self.keep_every,
                options=options,
                on_event=self._tell,
            )
            self._tier.check()

    @property
    def path(self) -> str:
        """The directory, or the URL."""
        return self._directory.where if self._tier is None else self._tier.where

    # --- saving ---------------------------------------------------------------------------------

    def own(self) -> None:
        """Become the directory's owner, as the first `save` does.

        Raises CheckpointError where a live owner can be seen, OSError for a directory that cannot
        be written.
        """
        self._check_open()
        if not self._is_owner:
            first = self._ranks.is_first
            self._ranks.together("own", lambda: self._claim() if first else None)
            self._is_owner = True

    def _claim(self) -> None:
        if self._tier is not None:
            self._tier.own()
        else:
            self._directory.claim()

    def save(
        self,
        state: Any,
        *,
        step: int,
        in_place: Ranges = (),
        facts: dict[str, Any] | None = None,
        paranoid: bool = False,
        holds_stream: bool = True,
    ) -> Save:
        """Begin to save `state` as `step`, and return as soon as nothing of it can change under
        the save. An earlier save that still runs is waited for.

        Args:
            step: from 0; of two saves of one step the later one counts.
            in_place: (address, bytes) of memory that only Tradewind's sweeps write, besides the
                state of `tw.optim` optimizers in `state`: tensors in it are written from where they
                lie, and the next sweep waits, range by range, for what is not written yet. All
                else is copied.
            facts: JSON values for the manifest, for people and tools.
            paranoid: whether edits of memory `in_place` are also looked for by sums of its bytes,
                which finds those through `.data`; else by the versions that torch counts alone.
            holds_stream: whether work queued on GPUs from now on waits for the copies from them;
                else call `.hold_stream()` before what changes the tensors is queued.

        Returns a `Save`: `.wait()` blocks until it is durable or raises why it is not. A save that
        fails is told by a warning, and the next one is tried as if nothing had been.

        Raises TypeError for what a checkpoint cannot hold, by name, and what `own` raises.
        """
        self._check_open()
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
            raise ValueError(f"step: expected a whole number from 0 to {MAX_STEP}, got {step!r}")
        with self._lock:
            self._await_last()
            self.own()
            save = Save(step, is_paranoid=paranoid)
            ranges = [*in_place, *arenas_of(state)]
            prepared = self._saver.prepare(state, save, ranges, facts or {}, self._parent)
            self._last = save
            self._start_thread()
            self._jobs.put((self, prepared))
            if holds_stream:
                save.hold_stream()
            if len(prepared.plans) > 1:
                save.wait_staged()
            save.returned()
        return save

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the last save is durable. Raises what it failed with, or TimeoutError."""
        if self._last is not None:
            self._last.wait(timeout_s)

    @property
    def last_save(self) -> Save | None:
        """The newest one, durable or not."""
        return self._last

    @property
    def last_durable(self) -> tuple[int, float] | None:
        """(step, seconds since it became durable) of this process's newest commit, if any; of a
        URL the newest that is in the store (on rank 0)."""
        durable = self._durable if self._tier is None else self._tier.durable
        if durable is None:
            return None
        step, at_s = durable
        return step, time.monotonic() - at_s

    @property
    def upload_s(self) -> float:
        """Seconds from a commit on disk to its arrival in the store, of the newest that arrived; 0
        without a store."""
        return 0.0 if self._tier is None else self._tier.upload_s

    def _await_last(self) -> None:
        """Let the last save end, one way or the other."""
        if self._last is not None and not self._last._done.wait(2 * self._deadline_s):
            raise CheckpointError(
                f"checkpoint of step {self._last.step}: neither written nor failed after "
                f"{2 * self._deadline_s:g} s; is the disk stuck?"
            )

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), daemon=True, name="tradewind-checkpoint"
            )
            self._thread.start()

    def _run(self, prepared: Prepared) -> None:
        save = prepared.save
        try:
            name = self._saver.commit(prepared)
        except Exception as error:
            self._tell("save-failed", f"checkpoint of step {save.step} failed: {error}")
            save.failed(error)
            return
        self._parent, self._verified = name.folder, name
        self._durable = (save.step, time.monotonic())
        save.commits(name)
        if self._tier is not None and prepared.published is not None:
            save.uploads(self._tier.upload(name, *prepared.published))
        self._give_to_peers(name)
        self._retain()
        save.end()

    def _give_to_peers(self, name: CommitName) -> None:
        if self._peers is None:
            return
        try:
            self._peers.start()
            file = shard_name(self._ranks.rank, self._ranks.size)
            self._peers.keep(name, file, self._directory.path_of(name, file))
        except Exception as error:
            self._tell("peers-failed", f"step {name.step} is on disk alone: {error}")

    def _retain(self) -> None:
        if not self._ranks.is_first:
            return
        try:
            self._directory.retain(self.keep, self.keep_every, self._verified)
        except Exception as error:
            self._tell("retention-failed", f"old checkpoints could not be removed: {error}")

    # --- reading --------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending; of a URL those in the store, too (on rank 0)."""
        place = self._directory if self._tier is None else self._tier
        return names_of(place.committed())

    def restore(self, state: Any, step: int | None = None, *, partial: bool = False) -> int | None:
        """Fill `state` in place from the newest checkpoint that is whole, or from `step`.

        Tensors are read into their memory, modules too; other objects take theirs by
        `load_state_dict`; JSON values take the place of those in dicts, and all of them are in
        `.restored`. Damaged checkpoints are passed over with a line that says why.

        Args:
            partial: fill what fits and leave the rest; `.not_restored` lists it.

        Returns the step, or None when there is no checkpoint yet.

        Raises:
            StateMismatchError: names, shapes or kinds differ; nothing was changed.
            DamagedCheckpointError: there are checkpoints, and none is whole.
            CheckpointError: no checkpoint of `step`, or another rank failed.
        """
        self._check_open()
        self._await_last()

        def take(reader: CommitReader) -> tuple[Any, Filling, Any]:
            saved = reader.saved(self._ranks.rank)
            where = f"checkpoint of step {reader.manifest.step}"
            filling = match(state, saved, where, partial=partial)
            wanted = [stored for _, part in filling.loads for stored in stored_in(part)]
            fills, value_of = give_fresh(wanted)
            reader.read([*filling.fills, *fills], verify_all=self._ranks.size == 1)
            return saved, filling, value_of

        found = self._search.run(take, step)
        if found is None:
            return None
        saved, filling, value_of = found.value
        for target, part in filling.loads:
            target.load_state_dict(replace(part, value_of))
        for target, key, value in filling.values:
            target[key] = value
        self._taken(found, saved)
        self.not_restored = filling.problems
        return found.name.step

    def load(self, step: int | None = None, *, into: Into | None = None) -> tuple[int, Any] | None:
        """(step, state) of the newest checkpoint that is whole, or of `step`, with its tensors in
        fresh memory of the CPU; None when there is none. Raises as `restore` does.

        Args:
            into: asked with the state of each checkpoint that is tried, with `Stored` in place of
                its tensors: by `Stored.name`, tensors (or this rank's parts) of that dtype and
                shape, to be filled in place of fresh memory. What it raises ends the search.
        """
        self._check_open()
        self._await_last()

        def take(reader: CommitReader) -> tuple[Any, Any]:
            saved = reader.saved(self._ranks.rank)
            given = into(saved) if into is not None else {}
            fills, fresh = give_fresh([each for each in stored_in(saved) if each.name not in given])
            fills += [fill for name, target in given.items() for fill in fills_of(name, target)]
            reader.read(fills, verify_all=self._ranks.size == 1)
            return (
                saved,
                lambda stored: given[stored.name] if stored.name in given else fresh(stored),
            )

        found = self._search.run(take, step)
        if found is None:
            return None
        saved, value_of = found.value
        self._taken(found, saved)
        return found.name.step, replace(saved, value_of)

    def verify(self, step: int | None = None) -> int | None:
        """Read every byte of the newest checkpoint, or of `step`, and return its step; None when
        there is none. Raises DamagedCheckpointError that names file and block."""
        self._check_open()
        self._await_last()
        if self._tier is not None:
            self._tier.bring(step)
        names = self._directory.committed()
        if step is not None:
            names = [name for name in names if name.step == step]
            if not names:
                raise CheckpointError(f"{self.path}: has no checkpoint of step {step}")
        if not names:
            return None
        with ExitStack() as stack:
            self._open_commit(names[0], stack).verify()
        return names[0].step

    def _taken(self, found: Found, saved: Any) -> None:
        self.restored = json_values(saved)
        self.not_restored = []
        self._verified, self._parent = found.name, found.name.folder

    def _pass_over(self, name: CommitName, why: str) -> None:
        self._tell("passed-over", f"{name.folder} is passed over: {why}")

    # --- the end --------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the last save, and give the directory back. Does not raise for a save that
        failed; `wait()` does. A save that is not done after `timeout_s` seconds is dropped. Of a
        URL uploads are waited for as long, None: an hour."""
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._lock:
                if timeout_s is not None and self._last is not None:
                    self._last.drop_unless_done(timeout_s, self._ranks.give_up)
                self._await_last()
                if self._thread is not None:
                    self._jobs.put(None)
                    self._thread.join(self._deadline_s)
        finally:
            _open_ones.discard(self)
            if self._tier is not None:
                self._tier.close(None if end_s is None else max(0.0, end_s - time.monotonic()))
            if self._peers is not None:
                self._peers.close()
            self._saver.close()
            self._directory.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Checkpointer cannot be pickled or copied: it owns threads and a directory; make one "
            "in the process that saves"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"this Checkpointer of {self.path!r} is closed; make another one")
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                f"this Checkpointer of {self.path!r} belongs to process {self._owner_pid}, this is "
                f"its child {os.getpid()}; save from the process that made it"
            )

    def _tell(self, kind: str, text: str) -> None:
        text = f"{self.path}: {text}"
        if self._on_event is not None:
            self._on_event(kind, text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


_Job = tuple[Checkpointer, Prepared]


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """The thread of a Checkpointer, which may be dropped while nothing is under way."""
    while True:
        job = jobs.get()
        if job is None:
            return
        job[0]._run(job[1])
        del job


_open_ones: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A script that ends without close() still has its last checkpoint."""
    for checkpointer in list(_open_ones):
        checkpointer.close()


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
