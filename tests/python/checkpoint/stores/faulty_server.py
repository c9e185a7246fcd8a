"""moto's S3 in this process, behind an application that injects faults and checks what moto does
not: CRC32C sums of what arrives. A fault is data: which request, and what happens to it."""

from __future__ import annotations

import base64
import socket
import threading
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tradewind._core import native

HANG_S = 60.0  # at most, if a test forgot to let go

Environ = dict[str, Any]
Answer = tuple[str, list[tuple[str, str]], bytes]

# Before it is processed: refused with a status, or the connection is closed without a word.
REFUSALS = {
    "503": ("503 Service Unavailable", "SlowDown"),
    "500": ("500 Internal Server Error", "InternalError"),
    "403": ("403 Forbidden", "AccessDenied"),
    "404": ("404 Not Found", "NoSuchUpload"),
    "409": ("409 Conflict", "ConditionalRequestConflict"),
    "412": ("412 Precondition Failed", "PreconditionFailed"),
    "501": ("501 Not Implemented", "NotImplemented"),
    "507": ("507 Insufficient Storage", "QuotaExceeded"),
}


@dataclass(frozen=True)
class Seen:
    """One request. `what`: its operation, as in "put manifest.json" or "list"."""

    number: int
    what: str
    path: str
    query: str
    headers: dict[str, str]
    is_conditional: bool


Fault = Callable[[Seen], str | None]


@dataclass
class FaultyServer:
    """`fault(seen)` names what happens to a request: a key of REFUSALS, "dropped" (nothing is
    done), "lost" (done, but the answer is lost), "hang" (nothing is said until `release`),
    "truncated" or "corrupted" (the answer's body), or None."""

    app: Any = None
    url: str = ""
    fault: Fault = lambda seen: None
    before: Callable[[Seen], None] = lambda seen: None
    seen: list[Seen] = field(default_factory=list)
    num_sums_checked: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # moto's conditional writes are not atomic
        self._released = threading.Event()

    def reset(
        self,
        fault: Fault = lambda seen: None,
        before: Callable[[Seen], None] = lambda seen: None,
    ) -> None:
        """Forget what was seen, let go of what hangs, and do `fault` from now on. `before` runs
        before each request is processed."""
        self._released.set()
        with self._lock:
            self._released = threading.Event()
            self.fault, self.before = fault, before
            self.seen, self.num_sums_checked = [], 0

    def whats(self) -> list[str]:
        return [seen.what for seen in self.seen]

    # --- WSGI -----------------------------------------------------------------------------------

    def __call__(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        body = _body(environ)
        with self._lock:
            seen = _seen(len(self.seen), environ)
            self.seen.append(seen)
            fault, released = self.fault(seen), self._released
        self.before(seen)
        if fault == "hang":
            released.wait(HANG_S)
            fault = "dropped"
        if fault == "dropped":
            raise _cut(environ)
        if fault in REFUSALS:
            status, code = REFUSALS[fault]
            return _refuse(start_response, status, code)
        wrong = self._wrong_sum(seen, body)
        if wrong:
            return _refuse(start_response, "400 Bad Request", "BadDigest", wrong)
        with self._one_at_a_time:
            status, headers, data = self._process(environ)
        if fault == "lost":
            raise _cut(environ)
        if fault == "corrupted":
            data = bytes([data[0] ^ 1]) + data[1:]
        start_response(status, headers)
        if fault == "truncated":
            return _truncated(data, environ)
        return [data]

    def _process(self, environ: Environ) -> Answer:
        told: list[Any] = []
        chunks = self.app(
            environ, lambda status, headers, info=None: told.append((status, headers))
        )
        data = b"".join(chunks)
        return told[0][0], told[0][1], data

    def _wrong_sum(self, seen: Seen, body: bytes) -> str:
        sums = {
            "x-amz-checksum-crc32c": native.crc32c,
            "x-amz-checksum-crc32": zlib.crc32,
        }
        for header, compute in sums.items():
            if header in seen.headers:
                with self._lock:
                    self.num_sums_checked += 1
                expected = base64.b64encode(compute(body).to_bytes(4, "big")).decode()
                if seen.headers[header] != expected:
                    return f"{header}: expected {expected}, got {seen.headers[header]}"
        return ""


def nth(number: int, fault: str) -> Fault:
    """`fault` for the request of that number, counted from 0."""
    return lambda seen: fault if seen.number == number else None


def every(what: str, fault: str, times: int = 1_000_000) -> Fault:
    """`fault` for the first `times` requests whose `what` begins so."""
    left = [times]

    def decide(seen: Seen) -> str | None:
        if left[0] and seen.what.startswith(what):
            left[0] -= 1
            return fault
        return None

    return decide


def _body(environ: Environ) -> bytes:
    """The request's, read whole, so that a client never meets a closed door while it sends."""
    from io import BytesIO

    size = int(environ.get("CONTENT_LENGTH") or 0)
    body: bytes = environ["wsgi.input"].read(size) if size else b""
    environ["wsgi.input"] = BytesIO(body)
    return body


def _seen(number: int, environ: Environ) -> Seen:
    headers = {
        key[5:].replace("_", "-").lower(): value
        for key, value in environ.items()
        if key.startswith("HTTP_")
    }
    path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
    method, file = environ["REQUEST_METHOD"].lower(), path.rpartition("/")[2]
    if "list-type" in query:
        what = "list " + query.partition("prefix=")[2].partition("&")[0]
    elif "uploads" in query:
        what = f"begin {file}" if method == "post" else "uploads"
    elif "partNumber" in query:
        what = f"part {file}"
    elif "uploadId" in query:
        what = f"abort {file}" if method == "delete" else f"complete {file}"
    elif method == "post" and "delete" in query:
        what = "remove"
    else:
        what = f"{method} {file}"
    return Seen(number, what, path, query, headers, "if-none-match" in headers)


def _refuse(start_response: Any, status: str, code: str, text: str = "a test") -> list[bytes]:
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    start_response(status, headers)
    return [body]


def _truncated(data: bytes, environ: Environ) -> Iterable[bytes]:
    yield data[: len(data) // 2]
    raise _cut(environ)


def _cut(environ: Environ) -> ConnectionResetError:
    """Closes the connection; what is returned is to be raised."""
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return ConnectionResetError("a test closes this connection")
