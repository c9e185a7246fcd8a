"""The training loop's one object: adopts the model, runs backward and the fused step, keeps the
run's record. Not thread-safe: use it from the thread that runs forward."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tradewind.engine.adoption import AdoptedModel, check_adoptable, named_parameters
from tradewind.engine.loop import run_batches
from tradewind.engine.step_result import StepResult
from tradewind.meter import Meter
from tradewind.optim.fused import FusedOptimizer, Orders, Outcome, check_range
from tradewind.optim.recipe import Recipe
from tradewind.place import place
from tradewind.progress import Mode
from tradewind.track import Run

_PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")
_BUILT_PRECISIONS = ("fp32", "amp-bf16")
# Options of the design whose engines are not in this version, with the value that means "off".
_NOT_BUILT: dict[str, Any] = {
    "share": None,
    "checkpoint": None,
    "watch": None,
    "resume": "auto",
    "graph": False,
    "update": "after-backward",
    "masters": None,
    "state_dtype": None,
    "keep_fp32": None,
}


class Engine:
    """Trains `model` with a fused step over arenas of memory.

    ::

        engine = tw.Engine(model, tw.AdamW(lr=1e-3), clip_norm=1.0, run="runs/a")
        for x, y in engine.batches(loader, epochs=3):
            engine.step(F.cross_entropy(engine(x), y))
        print(engine.report())

    Args:
        model: any `torch.nn.Module` on the CPU, compiled by `torch.compile` or not. Its parameters
            move into arenas; the module, its parameter objects and its names stay the same.
        optimizer: a recipe (`tw.AdamW(lr=...)`), or a `tw.optim` optimizer of this model's
            parameters.
        precision: "fp32", or "amp-bf16": forward under bfloat16 autocast, parameters, gradients and
            outputs of `engine(x)` in float32.
        clip_norm: largest joint 2-norm of the gradients; None does not clip.
        accumulate: microbatches per update; each loss is scaled by 1/accumulate.
        run: directory of the run's record; TRADEWIND_RUN overrides it. None keeps no record.

    A gradient that is NaN or infinite vetoes its update: parameters and state stay as they are, a
    warning names the parameter, and the result says `vetoed`.

    Raises:
        TypeError, ValueError: an argument that is not as described, or a parameter that cannot be
            adopted, by name; the model is then as it was.
        NotImplementedError: an option of the design that this version does not have, by name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Recipe | FusedOptimizer,
        *,
        precision: str = "fp32",
        clip_norm: float | None = None,
        accumulate: int = 1,
        run: str | os.PathLike[str] | None = None,
        **not_built: Any,
    ) -> None:
        _check_built(not_built)
        _check_options(precision, clip_norm, accumulate)
        _check_place()
        named = named_parameters(model)
        for name, parameter in named:
            check_adoptable(name, parameter)
        _check_precision(named, precision)
        self.accumulate = accumulate
        self.precision = precision
        # Before adoption, so that a bad recipe leaves the model alone.
        self.optimizer = _make_optimizer(optimizer, named, clip_norm)
        run_path = os.environ.get("TRADEWIND_RUN") or run
        self._config = _describe(self.optimizer, precision, accumulate, model)
        self.run: Run | None = (
            Run.open(run_path, config=self._config, seed=torch.initial_seed()) if run_path else None
        )
        try:
            self._adopted = AdoptedModel(model)
        except BaseException as error:
            if self.run is not None:
                self.run.close(status="failed", error=str(error))
            raise
        self._table = self.optimizer.measure_while_hot()
        self._meter = Meter()
        self._tracked: dict[str, Any] = {}
        self._num_microbatches = 0
        self._losses: list[torch.Tensor] = []
        self._num_vetoed = 0
        self._forward_since_step = False
        self._closed = False
        self.last_result: StepResult | None = None
        self.num_steps = 0

    # --- the model ------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The module that was given, itself."""
        return self._adopted.model

    @property
    def device(self) -> torch.device:
        return self._adopted.parameters[0].device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward in the engine's precision; bfloat16 outputs come as float32."""
        self._forward_since_step |= torch.is_grad_enabled()
        if self.precision == "fp32":
            return self.model(*args, **kwargs)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            outputs = self.model(*args, **kwargs)
        return tree_map(_widen, outputs)

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # --- the step -------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward for one microbatch; `step()` without a loss then counts it.

        Raises TypeError or ValueError for a loss that is no tensor, not a scalar or has no graph.
        """
        self._check_open()
        _check_loss(loss)
        if self._num_microbatches >= self.accumulate:
            raise RuntimeError(
                f"backward: {self._num_microbatches} microbatches wait for an update already; call "
                "engine.step() after each engine.backward(loss)"
            )
        self._prepare_hooks()
        if self.accumulate == 1:
            torch.autograd.backward(loss)
        else:
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 / self.accumulate))
        self._num_microbatches += 1
        self._losses.append(loss.detach())

    def step(self, loss: torch.Tensor | None = None) -> StepResult:
        """Once a microbatch: backward, then, with the `accumulate`-th, the update.

        Without a loss, `engine.backward(loss)` (or, without accumulation, `loss.backward()`) must
        have come before. Gradients are released after the update.
        """
        self._check_open()
        if loss is not None:
            self.backward(loss)
        elif self._num_microbatches == 0:
            self._take_foreign_backward()
        if self._num_microbatches < self.accumulate:
            return StepResult(self.num_steps + 1, self._losses)
        return self._update()

    def flush(self) -> StepResult | None:
        """Apply a group of fewer than `accumulate` microbatches, divided by its own count.

        `batches()` calls this at its end. Returns None where no microbatch waits.
        """
        self._check_open()
        return self._update() if self._num_microbatches else None

    def settle(self) -> None:
        """Return once every update reached the parameters. Updates are synchronous so far, so this
        returns at once."""
        self._check_open()

    def _take_foreign_backward(self) -> None:
        has_gradients = any(parameter.grad is not None for parameter in self._adopted.parameters)
        if self.accumulate > 1 or not has_gradients:
            raise RuntimeError(
                "step: expected a backward before it, found none; call engine.step(loss), or "
                "engine.backward(loss) before engine.step()"
            )
        self._num_microbatches = 1

    def _prepare_hooks(self) -> None:
        table = self.optimizer.native_table
        if table is not self._table:
            self._table = table
        if _compiled_autograd_is_on():
            # It refuses C++ hooks; gradients are then measured at the step.
            table.remove_hooks()
            return
        table.install_hooks()
        # Only the last microbatch's gradients are the update's; measuring earlier ones is wasted.
        table.set_hot(self._num_microbatches + 1 == self.accumulate)

    def _update(self) -> StepResult:
        self._adopted.bring_home()
        self.optimizer.order(
            Orders(
                gradient_multiplier=self.accumulate / self._num_microbatches,
                measure=True,
                veto_nonfinite=True,
            )
        )
        self.optimizer.step()
        outcome = self.optimizer.outcome
        assert outcome is not None
        self.optimizer.native_table.release_gradients()
        for parameter in self._adopted.parameters:
            parameter.grad = None
        self.num_steps += 1
        result = StepResult(self.num_steps, self._losses, outcome)
        if result.vetoed:
            self._report_veto(result)
        self._record(result, outcome)
        self._num_microbatches = 0
        self._losses = []
        self._forward_since_step = False
        self.last_result = result
        return result

    def _report_veto(self, result: StepResult) -> None:
        self._num_vetoed += 1
        if self._num_vetoed & (self._num_vetoed - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            warnings.warn(
                f"step {result.step}: the gradient of {result.first_nonfinite!r} is not finite "
                f"({result.num_nonfinite} NaN or infinite elements in all); the update was skipped "
                f"and nothing changed ({self._num_vetoed} skipped so far)",
                RuntimeWarning,
                stacklevel=4,
            )

    # --- data, record, state ----------------------------------------------------------------------

    def batches(
        self, loader: Iterable[Any], epochs: int = 1, *, progress: Mode = "auto"
    ) -> Iterator[Any]:
        """Yield the loader's batches, `epochs` times over, on the model's device.

        Accounts the time spent waiting for input, shows a progress line (`progress`: "auto",
        "terminal", "lines", "notebook" or "off"), calls `set_epoch` on a sampler that has it, and
        at its end applies a short last group of microbatches.
        """
        self._check_open()
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ValueError(f"epochs: expected a whole number of at least 1, got {epochs!r}")
        if not hasattr(loader, "__iter__"):
            raise TypeError(
                f"loader: expected an iterable of batches (a DataLoader, a list), got "
                f"{type(loader).__name__}"
            )
        if epochs > 1 and isinstance(loader, Iterator):
            raise TypeError(
                f"loader: a {type(loader).__name__} can be read once, but epochs={epochs}; pass "
                "something that can be iterated again, such as a DataLoader or a list"
            )
        return run_batches(self, self._meter, loader, epochs, progress)

    def log(self, **values: Any) -> None:
        """Record values beside the step at hand: numbers and 0-d tensors (read later), text,
        `tw.Image`, `tw.Histogram`. Between forward and `step` they belong to the step to come,
        else to the last one. Without a run they are dropped."""
        self._check_open()
        if self.run is not None:
            self.run.log(self.num_steps + (1 if self._forward_since_step else 0), values)

    def track(self, **objects: Any) -> None:
        """Keep the state of schedulers, averages, samplers: anything with `state_dict` and
        `load_state_dict` becomes part of `engine.state_dict()` under its name."""
        for name, value in objects.items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise TypeError(
                    f"track({name}=...): expected an object with state_dict and load_state_dict, "
                    f"got {type(value).__name__}"
                )
        self._tracked.update(objects)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, tracked objects and step count, for `torch.save`."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "tracked": {name: value.state_dict() for name, value in self._tracked.items()},
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave, into the arenas. Tracked objects must be tracked before.

        Raises ValueError, before anything is loaded, where parts are missing or names differ.
        """
        expected = {"model", "optimizer", "tracked", "num_steps"}
        if set(state_dict) != expected or set(state_dict["tracked"]) != set(self._tracked):
            raise ValueError(
                f"state_dict: expected the parts {sorted(expected)} with tracked "
                f"{sorted(self._tracked)}, got {sorted(state_dict)} with tracked "
                f"{sorted(state_dict.get('tracked', {}))}"
            )
        self.model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for name, value in self._tracked.items():
            value.load_state_dict(state_dict["tracked"][name])
        self.num_steps = int(state_dict["num_steps"])

    def report(self) -> Path:
        """Write the run's self-contained HTML page and return its path."""
        from tradewind.report import write_report

        if self.run is None:
            raise ValueError(
                "report: this Engine keeps no record; pass run='runs/NAME' to tw.Engine, or set "
                "TRADEWIND_RUN"
            )
        self.run.flush()
        return write_report(self.run.path)

    def _record(self, result: StepResult, outcome: Outcome) -> None:
        times = self._meter.update_done()
        if self.run is None:
            return
        row: dict[str, Any] = {
            "grad_norm": outcome.norm,
            "clip_factor": outcome.clip_factor,
            "lr": self.optimizer.param_groups[0]["lr"],
            "vetoed": int(result.vetoed),
            "step_s": times.step_s,
            "wait_s": times.wait_s,
        }
        if self._losses:
            row["loss"] = _mean(self._losses)
        if times.samples:
            row["samples_per_s"] = times.samples_per_s
        self.run.log(result.step, row)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run's record and let go of the model, which stays usable as it is."""
        if self._closed:
            return
        self._closed = True
        self.optimizer.native_table.remove_hooks()
        self._adopted.release()
        if self.run is not None:
            self.run.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self.run is not None:
            self.run.close(status="failed", error=f"{type(error).__name__}: {error}")
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Engine is closed; make another one for the model")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Engine cannot be pickled or copied: it owns arenas and a run; use "
            "engine.state_dict(), or copy engine.model"
        )


def _check_built(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _NOT_BUILT:
            raise TypeError(f"Engine got an unknown option {name!r}")
        if value != _NOT_BUILT[name]:
            raise NotImplementedError(f"Engine({name}={value!r}) is not built yet")


def _check_options(precision: str, clip_norm: float | None, accumulate: int) -> None:
    if precision not in _PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(_PRECISIONS)}, got {precision!r}")
    if precision not in _BUILT_PRECISIONS:
        raise NotImplementedError(
            f"Engine(precision={precision!r}) is not built yet; use one of "
            f"{', '.join(_BUILT_PRECISIONS)}"
        )
    if clip_norm is not None:
        check_range("clip_norm", clip_norm, low=0.0)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a whole number of at least 1, got {accumulate!r}")


def _check_place() -> None:
    here = place()
    if here.world_size > 1:
        raise NotImplementedError(
            f"Engine over {here.world_size} processes is not built yet: each would train alone; "
            "start one process"
        )


def _check_precision(named: list[tuple[str, torch.nn.Parameter]], precision: str) -> None:
    for name, parameter in named:
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"parameter {name!r}: precision={precision!r} expects float32 parameters, got "
                f"{parameter.dtype}; call model.float() first"
            )


def _make_optimizer(
    optimizer: Recipe | FusedOptimizer,
    named: list[tuple[str, torch.nn.Parameter]],
    clip_norm: float | None,
) -> FusedOptimizer:
    given = (
        optimizer.options.get("clip_norm")
        if isinstance(optimizer, Recipe)
        else getattr(optimizer, "clip_norm", None)
    )
    if clip_norm is not None and given is not None and given != clip_norm:
        raise ValueError(
            f"clip_norm: the optimizer has {given}, the Engine was given {clip_norm}; set one"
        )
    if isinstance(optimizer, Recipe):
        trainable = [(name, p) for name, p in named if p.is_floating_point()]
        if not trainable:
            raise ValueError("model: expected at least one floating-point parameter, got none")
        return optimizer.build(trainable, clip_norm)
    if not isinstance(optimizer, FusedOptimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer: expected a recipe such as tw.AdamW(lr=1e-3) or a tw.optim optimizer, got "
            f"{name}" + (" of torch.optim" if isinstance(optimizer, torch.optim.Optimizer) else "")
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in held for _, parameter in named):
        raise ValueError("optimizer: holds none of this model's parameters; make it for this model")
    if clip_norm is not None:
        optimizer.clip_norm = clip_norm
    return optimizer


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss: expected a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"loss: expected a scalar, got shape {tuple(loss.shape)}; take .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss: has no graph, so nothing can be learnt from it; was it computed under "
            "torch.no_grad(), from .detach() or .item(), or are all parameters frozen?"
        )


def _compiled_autograd_is_on() -> bool:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(module is not None and getattr(module, "compiled_autograd_enabled", False))


def _widen(value: Any) -> Any:
    is_bfloat16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_bfloat16 else value


def _mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack([x.reshape(()) for x in losses]).mean()


def _describe(
    optimizer: FusedOptimizer, precision: str, accumulate: int, model: torch.nn.Module
) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        described = {key: group[key] for key in optimizer.defaults if key in group}
        with contextlib.suppress(TypeError, ValueError):
            described["lr"] = float(group["lr"])
        described["num_parameters"] = len(group["params"])
        groups.append(described)
    return {
        "model": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        "precision": precision,
        "clip_norm": optimizer.clip_norm,
        "accumulate": accumulate,
    }
