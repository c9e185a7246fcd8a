"""Optimizer state in shards: each rank holds and updates its fragments of every parameter, and the
exchange spreads what they became."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tradewind._core import native
from tradewind.engine.late_update import PendingUpdate
from tradewind.optim.fused import FusedOptimizer, Orders, Outcome
from tradewind.share.rendezvous import Meeting

# Rules of one element alone: the others read a whole parameter, which no rank has the state of.
_ELEMENTWISE = ("AdamW", "Adam", "SGD", "Lion", "Adagrad", "RMSprop")


def check_shardable(optimizer: FusedOptimizer) -> None:
    """Raise ValueError for a rule that needs whole parameters."""
    if type(optimizer).__name__ not in _ELEMENTWISE:
        raise ValueError(
            f"strategy='sharded': {type(optimizer).__name__} reads whole parameters (their norms, "
            f"or matrices), of which a rank updates a part; use one of {', '.join(_ELEMENTWISE)}, "
            "or strategy='allreduce'"
        )


class ShardedOptimizer:
    """The optimizer of this rank's fragments, with the options of `optimizer`'s groups.

    `optimizer` keeps groups, schedules and the norm of all gradients, but no state.
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        parameters: Sequence[torch.Tensor],
        shared: native.SharedGradients,
        meeting: Meeting,
    ) -> None:
        self._outer = optimizer
        self._shared = shared
        self._meeting = meeting
        self._parameters = list(parameters)
        group_of = {
            id(p): index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._spans = [s for s in shared.fragments() if id(self._parameters[s[0]]) in group_of]
        if len(self._spans) != len(shared.fragments()):
            raise ValueError(
                "strategy='sharded': expected every parameter that requires a gradient in the "
                "optimizer; freeze those that it should leave alone"
            )
        fragments = [_part(self._parameters[i], begin, end) for i, begin, end in self._spans]
        groups: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for fragment, (index, _, _) in zip(fragments, self._spans, strict=True):
            groups[group_of[id(self._parameters[index])]].append(fragment)
        self.inner = _over(optimizer, groups)
        self._fragments = fragments
        table = self.inner.native_table
        assert isinstance(table, native.OptimizerTable)
        table_idx = {id(p): i for i, p in enumerate(self.inner._table_parameters)}
        self._table_idx = [table_idx[id(fragment)] for fragment in fragments]
        self._table: Any = None
        # What all ranks' fragments have as state, for whoever saves: see engine/saved_state.py.
        self.known_kinds: tuple[str, dict[str, dict[str, torch.dtype]]] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether an update was begun since the state was made or loaded: all of it is there."""
        return self._table is not None

    def states(self) -> Iterator[tuple[torch.Tensor, int, dict[str, Any]]]:
        """(parameter, first element, state) of this rank's fragments that have one."""
        for fragment, (index, begin, _) in zip(self._fragments, self._spans, strict=True):
            entry = self.inner.state.get(fragment)
            if entry:
                yield self._parameters[index], begin, entry

    def prepare_states(self, parameters: set[torch.Tensor]) -> None:
        """As `FusedOptimizer.prepare_states`, of this rank's fragments of these parameters."""
        pairs = zip(self._fragments, self._spans, strict=True)
        self.inner.prepare_states(f for f, (i, _, _) in pairs if self._parameters[i] in parameters)

    def start_masters(self, values: dict[torch.Tensor, torch.Tensor]) -> None:
        """As `FusedOptimizer.start_masters`, of this rank's fragments."""
        found = {}
        for fragment, (index, begin, end) in zip(self._fragments, self._spans, strict=True):
            if self._parameters[index] in values:
                found[fragment] = _part(values[self._parameters[index]], begin, end)
        self.inner.start_masters(found)

    def begin(self) -> list[Any]:
        """Today's options; from now on the exchange may step the table."""
        for outer, inner in zip(self._outer.param_groups, self.inner.param_groups, strict=True):
            inner.update({k: v for k, v in outer.items() if k not in ("params", "param_names")})
        groups = self.inner._groups()
        table = self.inner.native_table
        assert isinstance(table, native.OptimizerTable)
        self.inner._add_states(table, table.missing_state_anywhere())
        if table is not self._table:
            means: list[torch.Tensor | None] = [None] * len(self._fragments)
            for at, (index, begin, end) in zip(self._table_idx, self._spans, strict=True):
                means[at] = _part(self._shared.mean(index), begin, end)
            table.take_gradients(means)
            self._shared.set_shards(table, self._table_idx)
            self._table = table
        return groups

    # --- the state of all ranks -------------------------------------------------------------------

    def gather_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Whole states by parameter, as an unsharded optimizer has them. Every rank calls this."""
        whole: dict[torch.Tensor, dict[str, Any]] = {}
        mine = []
        for fragment, span in zip(self._fragments, self._spans, strict=True):
            entry = self.inner.state.get(fragment, {})
            mine.append((span, {k: _plain(v) for k, v in entry.items()}))
        everyone: list[Any] = [None] * self._meeting.size
        dist.all_gather_object(everyone, mine, group=self._meeting.group)
        for (index, begin, end), entry in (item for rank in everyone for item in rank):
            parameter = self._parameters[index]
            state = whole.setdefault(parameter, {})
            for name, value in entry.items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    state[name] = value
                    continue
                per_element = value.numel() / max(end - begin, 1)
                if per_element != 1:
                    raise NotImplementedError(
                        "state_dict with strategy='sharded' and state_dtype='8bit' is not built; "
                        "use state_dtype='bf16'"
                    )
                if name not in state:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype)
                _part(state[name], begin, end).copy_(value)
        return whole

    def load_state(self, whole: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Take this rank's fragments of whole states."""
        for fragment, (index, begin, end) in zip(self._fragments, self._spans, strict=True):
            entry = whole.get(self._parameters[index])
            if not entry:
                continue
            parameter = self._parameters[index]
            self.inner.state[fragment] = {
                name: _part(_laid_out_like(value, parameter), begin, end).clone()
                if name != "step" and value.shape == parameter.shape
                else (value.clone() if isinstance(value, torch.Tensor) else value)
                for name, value in entry.items()
            }
        self.inner._table = None


class ShardedUpdate(PendingUpdate):
    """Every shard is updated by its owner, which spreads what it made of the parameters."""

    def __init__(
        self,
        shared: native.SharedGradients,
        sharded: ShardedOptimizer,
        optimizer: FusedOptimizer,
        orders: Orders,
        give_measures: Callable[[], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._result = Outcome()
        super().__init__(shared, self._result, give_measures, on_end)
        self._optimizer = optimizer
        self._groups = sharded.begin()
        self._clip_norm = optimizer.clip_norm
        self._multiplier = self._result.gradient_multiplier = orders.multiplier()

    def _decide(self) -> None:
        if found := self._shared.nonfinite():
            self._result.applied = False
            self._result.nonfinite = tuple(found)
        elif self._clip_norm is not None:
            norm = self._wait_for_norm(self._measure)
            self._result.clip_factor = native.clip_factor(norm, float(self._clip_norm))
        factor = self._multiplier * self._result.clip_factor
        self._shared.release(self._groups, factor, is_vetoed=not self._result.applied)

    def _measure(self) -> float:
        """Every rank knows every shard's measure: the norm is the same on all, to the bit."""
        self._give_measures()
        table = self._optimizer.native_table
        assert isinstance(table, native.OptimizerTable)
        table.collect()
        measured = table.measure()
        table.skip()
        return self._result.take(measured)

    def _is_open(self, bucket: int) -> bool:
        return True

    def _apply(self, bucket: int) -> None:
        self._shared.settle_bucket(bucket)

    def _apply_rest(self) -> None:
        self._shared.settle()
        if self._result.norm is None:
            self._measure()
        self._end(self._result)

    @property
    def is_torn(self) -> bool:
        return self._is_decided and self._result.applied and not self.is_over

    @property
    def progress(self) -> str:
        return "shards were being updated and spread"


def _part(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) as they lie in memory; the tensor is dense. With a version counter of
    its own: autograd must not take another thread's sweep for a change of what it saved, as whoever
    waits for a bucket counts it once."""
    flat = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    return flat.as_strided((end - begin,), (1,), flat.storage_offset() + begin)


def _laid_out_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _over(optimizer: FusedOptimizer, groups: list[list[torch.Tensor]]) -> FusedOptimizer:
    """An optimizer like this one over other parameters, without state."""
    made = type(optimizer).__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.state = defaultdict(dict)
    made._table = None
    made._on_gradient = None
    made._outcome = None
    made.param_groups = []
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        own = {key: value for key, value in group.items() if key != "param_names"}
        made.param_groups.append({**own, "params": [p.requires_grad_() for p in parameters]})
    return made
