"""The metadata services of three clouds: what they say, and what may come instead of an answer."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest
from checkpoint.metadata_server import Headers, MetadataServer, answer

from tradewind.checkpoint.notice_services import Aws, Azure, Gcp, Service, services_of

# The service's own clock, which is not ours.
NOW = datetime(2031, 5, 4, 12, 0, 0, tzinfo=timezone.utc)
DATE = {"Date": format_datetime(NOW, usegmt=True)}


def left_s(finding: Any) -> float:
    return float(finding.deadline_s - finding.at_s)


# --- AWS ------------------------------------------------------------------------------------------


class Ec2:
    """Instance metadata, version 2: tokens are needed, and what there is to say can be set."""

    def __init__(self, **said: str) -> None:
        self.said = said
        self.tokens = ["token-1"]

    def __call__(self, method: str, path: str, headers: Headers) -> bytes:
        if path == "/latest/api/token":
            good = method == "PUT" and int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            return answer(self.tokens[-1], **DATE) if good else answer(status=400)
        if headers.get("X-aws-ec2-metadata-token") != self.tokens[-1]:
            return answer(status=401)
        name = path.rsplit("/", 1)[1].replace("-", "_")
        assert path in (
            "/latest/meta-data/spot/instance-action",
            "/latest/meta-data/events/recommendations/rebalance",
        )
        return answer(self.said[name], **DATE) if name in self.said else answer(status=404)


def action(kind: str = "terminate", seconds: float = 110) -> str:
    ends = NOW + timedelta(seconds=seconds)
    return json.dumps({"action": kind, "time": ends.strftime("%Y-%m-%dT%H:%M:%SZ")})


def test_aws_without_anything_to_say() -> None:
    with MetadataServer(Ec2()) as server:
        service = Aws(server.url)
        assert service.probe() and service.ask() == []
        assert [method for method, _, _ in server.requests] == ["PUT", "GET", "GET"]


@pytest.mark.parametrize("kind", ("terminate", "stop", "hibernate"))
def test_aws_takes_a_spot_instance_back(kind: str) -> None:
    with MetadataServer(Ec2(instance_action=action(kind))) as server:
        (finding,) = Aws(server.url).ask()
    assert finding.kind == "aws-spot" and not finding.is_soft
    assert left_s(finding) == pytest.approx(110)
    assert finding.at_s <= time.monotonic()


def test_aws_recommends_to_rebalance_once() -> None:
    told = json.dumps({"noticeTime": "2031-05-04T11:59:00Z"})
    ec2 = Ec2(rebalance=told)
    with MetadataServer(ec2) as server:
        service = Aws(server.url)
        (finding,) = service.ask()
        assert (finding.kind, finding.deadline_s, finding.is_soft) == ("aws-rebalance", None, True)
        assert service.ask() == []
        ec2.said["rebalance"] = told.replace("11:59", "12:59")
        assert [finding.kind for finding in service.ask()] == ["aws-rebalance"]


def test_aws_renews_a_token_that_is_no_longer_good() -> None:
    ec2 = Ec2(instance_action=action())
    with MetadataServer(ec2) as server:
        service = Aws(server.url)
        assert service.ask()
        ec2.tokens.append("token-2")
        assert service.ask() == []
        assert service.ask()


@pytest.mark.parametrize("seconds", (-50, 100_000))
def test_a_time_that_cannot_be_means_the_notice_is_new(seconds: float) -> None:
    with MetadataServer(Ec2(instance_action=action(seconds=seconds))) as server:
        (finding,) = Aws(server.url).ask()
    assert left_s(finding) == pytest.approx(115)  # 2 min less the time between two questions


# --- GCP ------------------------------------------------------------------------------------------


class ComputeEngine:
    def __init__(self, preempted: str = "FALSE", event: str = "NONE") -> None:
        self.preempted, self.event = preempted, event
        self.changes = threading.Event()

    def __call__(self, method: str, path: str, headers: Headers) -> bytes:
        if headers.get("Metadata-Flavor") != "Google":
            return answer(status=403)
        base, _, question = path.removeprefix("/computeMetadata/v1/instance/").partition("?")
        if "wait_for_change=true" in question:
            self.changes.wait(30)
        told = {"preempted": self.preempted, "maintenance-event": self.event}[base]
        return answer(told, Metadata_Flavor="Google")


def test_gcp_tells_as_soon_as_it_changes() -> None:
    engine = ComputeEngine()
    with MetadataServer(engine) as server:
        service = Gcp(server.url)
        assert service.probe()
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(service.ask()))
        asking.start()
        server.wait_for_requests(part="wait_for_change")
        engine.preempted = "TRUE"
        engine.changes.set()
        asking.join(60)
        (finding,) = found
    assert finding.kind == "gcp-preempted" and left_s(finding) == pytest.approx(30)


def test_gcp_tells_what_was_true_already() -> None:
    with MetadataServer(ComputeEngine(preempted="TRUE")) as server:
        assert [finding.kind for finding in Gcp(server.url).ask()] == ["gcp-preempted"]
        assert not any("wait_for_change" in path for _, path, _ in server.requests)


def test_gcp_maintenance_that_ends_the_machine() -> None:
    engine = ComputeEngine(event="TERMINATE_ON_HOST_MAINTENANCE")
    with MetadataServer(engine) as server:
        assert [finding.kind for finding in Gcp(server.url).ask()] == ["gcp-maintenance"]
    engine = ComputeEngine(event="MIGRATE_ON_HOST_MAINTENANCE")
    engine.changes.set()
    with MetadataServer(engine) as server:
        assert Gcp(server.url).ask() == []


# --- Azure ----------------------------------------------------------------------------------------


def event(kind: str = "Preempt", seconds: float | None = 25, **more: Any) -> dict[str, Any]:
    before = "" if seconds is None else format_datetime(NOW + timedelta(seconds=seconds), True)
    told = {"EventId": "x", "EventType": kind, "EventStatus": "Scheduled", "NotBefore": before}
    return {**told, "Resources": ["this-vm"], **more}


def azure(*events: Any, name: str | None = "this-vm") -> Any:
    def respond(method: str, path: str, headers: Headers) -> bytes:
        if headers.get("Metadata") != "true":
            return answer(status=400)
        if path.startswith("/metadata/instance/compute/name?api-version="):
            return answer(name, **DATE) if name is not None else answer(status=404)
        assert path == "/metadata/scheduledevents?api-version=2020-07-01"
        return answer(json.dumps({"DocumentIncarnation": 1, "Events": list(events)}), **DATE)

    return respond


@pytest.mark.parametrize(
    "kind, seconds, found, left",
    [
        ("Preempt", 25, "azure-preempt", 25),
        ("Terminate", 600, "azure-terminate", 600),
        ("Preempt", -5, "azure-preempt", 25),  # cannot be: 30 s less the time between questions
        ("Terminate", 1e6, "azure-terminate", 25),
    ],
)
def test_azure_events(kind: str, seconds: float, found: str, left: float) -> None:
    with MetadataServer(azure(event(kind, seconds))) as server:
        service = Azure(server.url)
        assert service.probe()
        (finding,) = service.ask()
    assert finding.kind == found and left_s(finding) == pytest.approx(left)


def test_an_azure_event_that_has_begun_may_come_at_any_moment() -> None:
    with MetadataServer(azure(event(seconds=None, EventStatus="Started"))) as server:
        (finding,) = Azure(server.url).ask()
    assert finding.kind == "azure-preempt" and finding.deadline_s is None


def test_azure_events_of_other_machines_and_kinds_are_nothing() -> None:
    others = [
        event(Resources=["another-vm"]),
        event("Reboot"),
        event("Freeze"),
        event(EventStatus="Completed"),
    ]
    with MetadataServer(azure(*others)) as server:
        assert Azure(server.url).ask() == []


def test_azure_without_a_name_takes_every_event_as_its_own() -> None:
    with MetadataServer(azure(event(Resources=["another-vm"]), name=None)) as server:
        assert len(Azure(server.url).ask()) == 1


# --- what may come instead ------------------------------------------------------------------------

HOSTILE: dict[str, bytes | None] = {
    "hangs up": None,
    "nothing": b"",
    "no HTTP": b"\x00\xff" * 2000,
    "another version": b"HTTP/9.9 200 OK\r\n\r\nTRUE",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nTRUE",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "chunks that are none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nTRUE",
    "a line without end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 5000 + b"\r\n",
    "too much": b"HTTP/1.1 200 OK\r\n\r\n" + b"A" * 1_000_000,
    "a page": answer("<html>captive portal</html>"),
    "redirect": answer(status=302, Location="http://169.254.169.253/"),
    "error": answer("TRUE", status=500),
    "no text": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
    "deep JSON": answer("[" * 60_000),
    "other JSON": answer('{"Events": [1, null, {"EventType": ["Preempt"]}, {"EventType": 3}]}'),
    "a list": answer("[1, 2]"),
    "times of another kind": answer('{"action": "terminate", "time": 5, "noticeTime": []}'),
    "a token with a line's end": answer("a\r\nX-Evil: 1"),
}


@pytest.mark.parametrize("make", (Aws, Gcp, Azure))
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_nobody_understands_is_no_notice(kind: str, make: type[Service]) -> None:
    with MetadataServer(lambda *request: HOSTILE[kind]) as server:
        assert make(server.url).ask() == []


# What would do for a token: no line's end, not too long.
TOKENS = {"a page", "deep JSON", "other JSON", "a list", "times of another kind"}


@pytest.mark.parametrize(
    "make, kind",
    [(Gcp, kind) for kind in HOSTILE] + [(Aws, kind) for kind in HOSTILE if kind not in TOKENS],
)
def test_what_nobody_understands_is_no_such_service(kind: str, make: type[Service]) -> None:
    with MetadataServer(lambda *request: HOSTILE[kind]) as server:
        assert not make(server.url).probe()


@pytest.mark.parametrize("make", (Aws, Gcp, Azure))
def test_a_service_that_another_cloud_runs_is_not_taken_for_ours(make: type[Service]) -> None:
    for other, respond in ((Aws, Ec2()), (Gcp, ComputeEngine()), (Azure, azure())):
        with MetadataServer(respond) as server:
            assert make(server.url).probe() == (make is other)


def test_an_answer_that_dribbles_in_ends_at_the_deadline() -> None:
    """Byte by byte it would take minutes; each byte alone is in time."""
    slow = MetadataServer(lambda *request: answer("a" * 600), dribble_s=0.2)
    with slow as server:
        began = time.monotonic()
        assert not Aws(server.url).probe()
        assert time.monotonic() - began < 60  # 1 s by design; the machine may be busy


def test_nobody_there() -> None:
    with MetadataServer(Ec2()) as server:
        url = server.url
    for make in (Aws, Gcp, Azure):
        assert make(url).ask() == [] and not make(url).probe()


def test_close_ends_a_question_in_progress() -> None:
    engine = ComputeEngine()
    with MetadataServer(engine) as server:
        service = Gcp(server.url)
        asking = threading.Thread(target=service.ask)
        asking.start()
        server.wait_for_requests(part="wait_for_change")
        service.close()
        asking.join(60)
        assert not asking.is_alive()
        assert service.ask() == []
        engine.changes.set()


# --- which services, and where --------------------------------------------------------------------


def test_addresses_come_from_arguments_then_the_environment() -> None:
    environ = {
        "TRADEWIND_METADATA_URL": "http://all:1",
        "TRADEWIND_METADATA_URL_GCP": "http://of-gcp:2/",
    }
    found = services_of("auto", {"azure": "http://given"}, environ)
    assert [(s.name, s._host, s._port) for s in found] == [
        ("aws", "all", 1),
        ("gcp", "of-gcp", 2),
        ("azure", "given", 80),
    ]
    (aws,) = services_of(["aws", "aws"], {}, {})
    assert (aws._host, aws._port) == ("169.254.169.254", 80)
    assert services_of((), {}, environ) == []


@pytest.mark.parametrize(
    "url",
    [
        *("https://x", "ftp://x", "x", "", "http://", "http://x/path", "http://x?y", "file:///x"),
        *("http://x:port", "http://x:99999", "http://user@x"),
    ],
)
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        services_of(["aws"], {}, {"TRADEWIND_METADATA_URL": url or " "})
    assert "metadata service of aws: expected http://HOST[:PORT]" in str(caught.value)


@pytest.mark.parametrize("names", (["ibm"], "aws", ["aws", "oracle"]))
def test_a_service_that_is_none_is_named(names: Any) -> None:
    with pytest.raises(ValueError, match=r'expected "auto" or names among aws, gcp, azure, got'):
        services_of(names, {}, {})
    with pytest.raises(ValueError, match="got 'ibm'"):
        services_of(["aws"], {"ibm": "http://x"}, {})
