"""What the elements of tensors are called in a file: the names of the safetensors library."""

from __future__ import annotations

import torch

NAME_OF = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` in a file. Raises TypeError for one that has none there."""
    name = NAME_OF.get(dtype)
    if name is None:
        raise TypeError(
            f"checkpoint: dtype: expected one that safetensors has a name for, got {dtype}; "
            f"{instead(dtype)}"
        )
    return name


def instead(dtype: torch.dtype) -> str:
    """What to do with a tensor of a `dtype` that has no name."""
    return "give torch.view_as_real(...)" if dtype.is_complex else "give a view as torch.uint8"
