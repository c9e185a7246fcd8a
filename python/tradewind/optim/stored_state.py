"""State dicts as they were saved, in whatever precision: read as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tradewind._core import native


def state_values(
    rule: native.Rule, name: str, entry: Mapping[str, Any], parameter: torch.Tensor
) -> torch.Tensor | None:
    """The values of state `name` in a parameter's `entry`: 8-bit ones decoded to float32."""
    value = entry.get(name)
    if not isinstance(value, torch.Tensor):
        return None
    exponents = entry.get(f"{name}_exponents")
    if value.dtype != torch.uint8:
        return value
    if exponents is None:
        raise ValueError(
            f"state {name!r}: is 8-bit, expected {name + '_exponents'!r} beside it, got "
            f"{sorted(entry)}"
        )
    # In the order of memory that the codes were saved in, which is the parameter's.
    codes = torch.empty_like(parameter, dtype=torch.uint8, device="cpu")
    if value.shape != codes.shape:
        return value
    codes.copy_(value)
    is_positive = rule.state_is_positive[rule.state_names.index(name)]
    values = native.decode_blocks(codes, exponents.cpu().contiguous(), not is_positive)
    return values.to(parameter.device)


def master_values(entry: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor | None:
    """The float32 master in a parameter's `entry`. A split one needs the parameter as it was."""
    master = entry.get("master")
    if isinstance(master, torch.Tensor):
        return master
    low = entry.get("master_low")
    if not isinstance(low, torch.Tensor) or parameter.dtype != torch.bfloat16:
        return None
    if low.shape != parameter.shape:
        return low
    high = torch.empty_like(parameter, device="cpu").copy_(parameter)
    joined = native.join_floats(high, torch.empty_like(high, dtype=torch.int16).copy_(low))
    return joined.to(parameter.device)
