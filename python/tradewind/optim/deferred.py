"""An update that is applied in parts, each once its gradients are there, with the options that the
optimizer had when it was begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tradewind._core import native

if TYPE_CHECKING:
    from tradewind.optim.fused import FusedOptimizer, Orders, Outcome


class DeferredUpdate:
    """Begun by `FusedOptimizer.defer`; the optimizer is not to be stepped before `end()`.

    Parameters are indices into `parameters`. Gradients stay until the end.
    """

    def __init__(self, optimizer: FusedOptimizer, orders: Orders, outcome: Outcome) -> None:
        self._groups = optimizer._groups()
        table = optimizer.native_table
        assert isinstance(table, native.OptimizerTable)
        optimizer._add_states(table, table.missing_state_anywhere())
        self._table = table
        self._orders = orders
        self._clip_norm = optimizer.clip_norm
        self.parameters: list[torch.Tensor] = optimizer._table_parameters
        self.outcome = outcome
        multiplier = orders.gradient_multiplier
        if orders.grad_scale is not None:
            multiplier /= float(orders.grad_scale)
        self._multiplier = outcome.gradient_multiplier = multiplier

    @property
    def clips(self) -> bool:
        """Whether the norm of all gradients must be known before the first part."""
        return self._clip_norm is not None

    def measure(self) -> None:
        """Take norm and clip factor of all gradients, which must all have been measured."""
        self._table.collect()
        self._take(self._table.measure())
        if self._clip_norm is not None:
            assert isinstance(self.outcome.norm, float)
            self.outcome.clip_factor = native.clip_factor(self.outcome.norm, float(self._clip_norm))

    def apply(self, parameter_indices: list[int]) -> None:
        factor = self._multiplier * self.outcome.clip_factor
        wants = self._orders.wants_changes
        self._table.sweep_part(parameter_indices, self._groups, factor, wants)

    def end(self) -> Outcome:
        """All parts have been applied; the outcome then is that of the whole update."""
        self._take(self._table.end_parts())
        return self.outcome

    def veto(self) -> Outcome:
        """In place of all parts: nothing is applied."""
        self._table.collect()
        self._take(self._table.measure())
        self._table.skip()
        self.outcome.applied = False
        return self.outcome

    def _take(self, measured: native.MeasureResult) -> None:
        outcome = self.outcome
        outcome.norm = measured.norm * abs(self._multiplier)
        outcome.num_nonfinite = measured.num_nonfinite
        outcome.first_nonfinite_name = measured.first_nonfinite_name
        outcome.num_hot = measured.num_hot
