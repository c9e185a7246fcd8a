"""Parameters come to live in the arena, and nobody notices."""

from __future__ import annotations

import copy
import io
import os

import pytest
import torch
from engine.models import Tied, batches, bits, small_net
from safetensors.torch import load_file, save_file
from torch import nn

import tradewind as tw
from tradewind._core import native


def adopt(model: nn.Module, **options: object) -> tw.Engine:
    return tw.Engine(model, tw.SGD(lr=0.1), **options)


def facts_of(p: torch.Tensor) -> tuple[object, ...]:
    return (p.shape, p.stride(), p.dtype, p.requires_grad)


@pytest.mark.parametrize("make", [small_net, Tied], ids=["conv", "tied"])
def test_the_module_stays_what_it_was(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    objects = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = {name: (id(b), b.data_ptr()) for name, b in model.named_buffers()}
    facts = {name: facts_of(p) for name, p in model.named_parameters()}
    before = bits(model)
    with adopt(model):
        assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == objects
        assert {name: (id(b), b.data_ptr()) for name, b in model.named_buffers()} == buffers
        assert bits(model) == before
        for name, p in model.named_parameters():
            assert facts_of(p) == facts[name]


def test_slots_are_aligned_and_lie_in_one_arena() -> None:
    model = small_net()
    with adopt(model) as engine:
        arena = engine._adopted.arena
        addresses = [p.data_ptr() for p in model.parameters()]
        slots = arena.layout.slots
        base = addresses[0] - slots[0].offset_bytes
        assert base % 4096 == 0
        assert [base + slot.offset_bytes for slot in slots] == addresses
        assert all(address % 64 == 0 for address in addresses)
        assert [slot.name for slot in slots] == [name for name, _ in model.named_parameters()]


def test_each_parameter_has_storage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    with adopt(model):
        file = io.BytesIO()
        torch.save(model[0].bias, file)
        assert len(file.getvalue()) < 4096  # one bias, not the arena
        assert model[0].bias.untyped_storage().nbytes() == 400
        file.seek(0)
        torch.testing.assert_close(torch.load(file), model[0].bias)


def test_deepcopy_and_safetensors_work(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = small_net()
    with adopt(model):
        twin = copy.deepcopy(model)
        assert bits(twin) == bits(model)
        assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
        save_file(model.state_dict(), tmp_path / "m.safetensors")
        assert load_file(tmp_path / "m.safetensors").keys() == model.state_dict().keys()


def test_parameters_outlive_the_engine() -> None:
    model = small_net()
    engine = adopt(model)
    expected = bits(model)
    engine.close()
    del engine
    assert bits(model) == expected
    model.double()


def test_channels_last_parameters_keep_their_memory_format() -> None:
    model = small_net().to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with adopt(model) as engine:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        for x, y in batches(2):
            engine.step(nn.functional.cross_entropy(engine(x), y))
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(x), y).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_tied_weights_get_one_slot_and_one_update() -> None:
    model = Tied()
    twin = copy.deepcopy(model)
    indices = torch.tensor([[1, 2, 3]])
    with adopt(model) as engine:
        assert model.head.weight is model.embed.weight
        engine.step(engine(indices).square().mean())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(indices).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.embed.weight, twin.embed.weight)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.frozen, twin.frozen)


def test_unfreezing_later_is_seen() -> None:
    model = Tied()
    with adopt(model) as engine:
        model.frozen.requires_grad_(True)
        before = model.frozen.detach().clone()
        engine.step(model.frozen.sum())
        torch.testing.assert_close(model.frozen, before - 0.1)


# --- memory that leaves the arena -----------------------------------------------------------------


def in_arena(engine: tw.Engine) -> bool:
    homes = engine._adopted.arena.bring_home()
    return homes == []


def one_step(engine: tw.Engine) -> None:
    x, y = batches(1)[0]
    engine.step(nn.functional.cross_entropy(engine(x), y))


def test_load_state_dict_writes_into_the_arena() -> None:
    model = small_net(0)
    with adopt(model) as engine:
        address = model[0].weight.data_ptr()
        model.load_state_dict(small_net(1).state_dict())
        assert model[0].weight.data_ptr() == address
        one_step(engine)


def test_assigned_state_dicts_are_copied_back_in() -> None:
    model, other = small_net(0), small_net(1)
    reference = copy.deepcopy(other)
    with adopt(model) as engine:
        objects = [id(p) for p in model.parameters()]
        model.load_state_dict(other.state_dict(), assign=True)
        assert [id(p) for p in model.parameters()] != objects
        with pytest.warns(UserWarning, match=r"replaced \(load_state_dict\(assign=True\)\?\)"):
            one_step(engine)
        assert [id(p) for p in model.parameters()] == objects and in_arena(engine)
    with adopt(reference) as engine:
        one_step(engine)
    assert bits(model) == bits(reference)


def test_replaced_data_is_copied_back_in_and_noted_once(recwarn) -> None:  # type: ignore[no-untyped-def]
    model, twin = small_net(), small_net()
    with adopt(model) as engine, adopt(twin) as reference:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            one_step(engine)
            one_step(reference)
        assert in_arena(engine)
    assert bits(model) == bits(twin)
    notes = [w for w in recwarn if "given other memory" in str(w.message)]
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: m.half(), "float16"),
        (lambda m: m.double(), "float64"),
        (lambda m: setattr(m[4], "weight", nn.Parameter(torch.zeros(10, 4))), r"\(10, 4\)"),
    ],
    ids=["half", "double", "resized"],
)
def test_changes_that_cannot_be_undone_are_errors(change, found: str) -> None:  # type: ignore[no-untyped-def]
    model = small_net()
    engine = adopt(model)
    one_step(engine)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    change(model)
    before = bits(model)
    with pytest.raises(RuntimeError, match=rf"parameter '\d\.weight'.*adopted.*found.*{found}"):
        engine._adopted.bring_home()
    assert bits(model) == before
    engine.close()


# --- refusals: by name, the model left as it was --------------------------------------------------


class Odd(nn.Module):
    def __init__(self, odd: torch.Tensor) -> None:
        super().__init__()
        self.fine = nn.Linear(3, 3)
        self.odd = odd if isinstance(odd, nn.Parameter) else nn.Parameter(odd, requires_grad=False)


def refused(model: nn.Module, error: type[Exception], message: str) -> None:
    addresses = [p.data_ptr() for p in model.parameters() if not p.is_meta and not p.is_sparse]
    with pytest.raises(error, match=message):
        adopt(model)
    after = [p.data_ptr() for p in model.parameters() if not p.is_meta and not p.is_sparse]
    assert after == addresses


def test_meta_parameters_are_refused() -> None:
    model = Odd(torch.empty(3, device="meta"))
    refused(model, TypeError, "'odd'.*meta device.*materialize")


def test_lazy_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"'1\.weight'.*lazy.*run one batch"):
        adopt(model)


def test_sparse_parameters_are_refused() -> None:
    model = Odd(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"'odd'.*layout torch\.sparse_coo"):
        adopt(model)


def test_tensor_subclasses_are_refused() -> None:
    class Wrapped(torch.Tensor):
        pass

    model = Odd(torch.zeros(1))
    del model.odd
    odd = nn.Parameter(torch.randn(3).as_subclass(Wrapped))
    model.odd = odd
    refused(model, TypeError, "'odd'.*Wrapped.*tensor subclass")


def test_dtensors_are_refused() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = Odd(torch.zeros(1))
        model.odd = nn.Parameter(distribute_tensor(torch.randn(4), mesh))
        with pytest.raises(TypeError, match=r"'odd'.*DTensor"):
            adopt(model)
    finally:
        distributed.destroy_process_group()


def test_flat_parameters_of_fsdp_are_refused() -> None:
    class FlatParameter(nn.Parameter):
        pass

    model = Odd(torch.zeros(1))
    model.odd = FlatParameter(torch.zeros(3))
    refused(model, TypeError, "'odd'.*FSDP's flat parameter")


def test_mixed_devices_are_refused() -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda:0")  # no GPU needed to be somewhere else

    model = Odd(Elsewhere(torch.zeros(3), requires_grad=False))
    refused(model, ValueError, r"'fine\.weight': is on cpu, but 'odd' is on cuda:0.*one device")


def test_dtypes_without_an_arena_are_refused() -> None:
    model = Odd(torch.zeros(3).to(torch.float8_e4m3fn))
    refused(model, TypeError, "'odd'.*arena cannot hold")


def test_shared_and_gappy_memory_is_refused() -> None:
    whole = torch.randn(4, 4)
    model = Odd(nn.Parameter(whole[0]))
    model.twin = nn.Parameter(whole[0])
    refused(model, ValueError, "'odd' and 'twin' share memory")
    refused(Odd(nn.Parameter(whole[:, :2])), ValueError, "'odd'.*dense.*contiguous")


def test_one_parameter_in_two_engines_is_refused() -> None:
    model = small_net()
    with adopt(model), pytest.raises(ValueError, match=r"'0\.weight': is in another Engine"):
        adopt(nn.Sequential(model, nn.Linear(2, 2))[0])
    adopt(model).close()


def test_an_engine_that_was_dropped_holds_nothing() -> None:
    model = small_net()
    engine = adopt(model)
    one_step(engine)
    del engine
    with adopt(model) as engine:
        one_step(engine)


def test_empty_and_frozen_parameters_are_welcome() -> None:
    model = Odd(torch.zeros(0, 5))
    model.count = nn.Parameter(torch.arange(3), requires_grad=False)
    with adopt(model) as engine:
        engine.step(engine.model.fine(torch.randn(2, 3)).mean())
        assert model.count.tolist() == [0, 1, 2] and model.odd.shape == (0, 5)


# --- processes and handles ------------------------------------------------------------------------


def test_children_read_parameters_and_leave_them_alone() -> None:
    model = small_net()
    with adopt(model) as engine:
        one_step(engine)
        expected = bits(model)
        child = os.fork()
        if child == 0:
            ok = bits(model) == expected
            engine.close()
            model[0].weight.data.zero_()
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bits(model) == expected
        one_step(engine)


def test_native_handles_refuse_to_be_copied() -> None:
    with adopt(small_net()) as engine:
        for copied in (lambda: copy.deepcopy(engine._adopted.arena), lambda: copy.deepcopy(engine)):
            with pytest.raises(TypeError, match=r"(ParameterArena|Engine).*state_dict"):
                copied()


def test_layout_is_the_same_for_the_same_model() -> None:
    with adopt(small_net(0)) as first, adopt(small_net(1)) as second:
        assert first._adopted.arena.layout.digest == second._adopted.arena.layout.digest
    with adopt(nn.Linear(2, 2)) as other:
        assert other._adopted.arena.layout.digest != first._adopted.arena.layout.digest
    specs = [("a", [2, 3], "float32"), ("b", [5], "float64")]
    assert native.Layout(specs).digest == native.Layout(specs).digest
