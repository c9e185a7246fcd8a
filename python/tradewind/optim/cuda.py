"""The step on CUDA: torch computes the norm on the device, one native sweep per 48 tensors applies
AdamW. No host sync: the clip factor stays on the device. Other rules raise NotImplementedError."""

from __future__ import annotations

from collections import defaultdict
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
    """One update of `collected`, asynchronous on the current stream."""
    from tradewind.optim.fused import Outcome

    _check(optimizer, collected)
    outcome = Outcome()
    factor = None
    if optimizer.clip_norm is not None or orders.measure:
        gradients = [p.grad for _, p in collected if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) * orders.gradient_multiplier
        outcome.norm = norm
        if optimizer.clip_norm is not None:
            factor = torch.clamp(optimizer.clip_norm / (norm + 1e-6), max=1.0).float()
    batches: dict[tuple[int, int], list[tuple[dict[str, Any], torch.Tensor]]] = defaultdict(list)
    group_of = {id(group): index for index, group in enumerate(optimizer.param_groups)}
    for group, parameter in collected:
        entry = _state(optimizer, group, parameter)
        batches[group_of[id(group)], int(entry["step"])].append((entry, parameter))
    stream = torch.cuda.current_stream().cuda_stream
    for (group_index, count), members in batches.items():
        group = optimizer.param_groups[group_index]
        names = native.rule(optimizer._rule_name(group)).state_names
        library().adamw(
            [parameter for _, parameter in members],
            [parameter.grad.contiguous() for _, parameter in members],  # type: ignore[union-attr]
            [[entry[name] for name in names] for entry, _ in members],
            bool(group["amsgrad"]),
            optimizer._option_values(group),
            count + 1,
            orders.gradient_multiplier * (-1.0 if group["maximize"] else 1.0),
            factor,
            stream,
        )
        for entry, _ in members:
            entry["step"] += 1
    return outcome


def _check(optimizer: FusedOptimizer, collected: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
    for group, parameter in collected:
        if not optimizer._rule_name(group).startswith("adamw"):
            raise NotImplementedError(
                f"{type(optimizer).__name__} on CUDA is not built yet; use tw.optim.AdamW, or "
                f"torch.optim.{type(optimizer).__name__}"
            )
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise NotImplementedError(
                f"AdamW on CUDA takes contiguous float32 parameters so far, got {parameter.dtype} "
                f"with strides {tuple(parameter.stride())}"
            )


def _state(
    optimizer: FusedOptimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    entry: dict[str, Any] = optimizer.state[parameter]
    entry.setdefault("step", torch.zeros((), dtype=torch.float32))
    for name in native.rule(optimizer._rule_name(group)).state_names:
        if name not in entry:
            entry[name] = torch.zeros_like(parameter)
    return entry
