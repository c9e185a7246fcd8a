"""What a tensor's elements are called in a file, and those that are stored as others."""

from __future__ import annotations

import torch
from torch import Tensor

# Names as the safetensors library has them.
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

# Stored as a view of another dtype, since the format has no name for them: complex numbers get a
# last dimension of two, (real, imaginary). The tree says what they were.
_STORED_AS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
}
VIEWED = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}


def is_storable(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` can be in a checkpoint."""
    return dtype in NAME_OF or dtype in _STORED_AS


def stored_view(tensor: Tensor) -> tuple[Tensor, str | None]:
    """`tensor` as it is stored, sharing its memory where torch can, and the name of its dtype where
    it is stored as another one."""
    if tensor.dtype in NAME_OF:
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor, None
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj().resolve_neg()), name
    return tensor.view(_STORED_AS[tensor.dtype]), name


def original_view(stored: Tensor, name: str) -> Tensor:
    """What `stored_view` stored, from its view and the name of its dtype, sharing its memory.

    Raises ValueError where `stored` cannot be such a view.
    """
    dtype = VIEWED.get(name)
    if dtype is None:
        raise ValueError(f"expected one of {', '.join(VIEWED)}, got {name!r}")
    if stored.dtype != _STORED_AS[dtype]:
        raise ValueError(f"expected {_STORED_AS[dtype]} for {name}, got {stored.dtype}")
    if not dtype.is_complex:
        return stored.view(dtype)
    if stored.dim() == 0 or stored.shape[-1] != 2:
        raise ValueError(f"expected a last dimension of 2 for {name}, got {list(stored.shape)}")
    return torch.view_as_complex(stored.contiguous())
