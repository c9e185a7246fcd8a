"""Local steps with an outer optimizer: ranks step on their own and every H updates take a step of
SGD with Nesterov momentum along the mean of how far they came (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tradewind.engine.sharing import Sharing
from tradewind.optim.fused import FusedOptimizer, Orders, Outcome
from tradewind.share.departure import reason
from tradewind.share.rounds import make_rounds


class PeriodicSharing(Sharing):
    """As `Sharing`, for strategy="periodic". Optimizer state stays each rank's own."""

    def attach(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        optimizer: FusedOptimizer,
        *,
        sums: bool,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise NotImplementedError(
                    f"parameter {name!r}: strategy='periodic' averages float32 parameters, got "
                    f"{parameter.dtype}; use precision='fp32' or 'amp-bf16'"
                )
        self._optimizer = optimizer
        # Where the last outer step ended. Its gradient is how far this rank came since.
        self._outer = [torch.nn.Parameter(p.detach().clone()) for p in self._parameters]
        shared_names = [n for n, p in zip(names, parameters, strict=True) if p.requires_grad]
        self.shared = make_rounds(
            self._meeting,
            list(zip(shared_names, self._outer, strict=True)),
            self._share,
            buffers=[buffer.detach() for buffer in self._model.buffers()],
        )
        self._outer_optimizer = torch.optim.SGD(
            self._outer,
            lr=self._share.outer_lr,
            momentum=self._share.outer_momentum,
            nesterov=self._share.outer_momentum > 0,
        )
        self._num_local = 0
        self._num_rounds = 0
        optimizer.hook_gradients("sum" if sums else "measure")

    @property
    def shares_gradients(self) -> bool:
        return False

    def before_backward(self, *, syncs: bool) -> None:
        self.shared.tell("backward")

    def after_backward(self, *, syncs: bool, has_next: bool) -> None: ...

    def backward_failed(self, error: BaseException) -> None:
        self.shared.fail(reason(self.rank, error, "backward"))

    def update(self, orders: Orders, on_end: Any) -> Outcome | None:
        return None

    def name_nonfinite(self, outcome: Outcome) -> None:
        """Nothing: between averages a rank's gradients are its own, and the outcome names them."""

    def updated(self, *, has_next: bool) -> None:
        """Every `outer_every`-th update of this rank, and its last one, end in an outer step."""
        self._num_local += 1
        self.is_boundary = False
        if self._num_local >= self._share.outer_every or not has_next:
            self._outer_step(is_present=True, has_next=has_next)
            # Ranks whose data ends take no more local updates: they would not save with the rest.
            self.is_boundary = int(self.shared.num_contributors_next()) == self.size

    @torch.no_grad()
    def _outer_step(self, *, is_present: bool, has_next: bool) -> None:
        shared = self.shared
        if is_present:
            for outer, parameter in zip(self._outer, self._parameters, strict=True):
                outer.grad = outer.detach() - parameter.detach()
            shared.set_syncing(True)
            shared.use_all()
            shared.finish_backward(has_next)
        else:
            shared.shadow_round(has_next)
        shared.settle()
        self.wishes = shared.wishes()
        self._num_rounds += 1
        self._num_local = 0
        if not shared.nonfinite():  # else a rank went astray: all go back to the last step
            self._outer_optimizer.step()
        self._outer_optimizer.zero_grad()
        self.before_writing()
        for outer, parameter in zip(self._outer, self._parameters, strict=True):
            parameter.copy_(outer)

    def settle(self) -> None: ...

    def others_go_on(self) -> bool:
        return self._num_rounds > 0 and int(self.shared.num_contributors_next()) > 0

    def shadow_round(self) -> None:
        self._outer_step(is_present=False, has_next=False)

    # --- for checkpoints --------------------------------------------------------------------------

    decides_at_once = True

    def any_rank(self, value: bool) -> bool:
        return "True" in self.tell_all("any rank", str(value))

    def consensus(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> where the last outer step ended, which ranks have in common; empty while
        the parameters themselves are there."""
        if not self._num_local:
            return {}
        return dict(zip(self._parameters, self._outer, strict=True))

    def outer_state(self) -> dict[str, Any]:
        """Of the outer optimizer, alike on all ranks."""
        return self._outer_optimizer.state_dict()

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "num_local": self._num_local}

    @torch.no_grad()
    def resume(self, outer: dict[str, Any] | None, num_local: int) -> None:
        """Go on from the model's parameters, which are where an outer step ended: before those of
        this rank are loaded, where it has made `num_local` updates since."""
        for to, value in zip(self._outer, self._parameters, strict=True):
            to.copy_(value)
        if outer is not None:
            self._outer_optimizer.load_state_dict(outer)
        self._num_local = num_local

    def state_dict(self) -> dict[str, Any]:
        """Also `outer`: the outer parameters and momentum, alike on all ranks."""
        outer = {
            "parameters": [outer.detach().clone() for outer in self._outer],
            "optimizer": self._outer_optimizer.state_dict(),
            "num_local": self._num_local,
        }
        return {**super().state_dict(), "outer": outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # Of a run that shared otherwise: an outer step has just ended.
        outer = state.get("outer", {"parameters": self._parameters, "num_local": 0})
        with torch.no_grad():
            for to, value in zip(self._outer, outer["parameters"], strict=True):
                to.copy_(value)
        if "optimizer" in outer:
            self._outer_optimizer.load_state_dict(outer["optimizer"])
        self._num_local = int(outer["num_local"])

    def close(self) -> None:
        self.shared.remove_hooks()
