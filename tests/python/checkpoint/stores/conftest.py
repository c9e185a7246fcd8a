"""A local S3 (moto), started once; stores on it and on fsspec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.faulty_server import FaultyServer
from checkpoint.stores.places import MIN_PART_BYTES, NUMBERS, QUICK, make_bucket

from tradewind.checkpoint.stores.store import Store, open_store


@pytest.fixture(scope="session")
def s3_server() -> Iterator[FaultyServer]:
    """Skips where moto is not installed."""
    pytest.importorskip("boto3", reason="pip install boto3")
    pytest.importorskip("moto.server", reason="pip install 'moto[s3,server]'")
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from moto.s3 import models
    from werkzeug.serving import make_server

    models.S3_UPLOAD_PART_MIN_SIZE = MIN_PART_BYTES  # type: ignore[attr-defined]

    class Quiet(MotoRequestHandler):  # type: ignore[misc]
        def log(self, *arguments: object) -> None: ...

        def log_request(self, *arguments: object) -> None: ...

    faulty = FaultyServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Quiet)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    faulty.url = f"http://127.0.0.1:{server.server_port}"
    yield faulty
    faulty.reset()
    server.shutdown()
    thread.join(60)
    server.server_close()


@pytest.fixture
def s3(s3_server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """The server without faults, and this process's credentials for it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    s3_server.reset()
    yield s3_server
    s3_server.reset()


@pytest.fixture
def s3_url(s3: FaultyServer) -> str:
    """A prefix in an empty bucket of its own."""
    url = f"s3://{make_bucket()}/runs/a"
    s3.reset()
    return url


Opener = Callable[..., Store]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens stores with little patience, and closes them."""
    made: list[Store] = []

    def make(url: str, **options: Any) -> Store:
        options = {"patience": QUICK, "part_bytes": MIN_PART_BYTES, **options}
        made.append(open_store(url, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture(params=["s3", "memory", "file"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place in each kind of store."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    pytest.importorskip("fsspec", reason="pip install fsspec")
    if request.param == "memory":
        return f"memory://place-{next(NUMBERS)}/runs/a"
    return f"file://{tmp_path}/place/runs/a"
