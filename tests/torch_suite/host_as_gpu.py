"""The CPU in the place of GPUs, for tests of torch that ask for one per rank and test no kernel.

What goes to a GPU stays where it is: `.cuda()`, `.to(rank)` and `device="cuda:0"` mean the CPU.
Streams, events and synchronization do nothing, as the CPU has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class HostAsGpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = host_for(kwargs["device"])
        if function is torch.Tensor.to:
            args = (args[0], *(_host_for_any(argument) for argument in args[1:]))
        return function(*args, **kwargs)


def host_for(device: Any) -> Any:
    """The CPU where `device` names a GPU, as a number too; else `device`."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return "cpu"
    return "cpu" if str(device).startswith("cuda") else device


def _host_for_any(argument: Any) -> Any:
    return host_for(argument) if isinstance(argument, (int, str, torch.device)) else argument


def install(num_devices: int) -> None:
    """In this process, for good."""
    HostAsGpu().__enter__()
    common = import_module("torch.testing._internal.common_distributed")
    common.TEST_CUDA = True
    module_to = torch.nn.Module.to
    replaced: dict[tuple[Any, str], Any] = {
        (torch.nn.Module, "cuda"): lambda self, device=None: self,
        (torch.nn.Module, "to"): lambda self, *args, **kwargs: module_to(
            self,
            *(_host_for_any(argument) for argument in args),
            **{name: _host_for_any(value) for name, value in kwargs.items()},
        ),
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "device_count"): lambda: num_devices,
        (torch.cuda, "set_device"): lambda device: None,
        (torch.accelerator, "set_device_index"): lambda device: None,
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "synchronize"): lambda device=None: None,
        (torch.cuda, "manual_seed"): lambda seed: None,
        (torch.cuda, "manual_seed_all"): lambda seed: None,
        (torch.cuda, "device"): lambda device: contextlib.nullcontext(),
    }
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
