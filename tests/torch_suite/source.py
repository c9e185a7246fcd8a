"""PyTorch's test/test_optim.py of the very version that is installed; it is not ours to ship."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

VARIABLE = "TRADEWIND_TORCH_TEST_OPTIM"
CACHE = Path(__file__).parents[2] / "build" / "torch_suite"
URL = "https://raw.githubusercontent.com/pytorch/pytorch/v{version}/test/test_optim.py"
TIMEOUT_S = 10


class NotAvailable(Exception):
    """The suite cannot run here, for the reason given."""


def find(torch_version: str) -> Path:
    """Path of the file: as the variable says, cached, or downloaded.

    Raises NotAvailable, or FileNotFoundError where the variable names no file.
    """
    if given := os.environ.get(VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{VARIABLE}: expected a file, got {given!r}")
        return Path(given)
    version = torch_version.split("+")[0]
    cached = CACHE / version / "test_optim.py"
    if not cached.is_file():
        text = _download(URL.format(version=version))
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Complete or not there: a run that is interrupted leaves no half of it behind.
        partial = cached.with_suffix(f".{os.getpid()}")
        partial.write_bytes(text)
        partial.replace(cached)
    return cached


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            text: bytes = reply.read()
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise NotAvailable(f"no {url} ({error}); set {VARIABLE} to a copy of that file") from error
    if b"class TestOptimRenewed" not in text:
        raise NotAvailable(f"{url} is not PyTorch's suite; set {VARIABLE} to a copy of that file")
    return text
