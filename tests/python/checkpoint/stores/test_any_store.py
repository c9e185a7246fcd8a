"""What every store does, on S3, in memory and on files."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.commits import contents_of
from checkpoint.stores.places import MIN_PART_BYTES

from tradewind.checkpoint.stores.patience import Deadline, StoreError
from tradewind.checkpoint.stores.store import Entry

SOON = timedelta(seconds=120)


def test_objects_are_written_read_listed_and_removed(opened: Any, any_url: str) -> None:
    store = opened(any_url)
    assert store.entries() == []
    assert store.read("a", 100) is None
    store.replace("a", b"one")
    store.replace("b/c", b"two!")
    store.replace("a", b"three")
    assert store.entries() == [Entry("a", 5), Entry("b/c", 4)]
    assert store.entries("b/") == [Entry("b/c", 4)]
    assert store.read("a", 5) == b"three"
    with pytest.raises(StoreError, match="at most 4 bytes, got 5"):
        store.read("a", 4)
    store.delete(["a", "not there"])
    assert store.entries() == [Entry("b/c", 4)]
    # Another store of the same place sees it; one of a neighbouring prefix does not.
    assert opened(any_url).read("b/c", 4) == b"two!"
    assert opened(any_url + "x").entries() == []


def test_ranges(opened: Any, any_url: str) -> None:
    store = opened(any_url)
    store.replace("a", b"0123456789")
    assert store.read_range("a", 2, 3, Deadline(SOON)) == (b"234", 10)
    assert store.read_range("a", 8, 5, Deadline(SOON)) == (b"89", 10)
    assert store.read_range("a", 10, 5, Deadline(SOON)) == (b"", 10)
    assert store.read_range("b", 0, 5, Deadline(SOON)) is None


def test_exactly_one_creates(opened: Any, any_url: str) -> None:
    stores = [opened(any_url), opened(any_url)]
    won: list[bool] = [False] * 8
    barrier = threading.Barrier(len(won))

    def create(number: int) -> None:
        barrier.wait(60)
        won[number] = stores[number % 2].create("claim", b"owner %d" % number)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(len(won))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert won.count(True) == 1
    assert stores[0].read("claim", 100) == b"owner %d" % won.index(True)


def test_an_object_of_the_same_bytes_is_ones_own(opened: Any, any_url: str) -> None:
    store = opened(any_url)
    assert store.create("claim", b"mine")
    assert store.create("claim", b"mine")
    for other in (b"his!", b"min", b"mine and more"):
        assert not store.create("claim", other)
    assert store.read("claim", 100) == b"mine"


@pytest.mark.parametrize("size", [4096, MIN_PART_BYTES, 3 * MIN_PART_BYTES + 4096])
def test_files_arrive(opened: Any, any_url: str, tmp_path: Path, size: int) -> None:
    store = opened(any_url)
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(size))
    contents = contents_of("shard", path.read_bytes())
    with path.open("rb") as file:
        store.upload_file("folder/shard", file.fileno(), contents, Deadline(SOON))
        assert store.entries() == [Entry("folder/shard", size)]
        assert store.read("folder/shard", size) == path.read_bytes()
        # Again, as after a lost answer: no error, and the same object.
        store.upload_file("folder/shard", file.fileno(), contents, Deadline(SOON), again=True)
        store.upload_file("folder/shard", file.fileno(), contents, Deadline(SOON))
    assert store.read("folder/shard", size) == path.read_bytes()


def test_a_file_that_was_cut(opened: Any, any_url: str, tmp_path: Path) -> None:
    store = opened(any_url)
    data = os.urandom(3 * MIN_PART_BYTES)
    path = tmp_path / "shard"
    path.write_bytes(data[:-5])
    with path.open("rb") as file, pytest.raises(StoreError, match="local file ends at byte"):
        store.upload_file("a/shard", file.fileno(), contents_of("shard", data), Deadline(SOON))
    assert store.read_range("a/shard", 0, 1, Deadline(SOON)) is None or not any_url.startswith("s3")


def test_a_deadline_that_has_passed(opened: Any, any_url: str, tmp_path: Path) -> None:
    store = opened(any_url)
    path = tmp_path / "shard"
    path.write_bytes(bytes(3 * MIN_PART_BYTES))
    contents = contents_of("shard", path.read_bytes())
    with path.open("rb") as file, pytest.raises(StoreError, match="within 1e-06 s") as raised:
        store.upload_file("a/shard", file.fileno(), contents, Deadline(timedelta(microseconds=1)))
    assert raised.value.transient


@pytest.mark.parametrize("url", ["", "bucket", "s3://", "s3:///", "://a/b"])
def test_what_is_no_url(opened: Any, url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as"):
        opened(url)


def test_an_unknown_scheme(opened: Any) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match="nosuchscheme"):
        opened("nosuchscheme://a/b")


def test_missing_packages_are_named(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"pip install 'tradewind\[aws\]'"):
        opened("s3://bucket/prefix")
    with pytest.raises(ImportError, match="pip install fsspec"):
        opened("gs://bucket/prefix")


def test_a_missing_driver_is_named(opened: Any) -> None:
    pytest.importorskip("fsspec")
    try:
        import adlfs  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="adlfs"):
            opened("abfs://container/prefix")
    else:
        pytest.skip("adlfs is installed")
