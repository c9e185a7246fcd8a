"""A process that keeps shards of checkpoints in memory for as long as its neighbours may need them:
it outlives the ranks, which a launcher restarts all together when one is lost. Started by
peer_memory.py as `python -m tradewind.checkpoint.memory_keeper ADDRESS_FILE HOST IDLE_S`; needs no
torch. It ends when told to, or when nobody has asked anything for IDLE_S seconds.

A request is one line of JSON with the token of the address file, and for "put" the bytes behind it;
the answer is one line of JSON, and for "get" the bytes behind it."""

from __future__ import annotations

import hmac
import io
import json
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from typing import Any

LINE_BYTES = 64 * 1024
CALL_S = 60.0  # how long one side waits for the other within a request


class Kept:
    """Shards by slot, one each: the newest whole one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[str, bytearray]] = {}

    def put(self, slot: str, key: str, data: bytearray) -> None:
        with self._lock:
            self._slots[slot] = key, data

    def get(self, key: str) -> bytearray | None:
        with self._lock:
            return next((data for there, data in self._slots.values() if there == key), None)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, token: str) -> None:
        super().__init__((host, 0), _Handler)
        self.token = token
        self.kept = Kept()
        self.asked_s = time.monotonic()


class _Handler(socketserver.StreamRequestHandler):
    timeout = CALL_S
    server: _Server

    def handle(self) -> None:
        try:
            request = json.loads(self.rfile.readline(LINE_BYTES))
            token = str(request["token"])
        except (ValueError, KeyError, TypeError):
            return
        if not hmac.compare_digest(token, self.server.token):
            return
        self.server.asked_s = time.monotonic()
        if request["op"] == "put":
            data = read_exactly(self.rfile, int(request["size_bytes"]))
            self.server.kept.put(str(request["slot"]), str(request["key"]), data)
            self._answer({"ok": True})
        elif request["op"] == "get":
            found = self.server.kept.get(str(request["key"]))
            self._answer({"size_bytes": -1 if found is None else len(found)})
            if found is not None:
                self.wfile.write(found)
        elif request["op"] == "end":
            self._answer({"ok": True})
            threading.Thread(target=self.server.shutdown, daemon=True).start()
        else:
            self._answer({"ok": True, "pid": os.getpid()})
        self.server.asked_s = time.monotonic()

    def _answer(self, value: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(value).encode() + b"\n")


def read_exactly(source: io.BufferedIOBase, size_bytes: int) -> bytearray:
    """Raises ConnectionError where the other side ends early."""
    data = bytearray(size_bytes)
    view, at = memoryview(data), 0
    while at < size_bytes:
        count = source.readinto(view[at:])
        if not count:
            raise ConnectionError(f"expected {size_bytes} bytes, got {at}")
        at += count
    return data


def write_address(path: str, host: str, port: int, token: str) -> None:
    """For the owner of the file alone: whoever reads it may read and replace what is kept."""
    temporary = f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        facts = {"host": host, "port": port, "token": token, "pid": os.getpid()}
        json.dump({**facts, "on": socket.gethostname()}, file)
    os.rename(temporary, path)


def main() -> None:
    path, host, idle_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with _Server(host, secrets.token_hex(16)) as server:
        shown = host if host != "0.0.0.0" else socket.gethostbyname(socket.gethostname())
        write_address(path, shown, server.server_address[1], server.token)
        threading.Thread(target=_end_when_idle, args=(server, idle_s), daemon=True).start()
        server.serve_forever(poll_interval=0.2)
    if _is_ours(path, server.token):
        os.unlink(path)


def _end_when_idle(server: _Server, idle_s: float) -> None:
    while time.monotonic() - server.asked_s < idle_s:
        time.sleep(min(idle_s / 4, 5.0))
    server.shutdown()


def _is_ours(path: str, token: str) -> bool:
    try:
        with open(path) as file:
            return bool(json.load(file)["token"] == token)
    except (OSError, ValueError, KeyError):
        return False


if __name__ == "__main__":
    main()
