"""Every precision of the Engine against the same training written out with torch."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from engine.models import batches, bits, small_net
from torch import nn

import tradewind as tw

STEPS = 6


def losses_of(engine: tw.Engine, count: int = STEPS) -> list[float]:
    return [engine.step(F.cross_entropy(engine(x), y)).loss for x, y in batches(count)]


def reference_losses(
    model: nn.Module, parameters: torch.dtype | None, autocast: torch.dtype | None
) -> list[float]:
    """AdamW over float32 masters, forward and backward in the precision, by torch alone."""
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    if parameters is not None:
        for p in model.parameters():
            p.data = p.data if p in norms else p.data.to(parameters)
    scale = 65536.0 if torch.float16 in (parameters, autocast) else 1.0
    losses = []
    for x, y in batches(STEPS):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            output = model(x.to(parameters) if parameters is not None else x)
        loss = F.cross_entropy(output.float(), y)
        (loss * scale).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float() / scale
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("precision", "parameters", "autocast"),
    [
        ("fp32", None, None),
        ("amp-bf16", None, torch.bfloat16),
        ("amp-fp16", None, torch.float16),
        ("bf16", torch.bfloat16, None),
        ("fp16", torch.float16, None),
    ],
)
def test_trains_as_torch_does(
    precision: str, parameters: torch.dtype | None, autocast: torch.dtype | None
) -> None:
    ours, theirs = small_net(), small_net()
    engine = tw.Engine(ours, tw.AdamW(lr=1e-2), precision=precision)
    # The same operations in the same order but for the last bits of the update.
    expected = torch.tensor(reference_losses(theirs, parameters, autocast))
    torch.testing.assert_close(torch.tensor(losses_of(engine)), expected, rtol=2e-3, atol=2e-3)
    assert engine.stats()["loss_scale"] == (65536.0 if "fp16" in precision else None)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_what_becomes_16_bit(precision: str, dtype: torch.dtype) -> None:
    model = small_net()
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.dtype for name, b in model.named_buffers()}
    engine = tw.Engine(model, tw.AdamW(lr=1e-2), precision=precision)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes == {
        "0.weight": dtype,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "4.weight": dtype,
        "4.bias": dtype,
    }
    assert {name: b.dtype for name, b in model.named_buffers()} == buffers
    for name, p in model.named_parameters():
        state = engine.optimizer.state.get(p, {})
        if dtypes[name] == dtype:  # the master is the value the model had, not its rounding
            assert torch.equal(state["master"], original[name])
            assert torch.equal(p, original[name].to(dtype))
    output = engine(batches(1)[0][0])
    assert output.dtype == torch.float32
    assert engine.model is model


@pytest.mark.parametrize("keep", ["4.*", ["4.weight", "4.bias"], lambda n, p: n.startswith("4.")])
def test_kept_in_float32(keep: object) -> None:
    model = small_net()
    engine = tw.Engine(model, tw.SGD(lr=0.1), precision="bf16", keep_fp32=keep)
    assert model[4].weight.dtype == torch.float32
    assert model[1].weight.dtype == torch.float32  # batch norm's are kept besides
    assert model[0].weight.dtype == torch.bfloat16
    seen = []
    handle = model[4].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    losses_of(engine, 2)
    handle.remove()
    assert seen == [torch.bfloat16] * 2  # computed in float32, handed on in bf16
    engine.close()
    assert not model[4]._forward_pre_hooks
    assert not model[4]._forward_hooks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_microbatches_are_summed_in_float32(precision: str) -> None:
    k = 4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.GELU(), nn.Linear(40, 10))
    engine = tw.Engine(model, tw.SGD(lr=1.0), precision=precision, accumulate=k, clip_norm=1e9)
    reference = copy.deepcopy(model)
    scale = 65536.0 if precision == "fp16" else 1.0
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    masters = [engine.optimizer.state[p]["master"].clone() for p in model.parameters()]
    dtype = next(model.parameters()).dtype
    for x, y in batches(k):
        loss = F.cross_entropy(reference(x.to(dtype)).float(), y)
        loss.backward(torch.full_like(loss, scale / k))
        for p, total in zip(reference.parameters(), sums, strict=True):
            total += p.grad.float()
            p.grad = None
    for i, (x, y) in enumerate(batches(k)):
        result = engine.step(F.cross_entropy(engine(x), y))
        assert result.applied == (i == k - 1)
        assert all(p.grad is None for p in model.parameters())  # freed as soon as they are summed
    assert result.num_hot == len(sums)
    norm = torch.cat([t.flatten() for t in sums]).double().norm() / scale
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-12)
    for p, master, total in zip(model.parameters(), masters, sums, strict=True):
        expected = master - total / scale
        torch.testing.assert_close(
            engine.optimizer.state[p]["master"], expected, rtol=2**-23, atol=2**-24
        )


def test_a_short_last_group_of_16_bit_microbatches() -> None:
    short, whole = small_net(), small_net()
    flushed = tw.Engine(short, tw.SGD(lr=0.1), precision="bf16", accumulate=4)
    exact = tw.Engine(whole, tw.SGD(lr=0.1), precision="bf16", accumulate=2)
    for x, y in batches(2):
        for engine in (flushed, exact):
            engine.step(F.cross_entropy(engine(x), y))
    assert flushed.flush() is not None
    for p, q in zip(short.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-6)  # 1/4 * 2 and 1/2 round alike
    # Nothing of the first group is left in the sums.
    for x, y in batches(4, seed=9):
        flushed.step(F.cross_entropy(flushed(x), y))
    assert flushed.num_steps == 2


def test_split_masters_train_as_whole_ones_do() -> None:
    models = [small_net(), small_net()]
    results = []
    for model, masters in zip(models, ("fp32", "split"), strict=True):
        engine = tw.Engine(model, tw.AdamW(lr=1e-2), precision="bf16", masters=masters)
        assert engine.optimizer.masters == masters
        results.append(losses_of(engine))
    # The master is the same to the bit; the 16-bit parameter differs where rounding ties.
    torch.testing.assert_close(*map(torch.tensor, results), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_small_state_trains(precision: str, state_dtype: str) -> None:
    model = small_net()
    engine = tw.Engine(model, tw.AdamW(lr=1e-2), precision=precision, state_dtype=state_dtype)
    losses_of(engine, 2)
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}[state_dtype]
    assert {s["exp_avg"].dtype for s in engine.optimizer.state.values()} == {expected}


def test_an_optimizer_made_before_keeps_its_state() -> None:
    model = small_net()
    optimizer = tw.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = {p: optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    values = {p: p.detach().clone() for p in model.parameters()}
    tw.Engine(model, optimizer, precision="bf16")
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["exp_avg"], moments[p])
        if p.dtype == torch.bfloat16:
            assert torch.equal(optimizer.state[p]["master"], values[p])
        assert int(optimizer.state[p]["step"]) == 2


@pytest.mark.parametrize("precision", ["fp16", "amp-fp16"])
def test_recovers_from_an_overflow(precision: str) -> None:
    model = small_net()
    engine = tw.Engine(
        model,
        tw.AdamW(lr=1e-2),
        precision=precision,
        loss_scale=tw.LossScale(growth_interval=2, initial=2.0**12),
    )
    losses_of(engine, 1)
    before = bits(model)
    state = copy.deepcopy(engine.optimizer.state_dict()["state"])
    x, y = batches(1, seed=5)[0]
    engine.eval()  # batch norm's running statistics are not the step's to protect
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow now and then is no news
        result = engine.step(F.cross_entropy(engine(x), y) * 1e30)
    assert (result.vetoed, result.applied) == (True, False)
    assert bits(model) == before
    torch.testing.assert_close(engine.optimizer.state_dict()["state"], state, rtol=0, atol=0)
    engine.train()
    assert engine.stats()["loss_scale"] == 2.0**11
    assert engine.stats()["num_skipped"] == 1
    losses_of(engine, 2)
    assert engine.stats()["loss_scale"] == 2.0**12  # grown again after two good steps
    assert engine.num_steps == 4


def test_the_floor_names_the_parameter() -> None:
    model = small_net()
    engine = tw.Engine(
        model, tw.AdamW(lr=1e-2), precision="amp-fp16", loss_scale=tw.LossScale(initial=4.0)
    )
    x, y = batches(1)[0]
    engine.step(F.cross_entropy(engine(x), y))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"step 4: .* 0.5, below its floor 1.*'0.weight'"):
        for _ in range(5):
            engine.step(F.cross_entropy(engine(x), y) * float("nan"))
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)


def test_a_plain_backward_under_a_loss_scale_is_refused() -> None:
    engine = tw.Engine(small_net(), tw.AdamW(lr=1e-2), precision="amp-fp16")
    x, y = batches(1)[0]
    F.cross_entropy(engine(x), y).backward()
    with pytest.raises(RuntimeError, match=r"scales the loss.*engine.backward\(loss\)"):
        engine.step()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp-fp16"])
def test_resume_is_exact(precision: str) -> None:
    def fresh() -> tw.Engine:
        return tw.Engine(small_net(), tw.AdamW(lr=1e-2), precision=precision, state_dtype="8bit")

    straight = fresh()
    first = losses_of(straight, 6)
    engine = fresh()
    data = batches(6)
    for x, y in data[:3]:
        engine.step(F.cross_entropy(engine(x), y))
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    resumed = fresh()
    resumed.load_state_dict(torch.load(file))
    rest = [resumed.step(F.cross_entropy(resumed(x), y)).loss for x, y in data[3:]]
    assert rest == first[3:]
    assert bits(resumed.model) == bits(straight.model)


def test_a_model_that_cannot_be_adopted_is_left_in_float32() -> None:
    model = small_net()
    other = tw.Engine(model[4], tw.SGD(lr=0.1))
    with pytest.raises(ValueError, match="is in another Engine"):
        tw.Engine(model, tw.SGD(lr=0.1), precision="bf16")
    other.close()
    shared = torch.zeros(4)
    module = nn.Module()
    module.a, module.b = nn.Parameter(shared[:3]), nn.Parameter(shared[1:])
    with pytest.raises(ValueError, match=r"share memory|overlap"):
        tw.Engine(module, tw.SGD(lr=0.1), precision="fp32")
    assert {p.dtype for p in (*model.parameters(), *module.parameters())} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp32", "masters": "fp32"}, "masters.*need no masters"),
        ({"precision": "fp16", "masters": "split"}, "masters: 'split' is for precision='bf16'"),
        ({"precision": "bf16", "masters": "half"}, "masters: expected one of fp32, split"),
        ({"state_dtype": "int4"}, "state_dtype: expected one of fp32, bf16, 8bit, got 'int4'"),
        ({"keep_fp32": "*.bias"}, "keep_fp32: precision='fp32'"),
        ({"precision": "bf16", "keep_fp32": "no.*"}, "keep_fp32: 'no.*' matches no parameter"),
        ({"loss_scale": tw.LossScale()}, "loss_scale: precision='fp32' needs none"),
        ({"precision": "half"}, "precision: expected one of fp32, amp-bf16"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    model = small_net()
    with pytest.raises(ValueError, match=message):
        tw.Engine(model, tw.AdamW(lr=1e-2), **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.0}, "initial.*a positive number"),
        ({"growth_factor": 1.0}, "growth_factor.*above 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor.*\(0, 1\)"),
        ({"growth_interval": 0}, "growth_interval.*whole number"),
        ({"floor": 1e9}, "floor.*at most initial"),
        ({"initial": "big"}, "expected a number"),
    ],
)
def test_loss_scale_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tw.LossScale(**options)
