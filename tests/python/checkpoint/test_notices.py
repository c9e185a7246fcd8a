"""Signals and metadata services, as the training loop is told of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoint.metadata_server import Headers, MetadataServer, answer

from tradewind.checkpoint.notice_services import Aws
from tradewind.checkpoint.notices import Notice, Notices

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == before


@pytest.fixture
def earlier() -> Iterator[list[int]]:
    """Signals that a handler saw which was there before."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, handle) for number in numbers]
    yield seen
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def until(notices: Notices) -> Notice:
    ends = time.monotonic() + DEADLINE_S
    while (notice := notices.notice()) is None:
        assert time.monotonic() < ends, "no notice came"
        time.sleep(0.005)
    return notice


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGUSR1))
def test_a_signal_is_noticed(number: signal.Signals) -> None:
    with Notices(signal_grace_s=45.0) as notices:
        assert notices.handles_signals and notices.notice() is None
        before = time.monotonic()
        signal.raise_signal(number)
        notice = notices.notice()
    assert notice is not None and notice.kind == number.name and not notice.is_soft
    assert before <= notice.at_s <= time.monotonic()
    assert notice.deadline_s == notice.at_s + 45.0


def test_the_first_signal_counts() -> None:
    with Notices(signal_grace_s=None) as notices:
        signal.raise_signal(signal.SIGUSR1)
        first = notices.notice()
        signal.raise_signal(signal.SIGTERM)
        assert notices.notice() is first
        assert first is not None and first.deadline_s is None


def test_earlier_handlers_are_called_and_come_back(earlier: list[int]) -> None:
    with Notices() as notices:
        signal.raise_signal(signal.SIGTERM)
        assert notices.notice() is not None and earlier == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert earlier == [signal.SIGTERM] * 2


def test_ignored_signals_are_noticed_and_ignored_again() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Notices() as notices:
            signal.raise_signal(signal.SIGUSR1)
            assert notices.notice() is not None
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_what_is_asked_for_is_handled() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Notices([signal.SIGUSR1]):
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGUSR1) is not before


def test_one_after_the_other_and_one_in_the_other(earlier: list[int]) -> None:
    with Notices() as outer, Notices() as inner:
        signal.raise_signal(signal.SIGTERM)
        assert inner.notice() is not None and outer.notice() is not None
        assert earlier == [signal.SIGTERM]


def test_one_that_is_closed_beneath_another_passes_signals_on(earlier: list[int]) -> None:
    first = Notices()
    second = Notices()
    first.close()  # cannot give back what second has
    signal.raise_signal(signal.SIGTERM)
    assert second.notice() is not None and first.notice() is None
    assert earlier == [signal.SIGTERM]
    second.close()
    signal.raise_signal(signal.SIGTERM)  # to first's handler, which second gave back
    assert earlier == [signal.SIGTERM] * 2


def test_another_thread_cannot_handle_signals_and_need_not() -> None:
    found: list[bool] = []

    def make() -> None:
        with Notices() as notices:
            found.append(notices.handles_signals)
            notices.close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(DEADLINE_S)
    assert found == [False]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_forked_children_end_by_the_signal() -> None:
    done = run_python(
        """
        import multiprocessing, os, signal, time
        from tradewind.checkpoint.notices import Notices

        def wait(told):
            told.send(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
            time.sleep(3600)

        notices = Notices()
        here, there = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=wait, args=(there,))
        child.start()
        assert here.recv()
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM, child.exitcode

        pid = os.fork()  # and one whose fork nobody was told of
        if pid == 0:
            notices._is_closed = False
            signal.signal(signal.SIGTERM, notices._handler)
            notices._previous[signal.SIGTERM] = signal.SIG_DFL
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM

        assert notices.notice() is None
        signal.raise_signal(signal.SIGTERM)
        print(notices.notice().kind)
        """
    )
    assert (done.stdout, done.returncode) == ("SIGTERM\n", 0), done.stderr


def test_after_close_a_signal_ends_the_process_as_by_default() -> None:
    for how in ("notices.close()", "del notices"):
        done = run_python(
            f"""
            import signal
            from tradewind.checkpoint.notices import Notices
            notices = Notices()
            {how}
            signal.raise_signal(signal.SIGTERM)
            print("lives on")
            """
        )
        assert (done.stdout, done.returncode) == ("", -signal.SIGTERM), done.stderr


def test_closing_twice_is_closing_once() -> None:
    notices = Notices()
    notices.close()
    notices.close()
    assert notices.notice() is None


# --- services -------------------------------------------------------------------------------------


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("tradewind-notices")]


def preempting(method: str, path: str, headers: Headers) -> bytes:
    if "Metadata-Flavor" not in headers:
        return answer(status=404)
    return answer("TRUE" if "preempted" in path else "NONE", Metadata_Flavor="Google")


def test_a_service_that_is_there_is_asked() -> None:
    with MetadataServer(preempting) as server:
        environ = {"TRADEWIND_METADATA_URL": server.url}
        with Notices((), services=["gcp"], environ=environ) as notices:
            notice = until(notices)
            assert all(thread.daemon for thread in threads())
        assert threads() == []
    assert notice.kind == "gcp-preempted"
    assert notice.deadline_s == pytest.approx(notice.at_s + 30)


def test_auto_finds_the_service_that_answers() -> None:
    with MetadataServer(preempting) as server:
        with Notices((), services="auto", urls=dict.fromkeys(CLOUDS, server.url)) as notices:
            assert until(notices).kind == "gcp-preempted"
            for thread in threads():
                if not thread.name.endswith("gcp"):
                    thread.join(DEADLINE_S)
                    assert not thread.is_alive()
        tried = {path for _, path, headers in server.requests if "Metadata-Flavor" not in headers}
    assert len(tried) == 2  # one question each of the other clouds, and none after that


CLOUDS = ("aws", "gcp", "azure")


def test_auto_ends_where_nobody_answers() -> None:
    with MetadataServer(preempting) as server:
        url = server.url
    with Notices((), services="auto", environ={"TRADEWIND_METADATA_URL": url}) as notices:
        for thread in threads():
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert notices.notice() is None


def test_by_default_no_service_is_asked() -> None:
    with MetadataServer(preempting) as server:
        with Notices((), environ={"TRADEWIND_METADATA_URL": server.url}) as notices:
            assert threads() == [] and notices.notice() is None
        assert server.requests == []


class Rebalances:
    """EC2 that recommends to rebalance and, once told to, takes the instance."""

    def __init__(self) -> None:
        self.takes = False

    def __call__(self, method: str, path: str, headers: Headers) -> bytes:
        if method == "PUT":
            return answer("token")
        if path.endswith("rebalance"):
            return answer(json.dumps({"noticeTime": "2031-05-04T11:59:00Z"}))
        if self.takes:
            return answer(json.dumps({"action": "terminate", "time": "2001-01-01T00:00:00Z"}))
        return answer(status=404)


def test_a_soft_notice_is_told_until_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aws, "poll_s", 0.05)
    ec2 = Rebalances()
    with (
        MetadataServer(ec2) as server,
        Notices((), services=["aws"], urls={"aws": server.url}) as n,
    ):
        soft = until(n)
        assert (soft.kind, soft.deadline_s, soft.is_soft) == ("aws-rebalance", None, True)
        n.acknowledge_soft()
        server.wait_for_requests(len(server.requests) + 4)  # it is not told again
        assert n.notice() is None
        ec2.takes = True
        assert until(n).kind == "aws-spot"


@pytest.mark.usefixtures("earlier")
def test_of_two_notices_the_one_that_ends_sooner() -> None:
    for grace_s, expected in ((5.0, "SIGTERM"), (500.0, "gcp-preempted"), (None, "gcp-preempted")):
        with (
            MetadataServer(preempting) as server,
            Notices(services=["gcp"], urls={"gcp": server.url}, signal_grace_s=grace_s) as notices,
        ):
            until(notices)
            signal.raise_signal(signal.SIGTERM)
            found = notices.notice()
            assert found is not None and found.kind == expected


def test_close_does_not_wait_for_a_service_that_hangs() -> None:
    released = threading.Event()

    def hang(*request: Any) -> None:
        released.wait(DEADLINE_S)

    with MetadataServer(hang) as server:
        notices = Notices((), services=["gcp"], urls={"gcp": server.url})
        server.wait_for_requests()
        notices.close()
        assert threads() == []
        released.set()


def test_bad_services_are_named_before_anything_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="got 'ibm'"):
        Notices(services=["ibm"])
    with pytest.raises(ValueError, match=r"expected http://HOST\[:PORT\]"):
        Notices(services=["aws"], urls={"aws": "https://x"})
    assert signal.getsignal(signal.SIGTERM) is before and threads() == []
