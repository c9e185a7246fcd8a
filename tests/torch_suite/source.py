"""PyTorch's own tests, of the very version that is installed; they are not ours to ship."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

VARIABLE = "TRADEWIND_TORCH_TEST_OPTIM"
DISTRIBUTED_VARIABLE = "TRADEWIND_TORCH_TEST_DISTRIBUTED"
CACHE = Path(__file__).parents[2] / "build" / "torch_suite"
URL = "https://raw.githubusercontent.com/pytorch/pytorch/v{version}/test/{path}"
TIMEOUT_S = 10
# By path: what stands in the file, in no error page.
OPTIM = "test_optim.py", b"class TestOptimRenewed"
DISTRIBUTED = (
    ("distributed/test_c10d_common.py", b"class CommonDistributedDataParallelTest"),
    ("distributed/test_c10d_gloo.py", b"class DistributedDataParallelTest"),
)


class NotAvailable(Exception):
    """The suite cannot run here, for the reason given."""


def find(torch_version: str) -> Path:
    """Path of test_optim.py: as the variable says, cached, or downloaded.

    Raises NotAvailable, or FileNotFoundError where the variable names no file.
    """
    if given := os.environ.get(VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{VARIABLE}: expected a file, got {given!r}")
        return Path(given)
    return _cached(torch_version, *OPTIM, variable=VARIABLE)


def find_distributed(torch_version: str) -> Path:
    """The folder of test_c10d_gloo.py and test_c10d_common.py, as `find` has it."""
    if given := os.environ.get(DISTRIBUTED_VARIABLE):
        if not (Path(given) / "test_c10d_gloo.py").is_file():
            raise FileNotFoundError(
                f"{DISTRIBUTED_VARIABLE}: expected a folder with test_c10d_gloo.py, got {given!r}"
            )
        return Path(given)
    files = [_cached(torch_version, *f, variable=DISTRIBUTED_VARIABLE) for f in DISTRIBUTED]
    return files[0].parent


def _cached(torch_version: str, path: str, mark: bytes, *, variable: str) -> Path:
    version = torch_version.split("+")[0]
    cached = CACHE / version / path
    if not cached.is_file():
        text = _download(URL.format(version=version, path=path), mark, variable)
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Complete or not there: a run that is interrupted leaves no half of it behind.
        partial = cached.with_suffix(f".{os.getpid()}")
        partial.write_bytes(text)
        partial.replace(cached)
    return cached


def _download(url: str, mark: bytes, variable: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            text: bytes = reply.read()
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise NotAvailable(f"no {url} ({error}); set {variable} to a copy") from error
    if mark not in text:
        raise NotAvailable(f"{url} is not PyTorch's suite; set {variable} to a copy")
    return text
