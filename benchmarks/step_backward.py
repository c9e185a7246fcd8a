"""What the step costs on top of backward, hooks included, and the update inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from step_layouts import CLIP_NORM, LAYOUTS, Backward, Shapes, num_elements
from step_sweep import SWEEP_BYTES, stream_candidates
from torch import nn

import tradewind as tw
from measuring import interleave, ratios, summary


def deepspeed_adam() -> Any:
    """DeepSpeed's CPUAdam, or None where it is not installed or its operator does not build."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(8))])
        return DeepSpeedCPUAdam
    except Exception:
        return None


def cost_candidates(
    shapes: Shapes,
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    gradients = Backward.gradients_for(shapes)
    run: dict[str, Callable[[], object]] = {}
    prepare: dict[str, Callable[[], object]] = {}

    def add(
        name: str, make: Callable[[list[nn.Parameter]], Any], *, clip: bool, scaler: Any
    ) -> None:
        graph = Backward(shapes, gradients)
        optimizer = make(graph.parameters)

        def step() -> None:
            loss = graph.loss if scaler is None else scaler.scale(graph.loss)
            loss.backward()
            if scaler is not None and clip:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(graph.parameters, CLIP_NORM)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif optimizer is not None:
                optimizer.step()
            for parameter in graph.parameters:
                parameter.grad = None

        run[name], prepare[name] = step, graph.forward

    def ours(parameters: list[nn.Parameter]) -> Any:
        return tw.optim.AdamW(parameters, lr=1e-4, clip_norm=CLIP_NORM, measure="backward")

    def torchs(**options: Any) -> Callable[[list[nn.Parameter]], Any]:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, **options)

    scaler = torch.amp.GradScaler
    add("backward", lambda _: None, clip=False, scaler=None)
    add("tradewind", ours, clip=False, scaler=None)
    add("tradewind_scaler", ours, clip=False, scaler=tw.GradScaler("cpu", init_scale=1024.0))
    add("clip_fused", torchs(fused=True), clip=True, scaler=None)
    add("scaler_clip_fused", torchs(fused=True), clip=True, scaler=scaler("cpu", init_scale=1024.0))
    add("clip_foreach", torchs(foreach=True), clip=True, scaler=None)
    add("clip_default", torchs(), clip=True, scaler=None)
    adam = deepspeed_adam()
    if adam is not None:
        add("clip_deepspeed", lambda p: adam(p, lr=1e-4, adamw_mode=True), clip=True, scaler=None)
    return run, prepare


def measure_cost(repeats: int) -> dict[str, Any]:
    """AdamW float32 with clipping. A cost is the difference to the backward of the same round."""
    results: dict[str, Any] = {}
    for name, make in LAYOUTS.items():
        shapes = make()
        run, prepare = cost_candidates(shapes)
        run |= {"stream_update": stream_candidates(num_elements(shapes))["stream_update"]}
        seconds = interleave(run, repeats, prepare=prepare)
        alone = seconds["backward"]
        costs = {
            key: [a - b for a, b in zip(values, alone, strict=True)]
            for key, values in seconds.items()
            if key not in ("backward", "stream_update")
        }
        figures: dict[str, Any] = {f"{key}_cost_s": summary(value) for key, value in costs.items()}
        figures["backward_s"] = summary(alone)
        figures["stream_s"] = summary(seconds["stream_update"])
        for key, value in costs.items():
            if key.startswith("clip_"):
                figures[f"speedup_over_{key}"] = ratios(value, costs["tradewind"])
        figures["speedup_over_scaler_clip_fused"] = ratios(
            costs["scaler_clip_fused"], costs["tradewind_scaler"]
        )
        figures["clipped_fraction_of_stream"] = ratios(seconds["stream_update"], costs["tradewind"])
        figures["moved_bytes"] = num_elements(shapes) * SWEEP_BYTES
        results[name] = figures
    return results


# --- the update in backward -----------------------------------------------------------------------


def transformer() -> nn.Module:
    """28M parameters, none of them a tenth of all."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        512, 8, 2048, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.Sequential(
        nn.Embedding(2048, 512),
        nn.TransformerEncoder(block, 8, enable_nested_tensor=False),
        nn.Linear(512, 2048),
    )


def peak_gradient_fraction(engine: tw.Engine, run: Callable[[], object]) -> float:
    """Most bytes of gradients alive at once, as a fraction of all gradients."""
    parameters = [p for p in engine.model.parameters() if p.requires_grad]
    peak = 0

    def note(_: object) -> None:
        nonlocal peak
        peak = max(peak, sum(p.grad.nbytes for p in parameters if p.grad is not None))

    handles = [p.register_post_accumulate_grad_hook(note) for p in parameters]
    run()
    for handle in handles:
        handle.remove()
    return peak / sum(p.nbytes for p in parameters)


def measure_in_backward(repeats: int) -> dict[str, Any]:
    """A whole step (forward, backward, update) of a transformer, 256 tokens."""
    inputs = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(0))

    def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())

    engines = {
        update: tw.Engine(transformer(), tw.AdamW(lr=1e-4), update=update)
        for update in ("in-backward", "after-backward")
    }
    run: dict[str, Callable[[], object]] = {
        name: lambda engine=engine: engine.step(loss_of(engine)) for name, engine in engines.items()
    }
    plain = transformer()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)

    def torchs() -> None:
        loss_of(plain).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run["torch"] = torchs
    seconds = interleave(run, repeats)
    peaks = {name: peak_gradient_fraction(engine, run[name]) for name, engine in engines.items()}
    ours = seconds["in-backward"]
    return {
        "in_backward_s": summary(ours),
        "after_backward_s": summary(seconds["after-backward"]),
        "torch_fused_s": summary(seconds["torch"]),
        "speedup_over_after_backward": ratios(seconds["after-backward"], ours),
        "speedup_over_torch_fused": ratios(seconds["torch"], ours),
        "peak_gradients_in_backward": peaks["in-backward"],
        "peak_gradients_after_backward": peaks["after-backward"],
        "num_parameters": sum(p.numel() for p in plain.parameters()),
    }
