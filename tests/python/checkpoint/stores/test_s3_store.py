"""S3's own: answers that were lost, refusals by name, parts, pages, sums."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.commits import contents_of
from checkpoint.stores.faulty_server import FaultyServer, Seen, every, nth
from checkpoint.stores.places import MIN_PART_BYTES, QUICK, make_bucket

from tradewind.checkpoint.stores.patience import Deadline, Patience, StoreError

SOON = timedelta(seconds=120)


def uploaded(store: Any, tmp_path: Path, size: int, deadline: timedelta = SOON) -> bytes:
    data = os.urandom(size)
    path = tmp_path / f"shard-{len(list(tmp_path.iterdir()))}"
    path.write_bytes(data)
    with path.open("rb") as file:
        contents = contents_of("shard", data)
        store.upload_file("folder/shard", file.fileno(), contents, Deadline(deadline))
    return data


@pytest.mark.parametrize("fault", ["503", "500", "409", "dropped", "lost"])
def test_creation_survives_one_fault(
    s3: FaultyServer, s3_url: str, opened: Any, fault: str
) -> None:
    store = opened(s3_url)
    s3.reset(nth(0, fault))
    assert store.create("claim", b"mine")
    assert store.read("claim", 10) == b"mine"
    puts = [seen for seen in s3.seen if seen.what == "put claim"]
    assert len(puts) == 2
    assert all(seen.is_conditional for seen in puts)


def test_exists_is_believed_only_after_looking(s3: FaultyServer, s3_url: str, opened: Any) -> None:
    store = opened(s3_url)
    s3.reset(nth(0, "412"))  # of an object that is gone when looked for
    assert store.create("claim", b"mine")
    s3.reset(every("put", "412"))
    with pytest.raises(StoreError, match="exists when written and is gone when read"):
        store.create("other", b"mine")


def test_a_store_without_conditional_writes(s3: FaultyServer, s3_url: str, opened: Any) -> None:
    store = opened(s3_url)
    s3.reset(every("put", "501"))
    with pytest.raises(StoreError, match="does not have what the commit protocol needs"):
        store.create("claim", b"mine")
    assert s3.whats() == ["put claim"]  # not tried again


def test_an_outage_is_bounded_and_counted(s3: FaultyServer, s3_url: str, opened: Any) -> None:
    store = opened(s3_url)
    s3.reset(lambda seen: "503")
    with pytest.raises(
        StoreError, match=r"claim: put_object: 503 SlowDown.*tried 6 times"
    ) as raised:
        store.create("claim", b"mine")
    assert raised.value.transient
    assert len(s3.seen) == QUICK.num_tries


def test_silence_ends_with_the_connections_time(s3: FaultyServer, s3_url: str, opened: Any) -> None:
    impatient = Patience(
        request=timedelta(seconds=60),
        silence=timedelta(milliseconds=300),
        num_tries=2,
        first_pause=timedelta(milliseconds=1),
    )
    store = opened(s3_url, patience=impatient)
    s3.reset(lambda seen: "hang")
    with pytest.raises(StoreError, match="ReadTimeoutError") as raised:
        store.read("claim", 10)
    assert raised.value.transient


def test_nothing_listens(opened: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="check the network and AWS_ENDPOINT_URL"):
        opened(s3_url).entries()


def test_a_bucket_that_is_not_there(s3: FaultyServer, opened: Any) -> None:
    store = opened("s3://no-such-bucket/prefix")
    for call in (store.entries, lambda: store.create("a", b"x"), lambda: store.read("a", 10)):
        with pytest.raises(StoreError, match="make the bucket, or correct the URL"):
            call()


def test_no_credentials(s3_url: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="check the AWS credentials") as raised:
        opened(s3_url).entries()
    assert not raised.value.transient


def test_an_unknown_profile(opened: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"nobody.*check the AWS credentials"):
        opened(s3_url)


def test_refused(s3: FaultyServer, s3_url: str, opened: Any) -> None:
    store = opened(s3_url)
    s3.reset(every("put", "403"))
    with pytest.raises(StoreError, match=r"403 AccessDenied.*allow s3:ListBucket"):
        store.replace("a", b"x")
    s3.reset(every("put", "507"))
    with pytest.raises(StoreError, match="the store is full"):
        store.replace("a", b"x")


def test_a_bucket_of_another_region(s3: FaultyServer, opened: Any) -> None:
    """moto has all regions in one: what botocore would raise is made here."""
    from tradewind.checkpoint.stores.s3_answers import translated

    class Redirect(Exception):
        response = {  # noqa: RUF012
            "Error": {"Code": "PermanentRedirect", "Message": "use the other endpoint."},
            "ResponseMetadata": {
                "HTTPStatusCode": 301,
                "HTTPHeaders": {"x-amz-bucket-region": "eu-west-1"},
            },
        }

    error = translated("s3://b/p: list_objects_v2", Redirect())
    assert "the bucket is in eu-west-1: set AWS_REGION" in str(error)
    assert not error.transient


def test_pages(s3: FaultyServer, s3_url: str, opened: Any) -> None:
    """Of two keys each, from a server that holds to them."""
    store = opened(s3_url)
    keys = [f"k{number}" for number in range(5)]
    for key in keys:
        store.replace(key, b"x")
    once = store.call
    store.call = lambda *what, **given: once(
        *what, **given, **({"MaxKeys": 2} if what[0] == "list_objects_v2" else {})
    )
    s3.reset()
    assert [entry.key for entry in store.entries()] == keys
    assert len(s3.seen) == 3
    store.delete(keys)
    assert store.entries() == []


def test_parts_carry_the_sums_of_the_shard(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    data = uploaded(store, tmp_path, 2 * MIN_PART_BYTES + 4096)
    assert store.read("folder/shard", len(data)) == data
    assert s3.whats().count("part shard") == 3
    assert s3.num_sums_checked == 3


def test_a_disk_that_changed_the_bytes_is_found_out(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    for size in (4096, 2 * MIN_PART_BYTES):
        data = os.urandom(size)
        path = tmp_path / "shard"
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        contents = contents_of("shard", data)
        with path.open("rb") as file, pytest.raises(StoreError, match="disk or the memory"):
            store.upload_file("folder/shard", file.fileno(), contents, Deadline(SOON))
        assert store.entries() == []
        assert not unfinished(store)


def unfinished(store: Any) -> list[Any]:
    return list(store.call("list_multipart_uploads").get("Uploads", ()))


def test_a_store_that_takes_no_crc32c(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    s3.reset(lambda s: "501" if "x-amz-checksum-algorithm" in s.headers else None)
    data = uploaded(store, tmp_path, 2 * MIN_PART_BYTES)
    assert store.read("folder/shard", len(data)) == data
    parts = [seen for seen in s3.seen if seen.what == "part shard"]
    assert all("content-md5" in seen.headers for seen in parts)
    assert s3.num_sums_checked == 0


@pytest.mark.parametrize("what", ["begin", "part", "complete"])
@pytest.mark.parametrize("fault", ["503", "dropped", "lost", "409"])
def test_multipart_uploads_survive_one_fault(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path, what: str, fault: str
) -> None:
    store = opened(s3_url)
    s3.reset(every(what, fault, times=1))
    data = uploaded(store, tmp_path, 2 * MIN_PART_BYTES + 4096)
    s3.reset()
    assert store.read("folder/shard", len(data)) == data
    if fault != "lost":  # an upload begun twice stays until it is cleared
        assert not unfinished(store)
    store.clear_unfinished("attempts/")
    assert not unfinished(store)


@pytest.mark.parametrize("answer", ["412", "404", "409"])
def test_a_completion_whose_answer_was_lost(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path, answer: str
) -> None:
    """moto completes the same upload twice; other stores have forgotten it, or say it exists."""
    store = opened(s3_url)
    faults = iter(["lost", answer])
    s3.reset(lambda seen: next(faults, None) if seen.what == "complete shard" else None)
    data = uploaded(store, tmp_path, 2 * MIN_PART_BYTES)
    assert store.read("folder/shard", len(data)) == data
    assert s3.whats().count("complete shard") == 2
    # Without an object, or with another one, the same answer is an error.
    store.delete(["folder/shard"])
    s3.reset(every("complete", answer))
    with pytest.raises(StoreError, match=answer):
        uploaded(store, tmp_path, 2 * MIN_PART_BYTES)
    assert store.entries() == []


def test_a_failed_upload_is_taken_back(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    for what in ("part", "complete"):
        s3.reset(every(what, "403"))
        with pytest.raises(StoreError, match="403 AccessDenied"):
            uploaded(store, tmp_path, 2 * MIN_PART_BYTES)
        assert not unfinished(store)
    assert store.entries() == []


def test_somebody_elses_object_is_not_overwritten(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    store.replace("folder/shard", b"precious")
    for size in (4096, 2 * MIN_PART_BYTES):
        with pytest.raises(StoreError, match="412"):
            uploaded(store, tmp_path, size)
    assert store.read("folder/shard", 100) == b"precious"


def test_a_hung_part_is_named_at_the_deadline(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    s3.reset(lambda s: "hang" if s.what == "part shard" and "partNumber=2" in s.query else None)
    with pytest.raises(StoreError, match=r"part .*2.* of 3 had no answer within 5 s") as raised:
        uploaded(store, tmp_path, 3 * MIN_PART_BYTES, timedelta(seconds=5))
    assert raised.value.transient
    s3.reset()
    assert store.entries() == []


def test_parts_overtake_a_slow_one(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    """The first part is answered only when all others have arrived."""
    store = opened(s3_url, num_threads=3)
    others = threading.Semaphore(0)

    def slow(seen: Seen) -> str | None:
        if seen.what == "part shard" and "partNumber=1&" not in seen.query + "&":
            others.release()
        return None

    def wait_for_others(seen: Seen) -> None:
        if seen.what == "part shard" and "partNumber=1&" in seen.query + "&":
            for _ in range(4):
                assert others.acquire(timeout=60)

    s3.reset(slow, before=wait_for_others)
    data = uploaded(store, tmp_path, 5 * MIN_PART_BYTES)
    assert store.read("folder/shard", len(data)) == data


def test_buckets_are_apart(s3: FaultyServer, opened: Any) -> None:
    one, other = opened(f"s3://{make_bucket()}"), opened(f"s3://{make_bucket()}/")
    one.replace("a", b"x")
    assert [entry.key for entry in one.entries()] == ["a"]
    assert other.entries() == []
