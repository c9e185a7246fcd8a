"""`Engine(graph=True)`: forward and backward of a microbatch are two halves of one CUDA graph pair,
measure and sweep are another graph. Between them stay what the host decides: how microbatches are
grouped, the loss, vetoes that are not the device's, checkpoints.

Replays read and write fixed memory, so a graph fits inputs of one shape, and one set of options.
Whatever else comes is run without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tradewind.optim.fused import FusedOptimizer, Orders, Outcome

# As torch.cuda.make_graphed_callables: libraries choose and allocate in the first runs.
_WARMUPS = 3
# 16-bit gradients of several microbatches, by the optimizer's table.
_SUMMED_ELSEWHERE = (torch.float16, torch.bfloat16)


class Graphs(Protocol):
    """What this needs of CUDA graphs."""

    def warm_up(self, run: Callable[[], None]) -> None: ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run` into a graph; the result replays it."""
        ...


class CudaGraphs:
    """Graphs of one memory pool, replayed in the order in which they were captured."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


class GraphedForward:
    """Calls `forward` by a graph where the inputs are like those of the first call.

    A replay's gradients are `.grad` themselves, at the same address every time. With `sums` those
    of several microbatches meet there, in buffers of this object; 16-bit ones are not summed here,
    but taken out of `.grad` after each microbatch (`OptimizerTable.sum_gradients`).
    """

    def __init__(
        self, graphs: Graphs, forward: Callable[..., Any], model: torch.nn.Module, *, sums: bool
    ) -> None:
        self._graphs = graphs
        self._forward = forward
        self._model = model
        self._sums = sums
        self._key: tuple[Any, ...] | None = None
        self._microbatch: _Microbatch | None = None
        self._noted = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        key = _key_of(leaves, spec)
        if self._microbatch is None:
            self._key = key
            self._microbatch = self._capture(leaves, spec)
        elif key != self._key:
            self._note()
            return self._forward(*args, **kwargs)
        return self._microbatch([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def update_done(self) -> None:
        """Gradients have been applied: the next microbatch begins new ones."""
        if self._microbatch is not None:
            self._microbatch.begins_group = True

    def _capture(self, leaves: list[Any], spec: TreeSpec) -> _Microbatch:
        def run(tensors: Sequence[torch.Tensor]) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, spec)
            return self._forward(*args, **kwargs)

        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Warm-up and capture are forwards too, but not ones that batch norm may learn from.
        buffers = {buffer: buffer.detach().clone() for buffer in self._model.buffers()}
        try:
            return _Microbatch(self._graphs, run, self._model, tensors, sums=self._sums)
        except RuntimeError as error:
            raise RuntimeError(
                "graph=True: the model's forward and backward cannot be captured as a CUDA graph. "
                "What prevents it as a rule: reading a tensor's value on the host (.item(), an if "
                "on a tensor, .cpu()), shapes that depend on data, or inputs on the CPU; leave "
                f"graph=True out, or change that: {error}"
            ) from error
        finally:
            with torch.no_grad():
                for buffer, values in buffers.items():
                    buffer.copy_(values)

    def _note(self) -> None:
        if not self._noted:
            self._noted = True
            warnings.warn(
                "graph=True: inputs of another shape, dtype or structure than the first ones are "
                "run without the graph; drop_last=True in the DataLoader avoids a short last batch",
                stacklevel=4,
            )


def _key_of(leaves: list[Any], spec: TreeSpec) -> tuple[Any, ...]:
    facts = [
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return (spec, *facts)


class _Microbatch:
    """Forward and backward for inputs of one shape."""

    def __init__(
        self,
        graphs: Graphs,
        run: Callable[[Sequence[torch.Tensor]], Any],
        model: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        *,
        sums: bool,
    ) -> None:
        self._run = run
        self._inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums = [
            torch.zeros_like(p) if sums and p.dtype not in _SUMMED_ELSEWHERE else None
            for p in self._parameters
        ]
        self.begins_group = True
        self._leaves: list[Any] = []
        self._spec: TreeSpec | None = None
        self._gradients: list[torch.Tensor | None] = []
        self._outputs_gradients: list[torch.Tensor] = []
        graphs.warm_up(self._run_both)
        self._replay_forward = graphs.capture(self._run_forward)
        self._replay_backward = graphs.capture(self._run_backward)
        # Outputs hang on this in autograd's graph, as inputs need no gradient as a rule.
        self._anchor = torch.zeros((), device=self._parameters[0].device, requires_grad=True)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        outputs = iter(_Replay.apply(self, self._anchor, *tensors))  # type: ignore[no-untyped-call]
        leaves = [next(outputs) if _has_gradient(leaf) else leaf for leaf in self._leaves]
        assert self._spec is not None
        return tree_unflatten(leaves, self._spec)

    # --- what is captured -----------------------------------------------------------------------

    def _run_both(self) -> None:
        self._run_forward()
        self._run_backward()

    def _run_forward(self) -> None:
        with torch.enable_grad():
            self._leaves, self._spec = tree_flatten(self._run(self._inputs))
        outputs = self.outputs
        if not outputs:
            raise RuntimeError("expected an output that requires a gradient, got none")
        if not self._outputs_gradients:
            self._outputs_gradients = [torch.zeros_like(output) for output in outputs]

    def _run_backward(self) -> None:
        inputs = [tensor for tensor in self._inputs if tensor.requires_grad]
        gradients = torch.autograd.grad(
            self.outputs, [*self._parameters, *inputs], self._outputs_gradients, allow_unused=True
        )
        count = len(self._parameters)
        self._gradients = [
            gradient if gradient is None else _laid_out_like(gradient, parameter)
            for gradient, parameter in zip(gradients[:count], self._parameters, strict=True)
        ]
        found = iter(gradients[count:])
        self.input_gradients = [next(found) if t.requires_grad else None for t in self._inputs]
        pairs = zip(self._sums, self._gradients, strict=True)
        taken = [(t, g) for t, g in pairs if t is not None and g is not None]
        if taken:
            torch._foreach_add_([total for total, _ in taken], [gradient for _, gradient in taken])

    # --- replays --------------------------------------------------------------------------------

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._leaves if _has_gradient(leaf)]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for fixed, given in zip(self._inputs, tensors, strict=True):
            fixed.copy_(given)
        self._replay_forward()
        return tuple(output.detach() for output in self.outputs)

    def backward(self, gradients: Sequence[torch.Tensor]) -> None:
        for fixed, given in zip(self._outputs_gradients, gradients, strict=True):
            fixed.copy_(given)
        totals = [total for total in self._sums if total is not None]
        if totals and self.begins_group:
            torch._foreach_zero_(totals)
        self._replay_backward()
        self.begins_group = False
        for index, parameter in enumerate(self._parameters):
            self._deliver(index, parameter)

    def _deliver(self, index: int, parameter: torch.nn.Parameter) -> None:
        gradient = self._gradients[index]
        there = parameter.grad
        if gradient is None:
            return
        total = self._sums[index]
        if total is None:
            parameter.grad = gradient.detach() if there is None else there + gradient
            return
        if there is not None and there.data_ptr() != total.data_ptr():
            total.add_(there)  # of a microbatch that came without the graph
        parameter.grad = total


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, microbatch: _Microbatch, _anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.microbatch = microbatch
        return microbatch.forward(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.microbatch.backward(gradients)
        of_inputs = ctx.microbatch.input_gradients
        return (None, None, *(None if g is None else g.detach().clone() for g in of_inputs))


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _laid_out_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A step over other strides would make a copy of its own each time."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


class GraphedStep:
    """`optimizer.step()` by a graph, as soon as two steps in a row were alike."""

    def __init__(self, graphs: Graphs, optimizer: FusedOptimizer) -> None:
        self._graphs = graphs
        self._optimizer = optimizer
        self._seen: tuple[Any, ...] | None = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, orders: Orders) -> Outcome:
        optimizer = self._optimizer
        key = optimizer.step_key(orders)
        if key != self._seen:
            self._seen, self._replay = key, None
            return self._run(orders)
        if self._replay is None:
            self._replay = self._graphs.capture(lambda: self._discard(orders))
        self._replay()
        return optimizer.replayed(orders)

    def _run(self, orders: Orders) -> Outcome:
        self._optimizer.order(orders)
        self._optimizer.step()
        outcome = self._optimizer.outcome
        assert outcome is not None
        return outcome

    def _discard(self, orders: Orders) -> None:
        self._run(orders)
