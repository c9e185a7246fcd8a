"""A pytest plugin: the optimizers' tests over the emulated device in place of the CPU's sweep.

    PYTHONPATH=tests/python python -m pytest -p emulated_device tests/python/optim

Fails where a device differs on purpose: the host does not look at an `lr` tensor (so NaN passes),
capturable=True is taken, gradients are not measured in backward, parameters without memory are
refused once they have a gradient; and the emulated kernels obey flush-to-zero, as a GPU's do not.
"""

from __future__ import annotations

import cuda_emulation

from tradewind.optim import cuda
from tradewind.optim.fused import FusedOptimizer

_emulation = cuda_emulation.build()
cuda.library = lambda: _emulation.library  # type: ignore[assignment]
FusedOptimizer._device_type = "cpu"
