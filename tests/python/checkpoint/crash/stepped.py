"""Two owners whose calls of the file system are interleaved exactly as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tradewind.checkpoint.names import LOCK

_DEADLINE_S = 90.0


class Stepped:
    """Runs `work` in a thread of its own that stops before each call of its `env`.

    `ends_with`: what `work` returned or raised, once it has ended."""

    def __init__(self, env: Any, work: Callable[[SteppedEnv], Any]) -> None:
        self.ends_with: Any = None
        self.num_calls = 0
        self._may_go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._is_free = False
        self.has_ended = False
        self._thread = threading.Thread(
            target=self._run, args=(work, SteppedEnv(env, self)), daemon=True
        )
        self._thread.start()
        self._await()

    def step(self, num_calls: int) -> None:
        """Let it make so many calls, or fewer where it ends before."""
        for _ in range(num_calls):
            if self.has_ended:
                return
            self._may_go.release()
            self._await()

    def finish(self) -> Any:
        """Let it run to its end; returns `ends_with`."""
        self._is_free = True
        while not self.has_ended:
            self._may_go.release()
            self._await()
        self._thread.join(_DEADLINE_S)
        return self.ends_with

    def stop(self) -> None:
        """Called by its thread before each call."""
        if self._is_free:
            return
        self.num_calls += 1
        self._stands.release()
        if not self._may_go.acquire(timeout=_DEADLINE_S):
            raise TimeoutError("the test has forgotten this thread")

    def _run(self, work: Callable[[SteppedEnv], Any], env: SteppedEnv) -> None:
        try:
            self.ends_with = work(env)
        except Exception as error:
            self.ends_with = error
        self.has_ended = True
        self._stands.release()

    def _await(self) -> None:
        if not self._stands.acquire(timeout=_DEADLINE_S):
            raise TimeoutError("the thread does not come to its next call")


class SteppedEnv:
    """An Env that stops before each call, and on which the lock of a directory's owner is always
    free, as it is for a process on another machine."""

    def __init__(self, env: Any, stepped: Stepped) -> None:
        self._env = env
        self._stepped = stepped

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._env, name)

        def call(path: str, *args: Any, **kwargs: Any) -> Any:
            if path.endswith("/" + LOCK):
                return _FreeLock() if name == "lock_file" else None
            self._stepped.stop()
            return method(path, *args, **kwargs)

        return call


class _FreeLock:
    def release(self) -> None:
        pass
