"""Tests of this folder need a GPU that answers and a build with CUDA; else they are skipped."""

from __future__ import annotations

import pytest
import torch

from tradewind import _build_info


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not _build_info.CUDA:
        pytest.skip("built without CUDA: nvcc was not found")
    if not torch.cuda.is_available():
        pytest.skip("no GPU answers here")
