"""An update that is applied in parts, each once its gradients are there, with the options that the
optimizer had when it was begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tradewind._core import native

if TYPE_CHECKING:
    from tradewind.optim.fused import FusedOptimizer, Orders, Outcome


class DeferredUpdate:
    """Begun by `FusedOptimizer.defer`; the optimizer is not to be stepped before `end()`.

    Parameters are named by their index in the optimizer's table. Gradients stay until the end.
    """

    def __init__(self, optimizer: FusedOptimizer, orders: Orders, outcome: Outcome) -> None:
        self._groups = optimizer._groups()
        table = optimizer.native_table
        assert isinstance(table, native.OptimizerTable)
        optimizer._add_states(table, table.missing_state_anywhere())
        self._table = table
        self._orders = orders
        self._clip_norm = optimizer.clip_norm
        self.outcome = outcome
        self._multiplier = outcome.gradient_multiplier = orders.multiplier()

    @property
    def clips(self) -> bool:
        """Whether the norm of all gradients must be known before the first part."""
        return self._clip_norm is not None

    def measure(self) -> None:
        """Take norm and clip factor of all gradients, which must all have been measured."""
        self._table.collect()
        norm = self.outcome.take(self._table.measure())
        if self._clip_norm is not None:
            self.outcome.clip_factor = native.clip_factor(norm, float(self._clip_norm))

    def apply(self, parameter_indices: list[int]) -> None:
        factor = self._multiplier * self.outcome.clip_factor
        wants = self._orders.wants_changes
        self._table.sweep_part(parameter_indices, self._groups, factor, wants)

    def end(self) -> Outcome:
        """All parts have been applied; the outcome then is that of the whole update."""
        self.outcome.take(self._table.end_parts())
        return self.outcome

    def veto(self) -> Outcome:
        """In place of all parts: nothing is applied."""
        self._table.collect()
        self.outcome.take(self._table.measure())
        self._table.skip()
        self.outcome.applied = False
        return self.outcome
