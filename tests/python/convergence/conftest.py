from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("convergence.training")  # so that its failures show the numbers


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in the same order on every machine, and no threads to start for layers this small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
