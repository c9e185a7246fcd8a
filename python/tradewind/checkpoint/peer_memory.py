"""Each rank's newest shard in its neighbour's memory, so that a restart after a lost process reads
no disk (Wang et al., Gemini, SOSP 2023). The memory belongs to keepers, one a rank, that outlive
the ranks; their addresses stand in the checkpoint directory, readable by its owner alone.

What is kept is never believed: a shard that comes from a keeper is verified like one from a disk,
and whatever goes wrong here ends in reading the file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.memory_keeper import CALL_S, LINE_BYTES
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.ranks import Ranks

FOLDER = "memory"
IDLE_S = 30 * 60.0
_START_S = 30.0
_CONNECT_S = 2.0
_LOOPBACK, _ANYWHERE = "127.0.0.1", "0.0.0.0"


class PeerMemory:
    """The keepers of one checkpoint directory, as one rank uses them. One thread at a time."""

    def __init__(self, path: str, ranks: Ranks, *, idle_s: float = IDLE_S) -> None:
        """Touches nothing. `path`: the checkpoint directory."""
        self._folder = os.path.join(path, FOLDER)
        self._ranks = ranks
        self._idle_s = idle_s
        self._is_up = False

    def start(self) -> None:
        """Have a keeper for each rank, the one that is there or a new one. All ranks call this.

        Raises CheckpointError naming the rank whose keeper does not answer.
        """
        if not self._is_up:
            hosts = self._ranks.gather("peers/hosts", socket.gethostname())
            listens_at = _LOOPBACK if len(set(hosts)) == 1 else _ANYWHERE
            self._ranks.together("peers/start", lambda: self._start_own(listens_at))
            self._is_up = True

    def _start_own(self, listens_at: str) -> None:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        path = self._address_file(self._ranks.rank)
        if self._answers(path):
            return
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tradewind.checkpoint.memory_keeper"),
                *(path, listens_at, str(self._idle_s)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the ranks' group are not for it
        )
        until = time.monotonic() + _START_S
        while not self._answers(path):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"peers: the keeper of rank {self._ranks.rank} did not answer within "
                    f"{_START_S:g} s; may this machine start processes and listen on {listens_at}?"
                )
            time.sleep(0.02)

    def keep(self, name: CommitName, file_name: str, path: str) -> None:
        """Give this rank's shard of a commit, the file at `path`, to the neighbour's keeper."""
        neighbour = (self._ranks.rank + 1) % self._ranks.size
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            request = {
                "op": "put",
                "slot": f"rank {self._ranks.rank}",
                "key": _key(name, file_name),
                "size_bytes": size,
            }
            with self._asking(self._address_file(neighbour), request) as connection:
                connection.sendfile(file)
                _answer(connection)

    @contextlib.contextmanager
    def fetched(self, name: CommitName, file_names: list[str]) -> Iterator[dict[str, str]]:
        """Those of a commit's shards that keepers have, as files in memory: paths by name, which
        hold until the end."""
        with contextlib.ExitStack() as open_files:
            found: dict[str, str] = {}
            for rank, file_name in enumerate(file_names):
                descriptor = self._fetch(name, file_name, (rank + 1) % len(file_names))
                if descriptor is not None:
                    open_files.callback(os.close, descriptor)
                    found[file_name] = f"/proc/self/fd/{descriptor}"
            yield found

    def _fetch(self, name: CommitName, file_name: str, keeper: int) -> int | None:
        request = {"op": "get", "key": _key(name, file_name)}
        try:
            with (
                self._asking(self._address_file(keeper), request) as connection,
                connection.makefile("rb") as source,
            ):
                if int(json.loads(source.readline(LINE_BYTES))["size_bytes"]) < 0:
                    return None
                return _copied_to_memory(source)
        except (OSError, ValueError, KeyError, TypeError):
            return None  # the file is there as well

    def close(self) -> None:
        """End this rank's keeper: the run is over, and nobody will come back for it."""
        if self._is_up:
            self._is_up = False
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                path = self._address_file(self._ranks.rank)
                with self._asking(path, {"op": "end"}) as connection:
                    _answer(connection)

    def _address_file(self, rank: int) -> str:
        return os.path.join(self._folder, f"keeper-{rank:05d}.json")

    def _answers(self, path: str) -> bool:
        try:
            with self._asking(path, {"op": "ping"}) as connection:
                return bool(_answer(connection).get("ok"))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @contextlib.contextmanager
    def _asking(self, address_file: str, request: dict[str, Any]) -> Iterator[socket.socket]:
        with open(address_file) as file:
            facts = json.load(file)
        address = (str(facts["host"]), int(facts["port"]))
        with socket.create_connection(address, timeout=_CONNECT_S) as connection:
            connection.settimeout(CALL_S)
            connection.sendall(json.dumps({**request, "token": facts["token"]}).encode() + b"\n")
            yield connection


def _key(name: CommitName, file_name: str) -> str:
    return f"{name.folder}/{file_name}"


def _copied_to_memory(source: IO[bytes]) -> int:
    descriptor = os.memfd_create("tradewind-shard", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as memory:
            shutil.copyfileobj(source, memory, 1 << 20)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _answer(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as source:
        found = json.loads(source.readline(LINE_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {found!r}")
    return found
