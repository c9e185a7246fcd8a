"""Fixtures for every test. Modules of cases (`optimizer_cases`) lie beside this file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Restores torch's number of threads and its treatment of subnormals afterwards."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(False)
