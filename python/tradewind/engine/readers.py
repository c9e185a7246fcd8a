"""Who reads which parameter during a forward: recorded in the first ones, so that an update may be
put off until the module that needs it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class ReaderRecord:
    """Records the forwards of `model` between `begin()` and `end()`.

    A read counts for the innermost module that is running. What compiled code and C++ read without
    torch's functions is not seen: parameters that nobody was seen to read are in no module's list.
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        self._model = model
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._running: list[torch.nn.Module] = []
        self._readers: dict[int, set[torch.nn.Module]] = {}
        self._order: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._mode: _Reads | None = None
        self.num_forwards = 0

    def begin(self) -> None:
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._running.append(self._model)  # whose own pre-hooks are running now
        self._mode = _Reads(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        if self._mode is None:
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._mode = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
        self.num_forwards += 1

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._running.append(module)

    def _leave(self, module: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def read(self, values: Any) -> None:
        for value in tree_leaves(values):
            index = self._index_of.get(id(value))
            if index is None:
                continue
            if index not in self._readers:
                self._order.append(index)
            if self._running:
                self._readers.setdefault(index, set()).add(self._running[-1])

    @property
    def readers(self) -> dict[int, set[torch.nn.Module]]:
        """Of each parameter that was read, by index, the modules that read it."""
        return self._readers

    @property
    def order(self) -> list[int]:
        """Parameters by first read."""
        return self._order


class _Reads(TorchFunctionMode):
    def __init__(self, record: ReaderRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._record.read((args, kwargs or {}))
        return func(*args, **(kwargs or {}))
