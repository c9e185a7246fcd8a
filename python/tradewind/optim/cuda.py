"""The step on CUDA: the library is found and probed; the step itself raises NotImplementedError."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tradewind._core import native

if TYPE_CHECKING:
    from tradewind.optim.fused import FusedOptimizer, Orders, Outcome

LIBRARY_PATH = Path(__file__).parent.parent / "libtradewind_cuda.so"


@lru_cache(maxsize=1)
def library() -> native.CudaLibrary:
    """The CUDA library of this package. Raises RuntimeError with the command that builds it."""
    import tradewind

    # In an editable install the library lies beside the native module, not beside this file.
    candidates = [LIBRARY_PATH, Path(str(native.__file__)).parent / LIBRARY_PATH.name]
    path = next((path for path in candidates if path.exists()), LIBRARY_PATH)
    loaded = native.CudaLibrary(str(path))
    code, text, num_devices, _ = loaded.probe()
    if code or not num_devices:
        raise RuntimeError(
            f"tradewind {tradewind.__version__}: CUDA tensors are here, but the CUDA library finds "
            f"no GPU ({text}); check the driver with nvidia-smi"
        )
    return loaded


def collect(optimizer: FusedOptimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """(group, parameter) of each CUDA parameter that has a gradient."""
    if not optimizer.has_cuda_parameters:
        return []
    return [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.is_cuda and parameter.grad is not None
    ]


def step(
    optimizer: FusedOptimizer,
    collected: list[tuple[dict[str, Any], torch.Tensor]],
    orders: Orders,
) -> Outcome:
    """Not built: raises NotImplementedError before anything is touched."""
    raise NotImplementedError(
        f"{type(optimizer).__name__} on CUDA is being rebuilt and not in this version; use "
        f"torch.optim's optimizer on {collected[0][1].device}, or move the model to the CPU"
    )
