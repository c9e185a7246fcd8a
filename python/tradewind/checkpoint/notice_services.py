"""The metadata services of AWS, GCP and Azure: each asked, over plain sockets, whether this machine
goes soon. Whatever they answer, a request ends at its deadline and reads at most 64 KiB.

A service belongs to one thread; `close()` alone comes from another and ends a request in progress.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

_MAX_BODY_BYTES = 64 * 1024
_REQUEST_S = 2.0
_PROBE_S = 1.0
_LINK_LOCAL = "http://169.254.169.254"  # of all three


@dataclass(frozen=True)
class Finding:
    """Of `kind` as in `Notice`; seen at `at_s`, the machine goes at `deadline_s`, of
    `time.monotonic()`."""

    kind: str
    at_s: float
    deadline_s: float | None
    is_soft: bool = False


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str


class Service(ABC):
    """One metadata service. `notice_s`: how long before the end it says so."""

    name: str
    notice_s: float
    poll_s = 5.0

    def __init__(self, url: str) -> None:
        """Raises ValueError for an address that is not http://HOST[:PORT]."""
        self._host, self._port = _address(self.name, url)
        self._socket: socket.socket | None = None
        self._is_closed = False

    @abstractmethod
    def ask(self) -> list[Finding]:
        """What it says now; nothing where it does not answer, or says what nobody understands."""

    @abstractmethod
    def probe(self) -> bool:
        """Whether this very service answers within a second."""

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def _request(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        timeout_s: float = _REQUEST_S,
    ) -> Answer | None:
        """The whole answer; None where there is none by the deadline."""
        until = time.monotonic() + timeout_s
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}",
            "Connection: close",
            "Accept: */*",
            *(f"{name}: {value}" for name, value in headers.items()),
            *(["Content-Length: 0"] if method == "PUT" else []),
        ]
        try:
            with socket.create_connection((self._host, self._port), timeout_s) as connection:
                self._socket = connection
                if self._is_closed:
                    return None
                connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
                response = http.client.HTTPResponse(_Until(connection, until), method=method)  # type: ignore[arg-type]
                response.begin()
                body = response.read(_MAX_BODY_BYTES + 1)
                if len(body) > _MAX_BODY_BYTES or response.length:
                    return None  # too much, or less than it said
                return Answer(response.status, response.headers, body.decode("utf-8").strip())
        except (OSError, http.client.HTTPException, ValueError):
            return None  # ValueError: a length or text that is none
        finally:
            self._socket = None

    def _finding(self, kind: str, left_s: float | None, *, is_soft: bool = False) -> Finding:
        now = time.monotonic()
        return Finding(kind, now, None if left_s is None else now + left_s, is_soft)


class Aws(Service):
    """EC2, instance metadata version 2: a session token, then `spot/instance-action`, two minutes
    before (best effort), and the rebalance recommendation, which is soft."""

    name = "aws"
    notice_s = 120.0
    _TOKEN_S = 21600

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._token: str | None = None
        self._renew_s = 0.0
        self._rebalance: str | None = None  # the one that was told

    def probe(self) -> bool:
        return self._take_token(_PROBE_S)

    def ask(self) -> list[Finding]:
        if time.monotonic() >= self._renew_s and not self._take_token(_REQUEST_S):
            return []
        found = []
        action = self._get("/latest/meta-data/spot/instance-action")
        told = _json_of(action, "action", "time")
        if told.get("action") in ("terminate", "stop", "hibernate"):
            assert action is not None
            found.append(self._finding("aws-spot", self._left_s(told["time"], action)))
        advice = self._get("/latest/meta-data/events/recommendations/rebalance")
        advised = _json_of(advice, "noticeTime").get("noticeTime")
        if advised is not None and advised != self._rebalance:
            self._rebalance = advised
            found.append(self._finding("aws-rebalance", None, is_soft=True))
        return found

    def _take_token(self, timeout_s: float) -> bool:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_S)}
        answer = self._request("/latest/api/token", headers, method="PUT", timeout_s=timeout_s)
        if answer is None or answer.status != 200 or not _is_token(answer.text):
            return False
        self._token = answer.text
        self._renew_s = time.monotonic() + self._TOKEN_S / 2
        return True

    def _get(self, path: str) -> Answer | None:
        answer = self._request(path, {"X-aws-ec2-metadata-token": self._token or ""})
        if answer is not None and answer.status == 401:
            self._renew_s = 0.0  # the token is no longer good: take another one next time
        return answer if answer is not None and answer.status == 200 else None

    def _left_s(self, text: str, answer: Answer) -> float:
        """By the service's own clock where it says its time, else by ours; where that gives what
        cannot be, the notice came since it was last asked for."""
        with contextlib.suppress(ValueError, TypeError):
            ends = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
            left_s = (ends - _now_by(answer)).total_seconds()
            if 0.0 <= left_s <= self.notice_s:
                return left_s
        return self.notice_s - self.poll_s


class Gcp(Service):
    """Compute Engine: `preempted` holds its answer back until it changes; maintenance events that
    end the machine are asked for in between. 30 seconds."""

    name = "gcp"
    notice_s = 30.0
    _HOLD_S = 4
    _HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012
    _PATH = "/computeMetadata/v1/instance"

    def probe(self) -> bool:
        answer = self._request(f"{self._PATH}/preempted", self._HEADERS, timeout_s=_PROBE_S)
        return (
            answer is not None
            and answer.status == 200
            and answer.headers.get("Metadata-Flavor") == "Google"
        )

    def ask(self) -> list[Finding]:
        found = []
        event = self._get("maintenance-event", _REQUEST_S)
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            found.append(self._finding("gcp-maintenance", self.notice_s))
        held = f"preempted?wait_for_change=true&timeout_sec={self._HOLD_S}"
        # What is already true does not change any more: it is asked for plainly first.
        for path, timeout_s in (("preempted", _REQUEST_S), (held, self._HOLD_S + _REQUEST_S)):
            if found:
                break
            if self._get(path, timeout_s) == "TRUE":
                found.append(self._finding("gcp-preempted", self.notice_s))
        return found

    def _get(self, path: str, timeout_s: float) -> str | None:
        answer = self._request(f"{self._PATH}/{path}", self._HEADERS, timeout_s=timeout_s)
        return answer.text if answer is not None and answer.status == 200 else None


class Azure(Service):
    """Scheduled events that take this virtual machine away: Preempt (30 seconds before) and
    Terminate. `NotBefore` is when it may happen; empty once it has begun."""

    name = "azure"
    notice_s = 30.0
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _HEADERS = {"Metadata": "true"}  # noqa: RUF012
    _LONGEST_S = 900.0  # of Terminate, as it can be configured
    _KINDS = {"Preempt": "azure-preempt", "Terminate": "azure-terminate"}  # noqa: RUF012

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._machine: str | None = None

    def probe(self) -> bool:
        answer = self._request(self._NAME, self._HEADERS, timeout_s=_PROBE_S)
        if answer is None or answer.status != 200 or not answer.text:
            return False
        self._machine = answer.text
        return True

    def ask(self) -> list[Finding]:
        if self._machine is None:
            self.probe()
        answer = self._request(self._EVENTS, self._HEADERS)
        if answer is None or answer.status != 200:
            return []
        events = _json_of(answer).get("Events")
        found = []
        for event in events if isinstance(events, list) else []:
            if isinstance(event, dict) and self._is_ours(event):
                left_s = self._left_s(event.get("NotBefore"), answer)
                found.append(self._finding(self._KINDS[event["EventType"]], left_s))
        return found

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """Other machines of a scale set are told of here as well."""
        kind = event.get("EventType")
        if not isinstance(kind, str) or kind not in self._KINDS:
            return False
        if event.get("EventStatus") not in (None, "Scheduled", "Started"):
            return False
        machines = event.get("Resources")
        return self._machine is None or not isinstance(machines, list) or self._machine in machines

    def _left_s(self, text: Any, answer: Answer) -> float | None:
        if text == "":
            return None  # at any moment
        with contextlib.suppress(ValueError, TypeError):
            left_s = (_utc(parsedate_to_datetime(text)) - _now_by(answer)).total_seconds()
            if 0.0 <= left_s <= self._LONGEST_S:
                return left_s
        return self.notice_s - self.poll_s


_SERVICES: dict[str, type[Service]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def services_of(
    names: Sequence[str] | Literal["auto"], urls: Mapping[str, str], environ: Mapping[str, str]
) -> list[Service]:
    """The services by name ("auto": all of them), each at its address. Raises ValueError for a name
    or address that is none."""
    wanted = tuple(_SERVICES) if names == "auto" else tuple(names)
    unknown = sorted({*wanted, *urls} - set(_SERVICES))
    if isinstance(names, str) and names != "auto":
        unknown = [names]
    if unknown:
        raise ValueError(
            f'services: expected "auto" or names among {", ".join(_SERVICES)}, got '
            f"{', '.join(map(repr, unknown))}"
        )
    found = []
    for name in dict.fromkeys(wanted):
        own = environ.get(f"TRADEWIND_METADATA_URL_{name.upper()}")
        of_all = environ.get("TRADEWIND_METADATA_URL")
        found.append(_SERVICES[name](urls.get(name) or own or of_all or _LINK_LOCAL))
    return found


class _Until(io.RawIOBase):
    """A socket's bytes until a point of `time.monotonic()`, whatever trickles in until then."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("the answer did not end in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


def _address(name: str, url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        is_bare = parts.path in ("", "/") and not parts.query and not parts.username
        if parts.scheme == "http" and parts.hostname and is_bare:
            return parts.hostname, parts.port or 80
    raise ValueError(f"metadata service of {name}: expected http://HOST[:PORT], got {url!r}")


def _is_token(text: str) -> bool:
    return 0 < len(text) <= 1024 and text.isascii() and text.isprintable()


def _json_of(answer: Answer | None, *keys: str) -> dict[str, Any]:
    """The JSON object of an answer that holds text at these keys; else an empty one."""
    try:
        value = json.loads(answer.text) if answer is not None else None
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in keys):
        return {}
    return value


def _now_by(answer: Answer) -> datetime:
    with contextlib.suppress(ValueError, TypeError):
        return _utc(parsedate_to_datetime(answer.headers["Date"]))
    return datetime.now(timezone.utc)


def _utc(value: datetime) -> datetime:
    return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value
