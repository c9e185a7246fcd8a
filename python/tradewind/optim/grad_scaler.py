"""`torch.amp.GradScaler` whose check for overflow is the optimizer's own measure."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from tradewind.optim.fused import FusedOptimizer, Orders


class GradScaler(torch.amp.GradScaler):
    """Loss scaling as `torch.amp.GradScaler` has it (same arguments, defaults, state dict), without
    its pass over the gradients where the optimizer is one of `tw.optim`.

    torch's scaler reads and writes every gradient once to find infinities, then steps; here the
    optimizer finds them while it takes the norm, and unscales and clips in its sweep. `.grad` stays
    scaled. float16 gradients are taken, with `clip_norm` too. Any other optimizer is treated as
    torch treats it, and `unscale_()` works before `step()` as always.

    ::

        scaler = tw.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, unless a gradient is infinite or NaN. Parameters and state are then unchanged.

        Raises RuntimeError as torch's scaler does: for a closure, and for a second call without
        `update()` in between.
        """
        if not self.is_enabled() or not isinstance(optimizer, FusedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError(
                "GradScaler.step: expected no closure, as its gradients could not be checked; run "
                "forward and backward before it"
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:  # unscaled and checked by hand, or stepped already
            return super().step(optimizer, **kwargs)
        scale, _ = self._check_scale_growth_tracker("step")
        optimizer.order(Orders(grad_scale=scale, measure=True, veto_nonfinite=True))
        optimizer.step()
        outcome = optimizer.outcome
        assert outcome is not None
        state["found_inf_per_device"] = {scale.device: outcome.found_inf(scale.device)}
        state["stage"] = OptState.STEPPED
        return None
