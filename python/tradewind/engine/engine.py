"""The training loop's one object: adopts the model, runs backward and the fused step, keeps the
run's record. Not thread-safe: use it from the thread that runs forward."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tradewind.checkpoint.options import Checkpoint
from tradewind.checkpoint.save import Save
from tradewind.engine.adoption import AdoptedModel, check_adoptable, named_parameters
from tradewind.engine.arguments import (
    check_batches,
    check_foreign_backward,
    check_loss,
    compiled_autograd_is_on,
)
from tradewind.engine.checkpointing import PATIENCE_AT_ERROR, Checkpointing
from tradewind.engine.data_position import DataPosition
from tradewind.engine.graph import CudaGraphs, GraphedForward, GraphedStep, Graphs
from tradewind.engine.late_update import LateOutcome
from tradewind.engine.loop import run_batches
from tradewind.engine.loss_scale import LossScale, LossScaleState
from tradewind.engine.options import (
    adopt_options,
    check_built,
    check_shareable,
    describe,
    make_optimizer,
    step_options,
)
from tradewind.engine.periodic import PeriodicSharing
from tradewind.engine.precision import (
    Conversion,
    check_dtypes,
    kept_in_float32,
    run_forward,
    run_kept_in_float32,
)
from tradewind.engine.reporting import mean_of, report_veto
from tradewind.engine.resume import Resume, as_checkpoint, check_resume, path_of
from tradewind.engine.sharing import Sharing, join_ranks
from tradewind.engine.state_dict import load_state_dict, state_dict_of
from tradewind.engine.stats import parameter_stats
from tradewind.engine.step_result import StepResult
from tradewind.meter import Meter
from tradewind.optim.fused import FusedOptimizer, Orders, Outcome
from tradewind.optim.recipe import Recipe, Selector
from tradewind.progress import Mode
from tradewind.share.options import Share
from tradewind.track import Run


class Engine:
    """Trains `model` with a fused step over arenas of memory.

    ::

        engine = tw.Engine(model, tw.AdamW(lr=1e-3), clip_norm=1.0, run="runs/a")
        for x, y in engine.batches(loader, epochs=3):
            engine.step(F.cross_entropy(engine(x), y))
        print(engine.report())

    Args:
        model: any `torch.nn.Module` on the CPU or on one GPU, compiled by `torch.compile` or not.
            Its parameters move into arenas; the module, its parameter objects and its names stay.
        optimizer: a recipe (`tw.AdamW(lr=...)`), or a `tw.optim` optimizer of this model's
            parameters.
        precision: "fp32"; "amp-bf16" or "amp-fp16": forward under autocast, parameters and
            gradients in float32; "bf16" or "fp16": parameters and gradients of 16 bits, with
            float32 masters in the optimizer, which start from the values the model had. Outputs of
            `engine(x)` are float32 in each. float16 comes with a dynamic loss scale.
        clip_norm: largest joint 2-norm of the gradients; None does not clip.
        accumulate: microbatches per update; each loss is scaled by 1/accumulate. 16-bit gradients
            are summed in float32.
        masters: "fp32" or "split" (bf16 alone: 4 bytes per parameter with its master instead of 6).
        state_dtype: of the optimizer's state: None (float32), "fp32", "bf16" or "8bit".
        keep_fp32: parameters that "bf16" and "fp16" leave in float32, as a name pattern, a list of
            patterns or a function (name, parameter) -> bool; their modules compute in float32.
            Those of batch norm always stay, as its running statistics do.
        loss_scale: how the loss scale of float16 moves, a `tw.LossScale`.
        update: "after-backward", or "in-backward": each parameter is updated as soon as its
            gradient exists, so that gradients never all live at once; not with clip_norm,
            accumulate or float16. A gradient that is not finite then vetoes its own parameter's
            update alone.
        graph: on a GPU, replay forward and backward of a microbatch, and measure and sweep, as CUDA
            graphs. Inputs of another shape than the first ones run without; outputs are overwritten
            by the next forward; lr becomes a tensor on the device, so that schedules reach it. A
            model that cannot be captured is an error that says what prevents it as a rule.
        share: with how many ranks gradients are shared, and how, a `tw.Share`. `torchrun` starts
            the ranks; the same script runs alone unchanged. Batches are sharded by rank.
        checkpoint: when and where to save what the run needs to go on, a `tw.Checkpoint`; or just
            where, a directory or a URL (`s3://BUCKET/PREFIX`).
        resume: with `checkpoint`: "auto" goes on from the newest whole checkpoint, where there is
            one: parameters, optimizer, loss scale, random numbers, place in the data, what `track`
            is given; "must" refuses to start anew; "never" refuses a directory with checkpoints.
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
        masters: str | None = None,
        state_dtype: str | None = None,
        keep_fp32: Selector | None = None,
        loss_scale: LossScale | None = None,
        update: str = "after-backward",
        graph: bool = False,
        share: Share | None = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        resume: Resume = "auto",
        run: str | os.PathLike[str] | None = None,
        **not_built: Any,
    ) -> None:
        check_built(not_built)
        options = step_options(
            precision=precision,
            clip_norm=clip_norm,
            accumulate=accumulate,
            masters=masters,
            state_dtype=state_dtype,
            loss_scale=loss_scale,
            update=update,
            graph=graph,
        )
        checkpoint = as_checkpoint(checkpoint)
        resume = check_resume(resume, checkpoint)
        run_path = os.environ.get("TRADEWIND_RUN") or run
        checkpoints = path_of(checkpoint, run_path) if checkpoint is not None else None
        meeting = join_ranks(share)
        named = named_parameters(model)
        for name, parameter in named:
            check_adoptable(name, parameter)
        check_dtypes(named, options.precision)
        if keep_fp32 is not None and options.precision.parameters is None:
            raise ValueError(
                f"keep_fp32: precision={precision!r} keeps every parameter in float32; leave it out"
            )
        self._options = options
        # Before adoption, so that a bad recipe leaves the model alone.
        self.optimizer = make_optimizer(optimizer, named, options, model)
        kept = kept_in_float32(model, named, keep_fp32)
        config = describe(self.optimizer, options, model)
        config["checkpoint"] = checkpoint.described() if checkpoint is not None else None
        self._sharing: Sharing | None = None
        if meeting is not None:
            assert share is not None
            check_shareable(options)
            kind = PeriodicSharing if share.strategy == "periodic" else Sharing
            self._sharing = kind(meeting, share, named, model, self.optimizer, config)
        self._report_path: Path | None = None  # where another rank writes it
        if self._sharing is not None and self._sharing.rank > 0 and run_path:
            self._report_path = Path(run_path) / "report.html"
            run_path = None
        self.run: Run | None = (
            Run.open(run_path, config=config, seed=torch.initial_seed()) if run_path else None
        )
        try:
            self._adopt(model, named, kept)
        except BaseException as error:
            if self.run is not None:
                self.run.__exit__(type(error), error, error.__traceback__)
            raise
        self._loss_scale = (
            LossScaleState(options.loss_scale, self.device) if options.loss_scale else None
        )
        self._meter = Meter()
        self._tracked: dict[str, Any] = {}
        self._untracked_state: dict[str, Any] = {}
        self._num_microbatches = 0
        self._has_next = True  # whether this rank takes part in another update
        self._losses: list[torch.Tensor] = []
        # Updates whose numbers a device may not have delivered yet, oldest first.
        self._awaited: deque[tuple[StepResult, Outcome, dict[str, Any]]] = deque()
        self._num_skipped = 0
        self._num_reported = 0
        self._forward_since_step = False
        self._closed = False
        self._has_report = False
        self.last_result: StepResult | None = None
        self._last_outcome: Outcome | None = None
        self._step_s = 0.0  # of the last update
        self.num_steps = 0
        self._num_open_loops = 0  # over batches()
        self._checkpoints: Checkpointing | None = None
        if checkpoint is not None:
            assert checkpoints is not None
            config = {**config, **({"share": self._sharing.described()} if self._sharing else {})}
            try:
                self._checkpoints = Checkpointing(
                    self, checkpoint, checkpoints, resume, config, share
                )
            except BaseException as error:
                self._end_by(error)
                raise

    def _adopt(
        self,
        model: torch.nn.Module,
        named: list[tuple[str, torch.nn.Parameter]],
        kept: set[torch.nn.Parameter],
    ) -> None:
        options = self._options
        dtype = options.precision.parameters
        conversion = Conversion(named, dtype, kept) if dtype is not None else None
        try:
            self._adopted = AdoptedModel(model)
        except BaseException:
            if conversion is not None:
                conversion.undo()
            raise
        adopt_options(self.optimizer, options)
        is_sharded = self._sharing is not None and self._sharing.shards_state
        if conversion is not None and not is_sharded:
            self.optimizer.start_masters(conversion.originals())
        self._handles = run_kept_in_float32(model, kept, dtype) if dtype is not None else []
        if self._sharing is not None:
            adopted = self._adopted
            sums = options.sums_gradients
            self._sharing.attach(adopted.parameters, adopted.names, self.optimizer, sums=sums)
            if self._sharing.sharded is not None and conversion is not None:
                self._sharing.sharded.start_masters(conversion.originals())
        elif options.updates_in_backward:
            self.optimizer.hook_gradients("update")
        else:
            self.optimizer.hook_gradients("sum" if options.sums_gradients else "measure")
        self._graphed_forward: GraphedForward | None = None
        self._graphed_step: GraphedStep | None = None
        if options.graph:
            self._use_graphs(model)

    def _use_graphs(self, model: torch.nn.Module) -> None:
        graphs = self._make_graphs()
        sums = self._options.accumulate > 1
        self._graphed_forward = GraphedForward(graphs, self._forward, model, sums=sums)
        self._graphed_step = GraphedStep(graphs, self.optimizer)
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                rate = torch.tensor(float(group["lr"]), dtype=torch.float64, device=self.device)
                group["lr"] = rate

    _make_graphs: Callable[[], Graphs] = staticmethod(CudaGraphs)

    # --- the model ------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The module that was given, itself."""
        return self._adopted.model

    @property
    def precision(self) -> str:
        return self._options.precision.name

    @property
    def accumulate(self) -> int:
        return self._options.accumulate

    @property
    def rank(self) -> int:
        """Of this process among those that share; 0 alone."""
        return self._sharing.rank if self._sharing is not None else 0

    @property
    def world_size(self) -> int:
        return self._sharing.size if self._sharing is not None else 1

    @property
    def device(self) -> torch.device:
        return self._adopted.parameters[0].device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward in the engine's precision; 16-bit outputs come as float32. Where
        ranks share, an error in a forward that trains ends sharing on every rank."""
        sharing = self._sharing
        if sharing is None:
            return self._run_forward(args, kwargs)
        try:
            sharing.before_forward()
            return self._run_forward(args, kwargs)
        except BaseException as error:
            if torch.is_grad_enabled():
                sharing.failed(error, "forward")
            raise

    def _run_forward(self, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._boundary(is_in_body=True)
            self._begin_step()
            if self._graphed_forward is not None and self.model.training:
                return self._graphed_forward(args, kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        options = self._options
        # A graph must cast the weights of its own replay, not find those of an earlier one.
        caches = not options.graph
        return run_forward(self.model, options.precision, self.device, args, kwargs, caches=caches)

    def _begin_step(self) -> None:
        # From here on, what is logged belongs to the step to come.
        if not self._forward_since_step:
            self._forward_since_step = True
            if self.run is not None:
                self.run.step = self.num_steps + 1

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
        check_loss(loss)
        if self._num_microbatches >= self.accumulate:
            raise RuntimeError(
                f"backward: {self._num_microbatches} microbatches wait for an update already; call "
                "engine.step() after each engine.backward(loss)"
            )
        self._boundary(is_in_body=True)
        self._prepare_hooks()
        sharing, syncs = self._sharing, self._num_microbatches + 1 == self.accumulate
        if sharing is None:
            self._run_backward(loss)
        else:
            sharing.before_backward(syncs=syncs)
            try:
                self._run_backward(loss)
                sharing.after_backward(syncs=syncs, has_next=self._has_next)
            except BaseException as error:
                sharing.backward_failed(error)
                raise
        self._num_microbatches += 1
        self._losses.append(loss.detach())

    def _run_backward(self, loss: torch.Tensor) -> None:
        options = self._options
        if options.updates_in_backward:
            self._before_writing()
            self.optimizer.begin_backward_update(wants_changes=True)
        if self._loss_scale is not None:
            # The scale enters with the first gradient: no pass, and no product that could overflow.
            loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
            seed = (self._loss_scale.scale / options.accumulate).to(loss.dtype).expand_as(loss)
            torch.autograd.backward(loss, seed)
        elif options.accumulate > 1:
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 / options.accumulate))
        else:
            torch.autograd.backward(loss)
        if options.sums_gradients and not self._shares_gradients:
            self.optimizer.native_table.sum_gradients()

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
        if not self._num_microbatches:
            return None
        if self._shares_gradients and self._num_microbatches < self.accumulate:
            assert self._sharing is not None
            multiplier = self.accumulate / self._num_microbatches
            self._sharing.flush(multiplier, has_next=self._has_next)
            return self._update(1.0)
        return self._update()

    @property
    def _shares_gradients(self) -> bool:
        return self._sharing is not None and self._sharing.shares_gradients

    def _follow_others(self, *, has_taken_part: bool) -> None:
        """This rank has no data left: take the updates of those that have."""
        sharing = self._sharing
        assert sharing is not None
        while not has_taken_part or sharing.others_go_on():
            sharing.shadow_round()
            if sharing.shares_gradients:
                self._update(1.0)
                self._boundary()
            has_taken_part = True

    def settle(self) -> None:
        """Return once every update reached the parameters. Where sharing overlaps with the next
        forward, tensors that somebody holds are behind until then."""
        self._check_open()
        if self._sharing is not None:
            self._sharing.settle()

    def _take_foreign_backward(self) -> None:
        check_foreign_backward(
            self._adopted.parameters,
            accumulates=self.accumulate > 1,
            precision=self.precision if self._loss_scale is not None else None,
        )
        self._num_microbatches = 1

    def _prepare_hooks(self) -> None:
        table = self.optimizer.native_table
        if compiled_autograd_is_on():
            # It refuses C++ hooks; gradients are then measured at the step.
            table.remove_hooks()
            return
        table.install_hooks()
        # Only the last microbatch's gradients are the update's; measuring earlier ones is wasted.
        table.set_hot(self._num_microbatches + 1 == self.accumulate)

    def _boundary(self, *, is_in_body: bool = False) -> None:
        """The loop is done with the last update: its schedules have stepped. Whoever is in a loop
        over `batches()` gets here when it asks for the next one, others at the next forward or
        backward. Raises SystemExit where this process is to end."""
        checkpoints = self._checkpoints
        if checkpoints is None or self._num_microbatches:
            return
        if not is_in_body or not self._num_open_loops or checkpoints.is_overdue:
            checkpoints.boundary()

    def _before_writing(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.before_update()
        self._adopted.bring_home()

    def _update(self, multiplier: float | None = None) -> StepResult:
        self._before_writing()
        if multiplier is None:
            multiplier = self.accumulate / self._num_microbatches
        orders = Orders(
            gradient_multiplier=multiplier,
            measure=True,
            veto_nonfinite=True,
            wants_changes=True,
            grad_scale=self._loss_scale.scale if self._loss_scale else None,
        )
        outcome = self._step_optimizer(orders)
        if not isinstance(outcome, LateOutcome):
            self._update_ended(outcome)
        if self._graphed_forward is not None:
            self._graphed_forward.update_done()
        if self._sharing is not None:
            self._sharing.updated(has_next=self._has_next)
        self.num_steps += 1
        result = StepResult(self.num_steps, self._losses, outcome)
        self._awaited.append((result, outcome, self._row()))
        self._num_microbatches = 0
        self._losses = []
        self._forward_since_step = False
        self.last_result = result
        self._take_numbers()
        if self._checkpoints is not None:
            self._checkpoints.after_update()
        return result

    def _update_ended(self, outcome: Outcome) -> None:
        self.optimizer.release_gradients()
        for parameter in self._adopted.parameters:
            parameter.grad = None
        if self._loss_scale is not None:
            self._loss_scale.update(outcome.found_inf(self.device))

    def _step_optimizer(self, orders: Orders) -> Outcome:
        if self._sharing is not None:
            late = self._sharing.update(orders, self._update_ended)
            if late is not None:
                return late
        if self._graphed_step is not None:
            return self._graphed_step(orders)
        self.optimizer.order(orders)
        self.optimizer.step()
        outcome = self.optimizer.outcome
        assert outcome is not None
        if self._sharing is not None:
            self._sharing.name_nonfinite(outcome)
        return outcome

    def _take_numbers(self, *, wait: bool = False) -> None:
        """Account for the updates whose numbers have arrived: all but the last, as a rule, on a
        device; every one on the CPU."""
        while self._awaited and (wait or self._awaited[0][1].is_ready()):
            result, outcome, row = self._awaited.popleft()
            self._last_outcome = outcome
            self._num_skipped += int(not outcome.applied)
            if self._loss_scale is not None:
                self._loss_scale.follow(overflowed=result.vetoed)
            self._record(result, outcome, row)
            if not result.vetoed:
                continue
            if self._loss_scale is not None:  # float16 overflows now and then: no news by itself
                self._loss_scale.check_floor(result.first_nonfinite, result.step)
            else:
                self._num_reported += 1
                report_veto(result, self._num_reported, self.device, self._options)

    def stats(self) -> dict[str, Any]:
        """What the last update saw, from numbers its passes had anyway.

        `step`, `num_skipped` (updates vetoed so far), `grad_norm` and `clip_factor`, `loss_scale`
        (None without one), and `parameters`: for each by name `grad_norm`, `grad_max` (before
        clipping), `zero_fraction` of its gradient and `update_ratio`, the 2-norm of its update over
        its own (NaN where none was applied). Without an update so far, `parameters` is empty. On a
        GPU nothing waits: the numbers are those of the last update that has delivered them.

        With `share=` and several ranks also `sharing`: `num_rounds`, `sent_bytes` of this rank,
        `between_hosts_bytes` (of these, with strategy="hierarchical"), `busy_s` (from each round's
        first byte to its last), `waited_s` (what of it this rank waited for), `hidden` (the rest's
        share) and `clip_waited_s` (what of waited_s late updates spent on the norm to clip by).
        With strategy="sharded" `update_ratio` is NaN.

        With `checkpoint=` also `checkpoint`: `step` of the newest durable one and its `age_s`
        (None before the first of this process), `num_saved`, `num_failed` and the last `error`,
        medians `stall_s` (for which a save held training) and `durable_s` (until it was
        committed), `every`, `interval_s` and `mtbf_s` as known so far, `is_saving`, `path`.
        """
        self._take_numbers()
        outcome = self._last_outcome
        return {
            "step": self.num_steps - len(self._awaited),
            "num_skipped": self._num_skipped,
            "grad_norm": outcome.norm if outcome else None,
            "clip_factor": outcome.clip_factor if outcome else None,
            "loss_scale": self._loss_scale.value if self._loss_scale else None,
            "parameters": self._parameter_stats(outcome) if outcome else {},
            **({"sharing": self._sharing.statistics()} if self._sharing else {}),
            **({"checkpoint": self._checkpoints.stats()} if self._checkpoints else {}),
        }

    def _parameter_stats(self, outcome: Outcome) -> dict[str, dict[str, float]]:
        parameters, columns = self.optimizer.statistics()
        adopted = zip(self._adopted.parameters, self._adopted.names, strict=True)
        name_of = {id(parameter): name for parameter, name in adopted}
        names = [name_of.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
        return parameter_stats(names, columns, outcome.gradient_multiplier)

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
        check_batches(loader, epochs)
        position = self._checkpoints.position if self._checkpoints is not None else None
        return run_batches(self, self._meter, loader, epochs, progress, position)

    def log(self, **values: Any) -> None:
        """Record values beside the step at hand: numbers and 0-d tensors (read later), text,
        `tw.Image`, `tw.Histogram`. Between forward and `step` they belong to the step to come,
        else to the last one. Without a run they are dropped."""
        self._check_open()
        if self.run is not None:
            self.run.log(self.run.step, values)

    def track(self, **objects: Any) -> None:
        """Keep the state of schedulers, averages, samplers: anything with `state_dict` and
        `load_state_dict` becomes part of checkpoints and `engine.state_dict()` under its name.
        After a resume or `engine.load_state_dict`, an object is filled as soon as it is tracked."""
        for name, value in objects.items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise TypeError(
                    f"track({name}=...): expected an object with state_dict and load_state_dict, "
                    f"got {type(value).__name__}"
                )
        for name, value in objects.items():
            if name in self._untracked_state:
                value.load_state_dict(self._untracked_state.pop(name))
                if self._checkpoints is not None:
                    self._checkpoints.tracked(value)
        self._tracked.update(objects)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, tracked objects, step count and loss scale, for `torch.save`.

        With tw.Share(strategy="sharded") the whole state comes together on every rank: all ranks
        call this. What a lossy codec still owes, and with strategy="periodic" the optimizer, is
        each rank's own: save every rank's.
        """
        return state_dict_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave, into the arenas. State of objects that are not tracked yet
        waits for `track()`.

        Raises ValueError, before anything is loaded, where parts are missing or unknown, or where
        a tracked object has no state in it. What a codec owed is loaded on the rank that saved it,
        of as many ranks, and lost with a warning elsewhere.
        """
        load_state_dict(self, state_dict)

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self) -> Save:
        """Save now, besides what `checkpoint=` has it. All ranks call this after the same update.

        Returns as soon as nothing of the state can change under the save; its `.wait()` blocks
        until it is durable. Raises RuntimeError without `checkpoint=`, and between the microbatches
        of one update.
        """
        self._check_open()
        return self._need_checkpoints("save").save()

    @contextlib.contextmanager
    def edit_parameters(self) -> Iterator[None]:
        """Within, parameters and optimizer state may be edited in place: no checkpoint is reading
        them and no late update will write them. Elsewhere, an edit while a checkpoint is written
        makes that save fail by name."""
        self.settle()
        if self._checkpoints is not None:
            self._checkpoints.drain()
        yield

    @property
    def data_position(self) -> DataPosition:
        """Where the run is in its data. Raises RuntimeError without `checkpoint=`."""
        return self._need_checkpoints("data_position").position

    def _need_checkpoints(self, what: str) -> Checkpointing:
        if self._checkpoints is None:
            raise RuntimeError(
                f"{what}: this Engine has no checkpoints; pass checkpoint=tw.Checkpoint() to it"
            )
        return self._checkpoints

    def report(self) -> Path:
        """Write the run's self-contained HTML page and return its path. While the run lives, the
        page shows it so far, and `close()` draws it once more. Of several ranks, rank 0 writes."""
        from tradewind.report import write_report

        if self.run is None and self._report_path is not None:
            return self._report_path
        if self.run is None:
            raise ValueError(
                "report: this Engine keeps no record; pass run='runs/NAME' to tw.Engine, or set "
                "TRADEWIND_RUN"
            )
        self._has_report = True
        self.run.flush()
        return write_report(self.run.path)

    def _row(self) -> dict[str, Any]:
        """What is known of an update as soon as it is queued."""
        times = self._meter.update_done()
        self._step_s = times.step_s
        if self.run is None:
            return {}
        row: dict[str, Any] = {
            **(self._sharing.waits() if self._sharing else {}),
            "lr": self.optimizer.param_groups[0]["lr"],
            "step_s": times.step_s,
            "wait_s": times.wait_s,
        }
        if self._losses:
            row["loss"] = mean_of(self._losses)
        if times.samples:
            row["samples_per_s"] = times.samples_per_s
        return row

    def _record(self, result: StepResult, outcome: Outcome, row: dict[str, Any]) -> None:
        if self.run is None:
            return
        row["grad_norm"] = outcome.norm
        row["clip_factor"] = outcome.clip_factor
        row["vetoed"] = int(result.vetoed)
        row["hot_gradients"] = result.num_hot
        if self._loss_scale is not None:
            row["loss_scale"] = self._loss_scale.value
        self.run.log(result.step, row)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run's record and let go of the model, which stays usable as it is. With
        `checkpoint=` the last update is saved first, and the save waited for."""
        if self._closed:
            return
        try:
            if self._sharing is not None:
                self._sharing.settle()
            self._take_numbers(wait=True)
            if self._checkpoints is not None:
                self._checkpoints.finish()
        finally:
            self._closed = True
            self._let_go()

    def _abort(self, error: BaseException) -> None:
        """Let go in the middle of training: other ranks learn why, and a save that is under way is
        not waited for much longer."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._sharing is not None:
                self._sharing.failed(error, "training")
        finally:
            self._let_go(patience=PATIENCE_AT_ERROR)

    def _end_by(self, error: BaseException) -> None:
        if self.run is not None:
            self.run.__exit__(type(error), error, error.__traceback__)
        self._abort(error)

    def _stop(self, reason: str) -> None:
        """The process is about to end and will be started again; the last save is done."""
        if self._closed:
            return
        self._closed = True
        try:
            self._take_numbers(wait=True)
            if self.run is not None:
                self.run.close("stopped", reason)
        finally:
            self._let_go(patience=PATIENCE_AT_ERROR)

    def _let_go(self, patience: timedelta | None = None) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close(patience=patience)
        self.optimizer.native_table.remove_hooks()
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None
        self._adopted.release()
        for handle in self._handles:
            handle.remove()
        if self.run is not None:
            self.run.close()
            if self._has_report and os.getpid() == self.run.owner_pid:
                self.report()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            if not self._closed:
                self._end_by(error)
            return
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Engine is closed; make another one for the model")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Engine cannot be pickled or copied: it owns arenas and a run; use "
            "engine.state_dict(), or copy engine.model"
        )
