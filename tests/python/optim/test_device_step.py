"""The step on a device has the CPU's bits, for every rule and storage. Here the device is emulated:
the CUDA library's kernels, compiled for the host, step CPU tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import cuda_emulation
import pytest
import torch
from device_cases import RULES, STORAGES, assert_same_bits, give, make, step_all, tensors
from optimizer_cases import LAYOUTS, bits, parameters_of
from torch.nn import Parameter

import tradewind as tw
from tradewind.optim import cuda
from tradewind.optim.fused import Orders


@pytest.fixture(scope="session")
def built() -> cuda_emulation.Emulation:
    return cuda_emulation.build()


@pytest.fixture(autouse=True)
def emulation(
    built: cuda_emulation.Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[cuda_emulation.Emulation]:
    monkeypatch.setattr(cuda, "library", lambda: built.library)
    yield built
    assert built.failure == ""


def there(optimizer: Any) -> Any:
    """The optimizer, to be stepped by the emulated device."""
    optimizer._device_type = "cpu"
    return optimizer


def pair(rule: str, given: list[torch.Tensor], **options: Any) -> tuple[Any, Any]:
    return make(rule, given, **options), there(make(rule, given, **options))


def suits(storage: dict[str, Any], dtype: torch.dtype) -> bool:
    if storage.get("masters") == "split" and dtype == torch.float16:
        return False
    return (dtype.itemsize <= 4 and not dtype.is_complex) or "state_dtype" not in storage


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_same_bits(rule: str, options: dict[str, Any], storage: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "masters" in storage else torch.float32
    here, device = pair(rule, tensors(rule, dtype), clip_norm=3.0, **options, **storage)
    for _ in range(3):
        step_all([here, device], 1)
        assert here.outcome.norm == device.outcome.norm
        assert here.outcome.clip_factor == device.outcome.clip_factor
    assert isinstance(device.native_table, cuda.DeviceTables)
    assert_same_bits(here, device)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_same_bits_by_dtype(rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    if rule == "Muon" and dtype.is_complex:
        pytest.skip("Muon has no complex parameters")
    for storage in STORAGES[:3]:
        if suits(storage, dtype):
            here, device = pair(rule, tensors(rule, dtype), clip_norm=3.0, **options, **storage)
            step_all([here, device])
            assert_same_bits(here, device)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_mixed_dtypes_and_layouts(rule: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    given = [layout(lambda *s: torch.randn(*s, generator=generator)) for layout in LAYOUTS.values()]
    given += [t.to(d) for t in given[3:7] for d in (torch.float64, torch.bfloat16)]
    if rule == "Muon":
        given = [t for t in given if t.ndim == 2] + [torch.randn(4, 6, generator=generator).t()]
    here, device = pair(rule, given, clip_norm=1.0, **options)
    step_all([here, device])
    assert_same_bits(here, device)


@pytest.mark.parametrize(("room", "num_sweeps"), [(1, 10), (4000, 6), (1 << 20, 2)])
def test_matrices_take_turns_where_there_is_little_room(
    emulation: cuda_emulation.Emulation,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    num_sweeps: int,
) -> None:
    monkeypatch.setattr(cuda, "MAX_DIRECTION_BYTES", room)
    given = [torch.randn(n, 16, generator=torch.Generator().manual_seed(n)) for n in range(20, 25)]
    here, device = pair("Muon", [given[0], given[1].t(), *given[2:]], lr=0.1)
    step_all([here, device], 2)
    give([here, device], 2)
    here.step()
    before = emulation.num_launches
    device.step()
    assert emulation.num_launches - before == 2 + num_sweeps  # control's two
    assert_same_bits(here, device)


@pytest.mark.parametrize("layout", ["transposed", "row_gaps"])
def test_gradients_of_another_layout_and_dtype(layout: str) -> None:
    given = [LAYOUTS[layout](lambda *s: torch.arange(float(torch.Size(s).numel())).view(*s))]
    here, device = pair("AdamW", [t.bfloat16() for t in given], masters="fp32", clip_norm=1.0)
    for optimizer in (here, device):
        (parameter,) = parameters_of(optimizer)
        # In the same shape: float32 beside a bfloat16 parameter, in rows.
        parameter.grad_dtype = None
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
        optimizer.step()
    assert_same_bits(here, device)


# --- which parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_gradients_that_come_and_go(rule: str, options: dict[str, Any]) -> None:
    here, device = pair(rule, tensors(rule, torch.float32), clip_norm=1.0, **options)
    everything = range(len(parameters_of(here)))
    for seed, without in enumerate([(), (0, 2), (1, 3), everything, (4,), ()]):
        give([here, device], seed, without=without)
        here.step()
        device.step()
        assert here.outcome.norm == device.outcome.norm
    assert_same_bits(here, device)


@pytest.mark.parametrize(
    "changed", [{"lr": 0.3}, {"weight_decay": 0.5}, {"maximize": True}, {"betas": (0.5, 0.6)}]
)
def test_groups_that_differ_in_one_option(changed: dict[str, Any]) -> None:
    made = []
    for _ in range(2):
        parameters = [Parameter(t) for t in tensors("AdamW", torch.float32)]
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], **changed}]
        made.append(tw.optim.AdamW(groups, lr=0.1))
    here, device = made[0], there(made[1])
    step_all([here, device])
    for optimizer in made:  # as a scheduler does
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    step_all([here, device], first=3)
    assert_same_bits(here, device)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_groups_added_later(rule: str, options: dict[str, Any]) -> None:
    here, device = pair(rule, tensors(rule, torch.float32), clip_norm=1.0, **options)
    step_all([here, device])
    for optimizer in (here, device):
        more = [Parameter(t) for t in tensors(rule, torch.float64, seed=9)]
        optimizer.add_param_group({"params": more, "lr": 0.02})
    step_all([here, device], first=3)
    assert_same_bits(here, device)


def test_two_rules_in_one_optimizer() -> None:
    made = []
    for _ in range(2):
        parameters = [Parameter(t) for t in tensors("AdamW", torch.float32)]
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "amsgrad": True}]
        made.append(tw.optim.AdamW(groups, lr=0.1, clip_norm=1.0))
    here, device = made[0], there(made[1])
    step_all([here, device])
    assert_same_bits(here, device)


def test_no_parameter_has_a_gradient() -> None:
    _, device = pair("AdamW", tensors("AdamW", torch.float32), clip_norm=1.0)
    before = [bits(p) for p in parameters_of(device)]
    device.step()
    assert device.outcome.norm == 0.0 and not device.state
    assert [bits(p) for p in parameters_of(device)] == before


# --- orders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [None, 0.0, 1e-3, 1e6])
@pytest.mark.parametrize("rule", ["AdamW", "LAMB"])
def test_clipping(rule: str, clip_norm: float | None) -> None:
    here, device = pair(rule, tensors(rule, torch.float32), lr=0.1, clip_norm=clip_norm)
    step_all([here, device])
    assert here.outcome.norm == device.outcome.norm
    assert here.outcome.clip_factor == device.outcome.clip_factor
    assert_same_bits(here, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_veto(rule: str, options: dict[str, Any], bad: float) -> None:
    """At the first step, and later on: nothing changes, no step is counted."""
    here, device = pair(rule, tensors(rule, torch.float32), **options)
    for step in range(4):
        give([here, device], step)
        for optimizer in (here, device):
            if step in (0, 2):
                parameters_of(optimizer)[2].grad.view(-1)[1] = bad
            optimizer.order(Orders(gradient_multiplier=0.5, measure=True, veto_nonfinite=True))
            optimizer.step()
        assert here.outcome.applied == device.outcome.applied == (step not in (0, 2))
        assert here.outcome.first_nonfinite_name == device.outcome.first_nonfinite_name
        assert device.outcome.num_nonfinite == (1 if step in (0, 2) else 0)
        if step > 0:  # before the first update a device has state already, of zeros
            assert_same_bits(here, device)
    assert int(device.native_table.vetoed()) == 0


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_a_veto_before_the_table_is_made_anew(rule: str) -> None:
    options = {"momentum": 0.9, "dampening": 0.5} if rule == "SGD" else {}
    here, device = pair(rule, tensors(rule, torch.float32), lr=0.1, **options)
    for optimizer in (here, device):
        give([optimizer], 0)
        parameters_of(optimizer)[0].grad.fill_(float("nan"))
        optimizer.order(Orders(veto_nonfinite=True))
        optimizer.step()
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
    step_all([here, device], first=1)
    assert_same_bits(here, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_learning_rate_in_device_memory(
    rule: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    rates = [torch.tensor(0.125, dtype=dtype), torch.tensor(0.125, dtype=dtype)]
    given = tensors(rule, torch.float32)
    here = make(rule, given, **{**options, "lr": rates[0]})
    device = there(make(rule, given, **{**options, "lr": rates[1]}))
    step_all([here, device])
    uploads = device.native_table.num_uploads
    for rate in rates:
        rate.fill_(0.01)
    step_all([here, device], first=3)
    assert_same_bits(here, device)
    del uploads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, tw.GradScaler])
def test_grad_scalers(scaler_class: Any, dtype: torch.dtype) -> None:
    given = tensors("AdamW", dtype)
    here, device = pair("AdamW", given, lr=0.1, clip_norm=1.0, fused=True)
    scalers = [scaler_class("cpu", init_scale=256.0) for _ in range(2)]
    for step in range(4):
        give([here, device], step)
        for optimizer, scaler in zip((here, device), scalers, strict=True):
            scaler.scale(torch.ones(()))
            for parameter in parameters_of(optimizer):
                parameter.grad.mul_(scaler.get_scale())
            if step == 1:
                parameters_of(optimizer)[3].grad[5] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert here.outcome.applied == device.outcome.applied == (step != 1)
        assert here.outcome.gradient_multiplier == device.outcome.gradient_multiplier or step == 1
    assert scalers[0].get_scale() == scalers[1].get_scale() == 128.0
    assert_same_bits(here, device)


def test_a_loss_scale_that_the_device_keeps() -> None:
    """It moves as torch's, unscales, and survives a table that is made anew."""
    _, device = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1, clip_norm=1.0)
    here = make("AdamW", tensors("AdamW", torch.float32), lr=0.1, clip_norm=1.0)
    moves = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    scaler = tw.GradScaler("cpu", init_scale=64.0, **moves)
    device.native_table.keep_loss_scale(64.0, **moves)
    for step in range(8):
        if step == 4:
            for optimizer in (here, device):
                optimizer.add_param_group({"params": [Parameter(torch.ones(5))]})
        scaler.scale(torch.ones(()))
        give([here, device], step)
        for optimizer in (here, device):
            for parameter in parameters_of(optimizer):
                parameter.grad.mul_(scaler.get_scale())
            if step in (1, 5):
                parameters_of(optimizer)[3].grad[0] = float("nan")
        assert float(device.native_table.loss_scale()) == scaler.get_scale()
        device.order(Orders(measure=True, veto_nonfinite=True))
        device.step()
        scaler.step(here)
        scaler.update()
        assert here.outcome.norm == device.outcome.norm or step in (1, 5)
    assert_same_bits(here, device)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_statistics(rule: str, options: dict[str, Any]) -> None:
    here, device = pair(rule, tensors(rule, torch.float32), **options)
    assert set(device.native_table.statistics()) == set(here.native_table.statistics())
    for step in range(3):
        give([here, device], step, without=[2])
        for optimizer in (here, device):
            if step == 2:
                parameters_of(optimizer)[0].grad.fill_(float("inf"))
            optimizer.order(Orders(measure=True, wants_changes=True, veto_nonfinite=True))
            optimizer.step()
        mine, theirs = here.native_table.statistics(), device.native_table.statistics()
        assert mine == theirs and len(mine["parameter_idx"]) == len(parameters_of(here)) - 1


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_state_goes_from_one_to_the_other(
    rule: str, options: dict[str, Any], storage: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if "masters" in storage else torch.float32
    made = [make(rule, tensors(rule, dtype), **options, **storage) for _ in range(3)]
    here, device, back = made[0], there(made[1]), made[2]
    step_all(made[:1])
    for source, target in ((here, device), (device, back)):
        file = io.BytesIO()
        torch.save([source.state_dict(), parameters_of(source)], file)
        file.seek(0)
        state, values = torch.load(file, weights_only=False)
        with torch.no_grad():
            for parameter, value in zip(parameters_of(target), values, strict=True):
                parameter.copy_(value)
        target.load_state_dict(state)
        step_all([target], first=3)
        if source is not here:
            step_all([source], 0)
    step_all([here], 3, first=3)
    assert_same_bits(here, device)
    step_all([here], 3, first=3)
    assert_same_bits(here, back)


@pytest.mark.parametrize("after", STORAGES, ids=str)
@pytest.mark.parametrize("before", STORAGES[:3] + STORAGES[-1:], ids=str)
def test_state_stored_in_another_way(before: dict[str, Any], after: dict[str, Any]) -> None:
    given = tensors("AdamW", torch.bfloat16)
    source = make("AdamW", given, lr=0.1, **before)
    step_all([source])
    here, device = pair("AdamW", parameters_of(source), lr=0.1, **after)
    for optimizer in (here, device):
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    step_all([here, device], first=3)
    assert_same_bits(here, device)


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_somebody_else_writes_to_a_parameter(masters: str) -> None:
    here, device = pair("AdamW", tensors("AdamW", torch.bfloat16), lr=0.1, masters=masters)
    step_all([here, device])
    for optimizer in (here, device):
        with torch.no_grad():
            parameters_of(optimizer)[3][:100].mul_(0.5)
    step_all([here, device], first=3)
    assert_same_bits(here, device)


@pytest.mark.parametrize(
    "edit",
    [
        lambda o, p: o.state[p]["exp_avg"].zero_(),
        lambda o, p: o.state[p].update(exp_avg=torch.ones_like(p)),
        lambda o, p: o.state.pop(p),
        lambda o, p: o.state.clear(),
        lambda o, p: setattr(p, "data", p.data.clone()),
        lambda o, p: o.param_groups[0]["params"].reverse(),
    ],
    ids=["in_place", "replaced", "removed", "cleared", "moved", "reordered"],
)
def test_edits(edit: Any) -> None:
    here, device = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1)
    step_all([here, device])
    for optimizer in (here, device):
        edit(optimizer, parameters_of(optimizer)[3])
    step_all([here, device], first=3)
    assert_same_bits(here, device)


def test_state_tensors_keep_their_memory() -> None:
    _, device = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1)
    step_all([device])
    entry = device.state[parameters_of(device)[4]]
    want = {name: bits(value) for name, value in entry.items()}
    taken = dict(entry)
    del device, entry
    assert {name: bits(value) for name, value in taken.items()} == want
    file = io.BytesIO()
    torch.save(taken["exp_avg"], file)
    assert len(file.getvalue()) < 4 * 4097 + 4096  # one slot, not the arena


# --- what a step costs --------------------------------------------------------------------------


def launches(emulation: cuda_emulation.Emulation, optimizer: Any, seed: int) -> int:
    give([optimizer], seed)
    before = emulation.num_launches
    optimizer.step()
    return emulation.num_launches - before


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize(
    ("rule", "want"), [("AdamW", 6), ("SGD", 6), ("Lion", 6), ("LAMB", 8), ("Muon", 7)]
)
def test_launches(emulation: cuda_emulation.Emulation, rule: str, want: int, count: int) -> None:
    """measure 1, combine 2, control 2, sweep 1; two sweeps and a sum between them where a rule
    needs norms, two where it needs matrices (their products are torch's)."""
    given = [torch.ones(3, 2) for _ in range(count)]
    device = there(make(rule, given, lr=0.1, clip_norm=1.0))
    assert launches(emulation, device, 0) == want
    assert launches(emulation, device, 1) == want


def test_without_a_norm_there_is_no_measure(emulation: cuda_emulation.Emulation) -> None:
    assert launches(emulation, there(make("AdamW", [torch.ones(3)], lr=0.1)), 0) == 3


def test_nothing_is_sent_where_nothing_changed() -> None:
    _, device = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1, clip_norm=1.0)
    give([device], 0)
    device.step()
    sent = device.native_table.num_uploads
    for _ in range(3):
        device.step()  # with the same gradients
    assert device.native_table.num_uploads == sent == 1
    device.param_groups[0]["lr"] = 0.2
    device.step()
    give([device], 1)
    device.step()
    assert device.native_table.num_uploads == 3


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lr", [torch.tensor(1, dtype=torch.int64), torch.tensor(0.1, dtype=torch.bfloat16)]
)
def test_a_learning_rate_of_another_dtype(lr: torch.Tensor) -> None:
    device = there(make("AdamW", [torch.ones(3)], lr=lr))
    give([device], 0)
    with pytest.raises(ValueError, match=r"lr: expected one float32 or float64 on cpu, got "):
        device.step()
    assert torch.equal(parameters_of(device)[0].detach(), torch.ones(3))


def test_a_parameter_elsewhere_is_refused_by_name() -> None:
    lost = Parameter(torch.ones(3, device="meta"))
    lost.grad = torch.ones(3, device="meta")
    here = Parameter(torch.ones(3))
    here.grad = torch.ones(3)
    device = there(tw.optim.AdamW([("here", here), ("lost", lost)]))
    with pytest.raises(
        NotImplementedError, match=r"parameter 'lost' is on meta, others are on cpu"
    ):
        device.step()


def test_nan_options_leave_everything_alone() -> None:
    _, device = pair("AdamW", [torch.ones(3)], lr=0.1)
    give([device], 0)
    device.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="expected a number for lr, got NaN"):
        device.step()
    assert torch.equal(parameters_of(device)[0].detach(), torch.ones(3))


def test_capturable_is_taken_on_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match=r"AdamW\(capturable=True\) is not built yet"):
        make("AdamW", [torch.ones(3)], capturable=True)
    monkeypatch.setattr(tw.optim.AdamW, "_device_type", "cpu")
    here = make("AdamW", [torch.ones(3)], capturable=True)
    step_all([here])
    assert isinstance(here.native_table, cuda.DeviceTables)


# --- graphs -------------------------------------------------------------------------------------


def test_a_capture_sends_all_and_what_comes_after_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay sends what the capture sent, whatever was sent in between."""
    here, device = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1, clip_norm=1.0)
    step_all([here, device], 1)
    give([here, device], 1)
    sent = []
    for is_capturing in (True, False, False):
        monkeypatch.setattr(cuda, "_is_capturing", lambda _, flag=is_capturing: flag)
        here.step()
        device.step()
        assert device.outcome.norm == here.outcome.norm
        sent.append(device.native_table.num_uploads)
    assert sent == [2, 3, 4]
    assert_same_bits(here, device)


def test_a_capture_without_a_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, device = pair("AdamW", [torch.ones(3)], lr=0.1)
    give([device], 0)
    monkeypatch.setattr(cuda, "_is_capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="expected a step outside of it before"):
        device.step()
    assert torch.equal(parameters_of(device)[0].detach(), torch.ones(3))
    monkeypatch.setattr(cuda, "_is_capturing", lambda _: False)
    device.step()
    monkeypatch.setattr(cuda, "_is_capturing", lambda _: True)
    device.step()
    with pytest.raises(RuntimeError, match="found none since the last capture"):
        device.step()


def test_numbers_of_a_captured_step_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    _, device = pair("AdamW", [torch.ones(3)], lr=0.1, clip_norm=1.0)
    for is_capturing in (False, True):
        monkeypatch.setattr(cuda, "_is_capturing", lambda _, flag=is_capturing: flag)
        give([device], 0)
        device.step()
    outcome = device.outcome
    norm = outcome.norm
    # What a replay would do: it writes to the same memory of the host.
    assert outcome.norm == norm and outcome._numbers is None


def test_outcomes_keep_their_numbers() -> None:
    here, device = pair("AdamW", tensors("AdamW", torch.float32), lr=0.1, clip_norm=1.0)
    taken = []
    for step in range(8):
        give([here, device], step)
        here.step()
        device.step()
        taken.append((here.outcome, device.outcome))
    assert all(mine.is_ready() and mine.norm == theirs.norm for theirs, mine in taken)
