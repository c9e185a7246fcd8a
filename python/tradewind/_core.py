"""The one door to the native module: checks torch before it loads, so that a mismatch is an error
that says what to do instead of an undefined symbol."""

from __future__ import annotations

import sysconfig

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "tradewind: free-threaded Python is not supported; use a build of Python with the GIL."
    )

import torch

try:
    from tradewind._build_info import TORCH_VERSION
except ImportError as error:
    raise ImportError(
        "tradewind: the native module was not built. In the checkout, run: "
        "pip install --no-build-isolation ."
    ) from error


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_torch(installed: str, built: str) -> None:
    """Raise ImportError where torch `installed` is of another minor version than `built`."""
    if _minor(installed) != _minor(built):
        raise ImportError(
            f"tradewind was built against torch {built}, but torch {installed} is installed; "
            "C++ interfaces differ between torch minors. Rebuild with: "
            "pip install --no-build-isolation --force-reinstall --no-deps . "
            f"(or install the other torch: pip install torch=={built.split('+')[0]})"
        )


check_torch(torch.__version__, TORCH_VERSION)

from tradewind import _native as native  # noqa: E402  (torch must be loaded and checked first)

__all__ = ["check_torch", "native"]
