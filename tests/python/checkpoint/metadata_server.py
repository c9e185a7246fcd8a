"""A metadata service on this machine, whose answers a test writes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Headers = dict[str, str]
# (method, path, headers) -> what goes over the wire, or None to hang up
Respond = Callable[[str, str, Headers], "bytes | None"]


def answer(text: str = "", status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(text.encode())}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n" + text).encode()


@dataclass
class MetadataServer:
    """Answers each request by `respond`; one connection a request. `requests`: what was asked.
    `dribble`: answers come byte by byte, one each so many seconds, until the server closes."""

    respond: Respond
    dribble_s: float | None = None
    requests: list[tuple[str, str, Headers]] = field(default_factory=list)

    def __enter__(self) -> MetadataServer:
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._start(self._serve)
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        with socket.create_connection(self._listener.getsockname()):
            pass  # wakes it up
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._listener.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def wait_for_requests(self, count: int = 1, part: str = "") -> None:
        """Return once so many requests came whose paths hold `part`."""
        ends = time.monotonic() + 60
        while sum(part in path for _, path, _ in self.requests) < count:
            assert time.monotonic() < ends, f"no {count} requests for {part!r} came"
            time.sleep(0.002)

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            connection, _ = self._listener.accept()
            self._start(self._handle, connection)

    def _handle(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(30)
            try:
                text = b""
                while b"\r\n\r\n" not in text:
                    part = connection.recv(65536)
                    if not part:
                        return
                    text += part
                head, *lines = text.decode().split("\r\n\r\n")[0].split("\r\n")
                method, path, _ = head.split(" ")
                headers = dict(line.split(": ", 1) for line in lines)
                self.requests.append((method, path, headers))
                told = self.respond(method, path, headers)
                if told is None:
                    return
                if self.dribble_s is None:
                    connection.sendall(told)
                    return
                for byte in told:
                    connection.sendall(bytes([byte]))
                    if self._closing.wait(self.dribble_s):
                        return
            except OSError:
                return  # who asked has gone
