"""Muon and AdamW in one optimizer: each param group says which of the two it is for."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim.optimizer import ParamsT

from tradewind._core import native
from tradewind.optim.adamw import AdamW
from tradewind.optim.fused import FusedOptimizer, Masters, Measuring, StateDtype
from tradewind.optim.muon import Muon, listed_matrices

# Of the whole optimizer, not of a group.
SHARED_OPTIONS = ("clip_norm", "measure", "masters", "state_dtype", "seed")


def _defaults(optimizer_class: type[FusedOptimizer]) -> dict[str, Any]:
    parameters = inspect.signature(optimizer_class).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.name not in ("params", *SHARED_OPTIONS)
    }


class MuonWithAdamW(FusedOptimizer):
    """Muon for some param groups and AdamW for the others: one step, one norm to clip by, one
    schedule (each group's lr times the same factor), one state dict.

    Each group is a dict with ``use_muon``, as in the implementation by Jordan
    (https://github.com/KellerJordan/Muon): with True it takes matrices and the options of
    :class:`tradewind.optim.Muon`, with False any parameters and those of
    :class:`tradewind.optim.AdamW`; what it does not set is the default there. `tw.Muon` makes these
    groups from a model's parameters.

    Args:
        params: dicts of param groups.
        clip_norm, measure, masters, state_dtype, seed: see :class:`tradewind.optim.AdamW`; for all
            groups.

    Raises:
        ValueError: a group without ``use_muon``, with an option of the other or one out of range,
            or (use_muon=True) a parameter that is no matrix; a parameter given twice.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        clip_norm: float | None = None,
        measure: Measuring = "step",
        masters: Masters | None = None,
        state_dtype: StateDtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            {},
            clip_norm=clip_norm,
            measure=measure,
            masters=masters,
            state_dtype=state_dtype,
            seed=seed,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group with its ``use_muon``. Raises ValueError as the constructor does."""
        use_muon = param_group.get("use_muon")
        if not isinstance(use_muon, bool):
            raise ValueError(
                f"param group: expected use_muon True (matrices) or False (AdamW), got {use_muon!r}"
            )
        options = _OPTIONS[use_muon]
        known = {*options, "params", "param_names", "use_muon", *SHARED_OPTIONS}
        unknown = [key for key in param_group if key not in known]
        if unknown:
            raise ValueError(
                f"param group: unknown {', '.join(unknown)}; with use_muon={use_muon} expected "
                f"some of {', '.join(options)}"
            )
        group = {**options, **param_group}
        if use_muon:
            group["params"] = listed_matrices(group["params"])
        super().add_param_group(group)

    @staticmethod
    def _rule_name(group: dict[str, Any]) -> str:
        return _CLASSES[group["use_muon"]]._rule_name(group)

    @staticmethod
    def _option_values(group: dict[str, Any]) -> list[float]:
        return _CLASSES[group["use_muon"]]._option_values(group)

    @staticmethod
    def _matrix_options(group: dict[str, Any]) -> native.MatrixOptions | None:
        return _CLASSES[group["use_muon"]]._matrix_options(group)

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        # There are no defaults for all groups to check.
        if group:
            _CLASSES[group["use_muon"]]._check_group(group)


_CLASSES: dict[bool, type[FusedOptimizer]] = {True: Muon, False: AdamW}
_OPTIONS = {True: _defaults(Muon), False: {**_defaults(AdamW), "decoupled_weight_decay": True}}
