"""States as trees: every value comes back as what it was; what cannot is refused by its path."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.checkpoint.errors import DamagedCheckpointError
from tradewind.checkpoint.tree import Flat, PartialTensor, PerRank, flatten, rebuild


def through_json(flat: Flat) -> Any:
    """The state that comes back from a file, as far as JSON is concerned."""
    text = json.dumps([flat.tree, flat.own_tree], allow_nan=False)
    tree, own_tree = json.loads(text.encode("ascii").decode("utf-8"))
    return rebuild(tree, {**flat.tensors, **flat.own_tensors}, own_tree)


def round_trip(state: Any, rank: int = 0) -> Any:
    return through_json(flatten(state, rank))


def assert_same(first: Any, second: Any) -> None:
    """Equal, of the same kinds, to the bit."""
    assert type(first) is type(second), (first, second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and first.shape == second.shape
        assert bits(first) == bits(second)
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype and first.shape == second.shape
        assert first.tobytes() == second.tobytes()
    elif isinstance(first, dict):
        assert len(first) == len(second)
        for (key, value), (key_there, value_there) in zip(
            first.items(), second.items(), strict=True
        ):
            assert_same(key, key_there)
            assert_same(value, value_there)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for value, value_there in zip(first, second, strict=True):
            assert_same(value, value_there)
    elif isinstance(first, float):
        assert struct.pack("d", first) == struct.pack("d", second)
    elif isinstance(first, complex):
        assert_same((first.real, first.imag), (second.real, second.imag))
    elif isinstance(first, PerRank):
        assert first.is_known == second.is_known
        assert_same(first.value, second.value)
    else:
        assert first == second


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes()


def nan_of(bit_pattern: int) -> float:
    value: float = struct.unpack(">d", bit_pattern.to_bytes(8, "big"))[0]
    return value


any_text = st.text(st.characters(codec=None, exclude_categories=())) | st.text(max_size=3)
numbers = (
    st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.booleans()
)
scalars = st.none() | numbers | any_text | st.binary(max_size=9) | st.complex_numbers()
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2]
)
tensors = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=dtype),
    dtypes,
    st.lists(st.integers(0, 3), max_size=3),
)
key_scalars = (
    st.none() | st.booleans() | st.integers() | any_text | st.binary(max_size=3) | st.floats()
)
keys = key_scalars | st.tuples(key_scalars, key_scalars) | st.just(())
ascii_keys = st.text("$ab.~_", max_size=3)
states = st.recursive(
    scalars | tensors | dtypes | st.builds(PerRank, scalars),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(ascii_keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=2).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(states)
def test_every_state_comes_back(state: Any) -> None:
    flat = flatten(state)
    assert_same(through_json(flat), state)
    for name in (*flat.tensors, *flat.own_tensors):
        name.encode("utf-8")  # names of safetensors
        assert name and not name.startswith(("__pad__", "__metadata__"))


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 2**53 - 1, 2**53, -(2**53), 2**64),
        *(0.0, -0.0, 1.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf),
        *(nan_of(0x7FF8 << 48), nan_of(0xFFF8 << 48), nan_of((0x7FF8 << 48) + 77)),
        *(complex(-0.0, math.nan), complex(1, -0.0), complex(math.inf, -math.inf)),
        *(True, False, None, "", "$", "\x00\n", "é漢🌬", "\ud800", "a\udfff", b"", b"\x00\xff"),
        *([], (), {}, ((),), [[]], [1.0, math.nan], [2**60, 1], (1.5, math.inf), [True, 1]),
        *(torch.float32, torch.float8_e4m3fn, torch.complex128, torch.Size([]), torch.Size([2, 0])),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_values_of_all_kinds(value: Any) -> None:
    assert_same(round_trip(value), value)
    assert_same(round_trip({"a": [value]}), {"a": [value]})


def test_integers_of_any_size() -> None:
    state = [10**5000, -(10**5000)]
    assert round_trip(state) == state


def test_keys_keep_their_kind_and_order() -> None:
    state = {
        "1": "text",
        1: "one",
        (1, "a"): "pair",
        ("1", "a"): "another",
        2.5: "half",
        None: "none",
        b"1": "bytes",
        False: "no",
        torch.int8: "dtype",
        (1, (2, ())): "nested",
        "$": "mark",
    }
    back = round_trip(state)
    assert_same(back, state)
    assert list(back) == list(state)
    assert_same(round_trip({True: 1}), {True: 1})
    assert_same(round_trip({np.int64(3): 1}), {3: 1})


@pytest.mark.parametrize("kind", ["tensor", "dict", "no such kind", 7, None])
def test_a_dict_that_looks_like_a_marker_is_a_dict(kind: Any) -> None:
    state = {"$": kind, "name": "w", "items": [[1, 2]]}
    assert_same(round_trip({"w": state}), {"w": state})


def test_counters_and_ordered_dicts() -> None:
    state = {
        "milestones": collections.Counter({30: 1, 80: 2}),
        "ordered": collections.OrderedDict([("b", 1), ("a", {"$": 2})]),
    }
    assert_same(round_trip(state), state)


def test_modules_and_optimizers_are_read_through_their_state_dicts() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    flat = flatten({"model": model, "optimizer": optimizer})
    assert "model.0.weight" in flat.tensors and "optimizer.state.3.exp_avg" in flat.tensors
    weight = flat.tensors["model.0.weight"]
    assert isinstance(weight, torch.Tensor)
    assert weight.data_ptr() == model[0].weight.data_ptr() and not weight.requires_grad
    back = through_json(flat)
    assert_same(back["model"], model.state_dict())
    assert back["model"]._metadata == model.state_dict()._metadata
    assert_same(back["optimizer"], optimizer.state_dict())
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])


def schedulers() -> list[Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    of = torch.optim.lr_scheduler
    plain = of.StepLR(optimizer, 3)
    return [
        plain,
        of.LambdaLR(optimizer, lambda step: 1.0),
        of.MultiStepLR(optimizer, [3, 5, 5]),
        of.ConstantLR(optimizer),
        of.LinearLR(optimizer),
        of.ExponentialLR(optimizer, 0.9),
        of.CosineAnnealingLR(optimizer, 10),
        of.CosineAnnealingWarmRestarts(optimizer, 10),
        of.CyclicLR(optimizer, 0.1, 0.2),
        of.OneCycleLR(optimizer, 0.1, total_steps=9),
        of.PolynomialLR(optimizer),
        of.ReduceLROnPlateau(optimizer),
        of.SequentialLR(optimizer, [of.ConstantLR(optimizer), of.LinearLR(optimizer)], [2]),
    ]


def test_torchs_schedules_come_back() -> None:
    for scheduler in schedulers():
        assert_same(round_trip({"schedule": scheduler})["schedule"], scheduler.state_dict())


def test_random_states_come_back() -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "torch": PerRank(torch.get_rng_state()),
    }
    back = round_trip(state)
    assert_same(back, state)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    np.random.default_rng().bit_generator.state = back["generator"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(8.0)[::2],
        torch.zeros(2, 1).expand(2, 3),
        torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1.5]).to(torch.float8_e4m3fn),
        torch.zeros(2, dtype=torch.uint64),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Buffer(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_of_all_kinds_keep_their_memory(tensor: torch.Tensor) -> None:
    flat = flatten({"t": [tensor]})
    (stored,) = flat.tensors.values()
    assert isinstance(stored, torch.Tensor) and not stored.requires_grad
    assert stored.data_ptr() == tensor.data_ptr() and stored.stride() == tensor.stride()
    assert list(flat.tensors) == ["t.0"]
    assert through_json(flat)["t"][0] is stored


@pytest.mark.parametrize("dtype", "bool int8 uint16 uint64 float16 float64 complex64".split())
def test_arrays_come_back_as_arrays(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    flat = flatten({"a": array, "t": torch.zeros(1)})
    stored = flat.tensors["a"]
    assert isinstance(stored, torch.Tensor) and stored.data_ptr() == array.ctypes.data
    assert_same(through_json(flat)["a"], array)


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    state = {"reversed": np.arange(4)[::-1], "frozen": frozen, "scalar": np.array(2.5)}
    assert_same(round_trip(state), state)


def test_numpy_scalars_are_numbers() -> None:
    scalars = {
        "f": np.float32(0.1),
        "d": np.float64(0.1),
        "i": np.int8(-3),
        "u": np.uint64(2**64 - 1),
        "b": np.bool_(True),
        "c": np.complex64(1j),
        "s": np.str_("x"),
    }
    expected = {"f": float(np.float32(0.1)), "d": 0.1, "i": -3, "u": 2**64 - 1, "b": True}
    assert_same(round_trip(scalars), {**expected, "c": 1j, "s": "x"})


def test_names_are_paths_and_never_collide() -> None:
    one = torch.ones(1)
    state = {
        "a": {"b": one * 1, "__pad__0": one * 9},
        "a.b": one * 2,
        1: one * 3,
        "1": one * 4,
        "~0.x.y": one * 5,
        "__pad__0": one * 6,
        "__metadata__": one * 7,
        "": one * 8,
        "~~": one * 10,
        "\ud800": one * 11,
        "x": PerRank({"y": one * 12, "z": [one * 13]}),
    }
    flat = flatten(state)
    assert list(flat.tensors) == [
        *("a.b", "a.__pad__0", "a.b~1", "1", "1~1", "~~~0.x.y", "~~__pad__0", "~~__metadata__"),
        *("~~", "~~~~", "?"),
    ]
    assert list(flat.own_tensors) == ["~0.x.y", "~0.x.z.0"]
    assert not set(flat.tensors) & set(flat.own_tensors)
    assert_same(through_json(flat), state)


@settings(max_examples=100, deadline=None)
@given(states, st.integers(0, 20), st.integers(0, 20))
def test_ranks_name_what_is_alike_alike_and_their_own_apart(
    state: Any, rank: int, other: int
) -> None:
    def on(which: int) -> Flat:
        extra = [torch.zeros(1)] * (which % 3)  # ranks differ in what they have alone
        return flatten([PerRank({"e": extra, "t": torch.zeros(1)}), state, torch.zeros(1)], which)

    first, second = on(rank), on(other)
    assert first.tree == second.tree and list(first.tensors) == list(second.tensors)
    assert rank == other or not set(first.own_tensors) & set(second.own_tensors)
    assert not set(first.own_tensors) & set(second.tensors)


def test_what_a_rank_did_not_have_is_unknown() -> None:
    flat = flatten({"rng": PerRank([1, 2]), "step": 3})
    assert rebuild(flat.tree, {}, None) == {"rng": PerRank(None, is_known=False), "step": 3}
    assert flatten({"step": 3}).own_tree is None


def test_parts_of_a_logical_tensor() -> None:
    memory = torch.arange(5.0)
    part = PartialTensor((4, 3), torch.float32, [(2, memory[:3]), (9, memory[3:])])
    assert part.numel() == 12 and "2+3, 9+2" in repr(part)
    flat = flatten({"w": part})
    assert flat.tensors == {"w": part}
    assert rebuild(flat.tree, {"w": "whatever stands for it"}) == {"w": "whatever stands for it"}


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ([(0, torch.zeros(13))], ValueError, "within 12 elements"),
        ([(4, torch.zeros(2)), (5, torch.zeros(1))], ValueError, "part at 5"),
        ([(-1, torch.zeros(1))], ValueError, "part at -1"),
        ([(0, torch.zeros(2, 2))], TypeError, "flat contiguous"),
        ([(0, torch.zeros(4)[::2])], TypeError, "flat contiguous"),
        ([(0, torch.zeros(2, dtype=torch.float64))], TypeError, "float64"),
    ],
)
def test_parts_that_are_none(parts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="PartialTensor: ") as caught:
        PartialTensor((4, 3), torch.float32, parts)
    assert words in str(caught.value)


def test_parts_need_a_dtype_with_a_name() -> None:
    with pytest.raises(TypeError, match=r"complex128.*view_as_real"):
        PartialTensor((4,), torch.complex128, [])


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    pass


@dataclasses.dataclass
class Point:
    x: int = 0


Pair = collections.namedtuple("Pair", "a b")


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Colour.RED, "got Colour; give its .value or .name"),
        (Level.HIGH, "got Level; give its .value or .name"),
        (Name("x"), "got Name; give str(...)"),
        (Point(), "got Point; give dataclasses.asdict(...)"),
        (Pair(1, 2), "got Pair; give tuple(...)"),
        ({1, 2}, "got set; give sorted(...)"),
        (collections.defaultdict(int), "got defaultdict; give dict(...)"),
        (collections.deque(), "got deque"),
        (bytearray(b"x"), "got bytearray; give bytes(...)"),
        (torch.Generator(), "got Generator; give its get_state()"),
        (torch.device("cpu"), "got device; give str(...)"),
        (lambda: None, "got function"),
        (torch.nn.Linear, "got type"),
        (object(), "got object"),
        (np.datetime64("2020-01-01"), "got datetime64"),
        (np.longdouble(1), "got longdouble; give a number of Python"),
        (np.array(["a"]), "array of <U1"),
        (np.zeros(2, ">f4"), "array of >f4"),
        (np.zeros(2, object), "array of object"),
        (np.ma.masked_array([1]), "got MaskedArray; give numpy.asarray(...)"),
        (np.zeros(2, np.complex128), "complex128"),
        (PerRank([PerRank(1)]), "PerRank in PerRank"),
        (PerRank(PartialTensor((1,), torch.int8, [])), "PartialTensor in PerRank"),
        ({(1, frozenset()): 1}, "key frozenset()"),
        ({Colour.RED: 1}, "key <Colour"),
        (Stateful([1]), "state_dict() of Stateful: expected a dict, got list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_values_are_refused_by_path(value: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        flatten({"outer": [0, value]})
    assert "state['outer'][1]" in str(caught.value) and words in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), "a tensor on meta"),
        (lambda: torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
            "a quantized tensor",
        ),
        (lambda: torch.zeros(2, dtype=torch.complex128), "give torch.view_as_real"),
        (lambda: torch.zeros(2, dtype=torch.float8_e8m0fnu), "give a view as torch.uint8"),
        (torch.nn.parameter.UninitializedParameter, "of class UninitializedParameter"),
        (lambda: torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})), "of class Mine"),
    ],
)
def test_tensors_without_elements_of_their_own_are_refused_by_path(make: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        flatten({"outer": [0, make()]})
    assert "state['outer'][1]: a " in str(caught.value) and words in str(caught.value)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"state\['n'\]: a (nested tensor|tensor of class Nested)"):
        flatten({"n": nested})


def test_distributed_tensors_are_refused() -> None:
    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self

    with pytest.raises(TypeError, match=r"PartialTensor\(shape, dtype"):
        flatten({"w": torch.zeros(2).as_subclass(Sharded)})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    with pytest.raises(ValueError, match=r"state\['self'\]\[0\].*contain itself"):
        flatten(state)
    deep: Any = 1
    for _ in range(60):
        deep = (deep,)
    assert_same(round_trip(deep), deep)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"$": "pickle"}, "a kind of this version"),
        ({"$": ["tensor"]}, "a kind of this version"),
        ({"$": "tensor"}, "members name of tensor"),
        ({"$": "tensor", "name": "w", "more": 1}, "members name of tensor"),
        ({"$": "tensor", "name": 1}, "a text"),
        ({"$": "tensor", "name": "gone"}, "a tensor of the manifest"),
        ({"$": "array", "name": "bf16"}, "numpy has a type for"),
        ({"$": "tuple", "items": {}}, "a list"),
        ({"$": "dict", "items": [[1]]}, "[key, value]"),
        ({"$": "dict", "items": [[1, 2], [1, 3]]}, "every key once"),
        ({"$": "dict", "items": [[[1], 2]]}, "a key"),
        ({"$": "dict", "items": [[{"$": "tensor", "name": "w"}, 2]]}, "a key"),
        ({"$": "size", "items": [-1]}, "sizes"),
        ({"$": "size", "items": [2**63]}, "sizes"),
        ({"$": "size", "items": [1.0]}, "sizes"),
        ({"$": "int", "hex": "0x1"}, "beyond 2**53"),
        ({"$": "int", "hex": "1" * 5000}, "hexadecimal"),
        ({"$": "int", "hex": "0x" + "_" * 20}, "hexadecimal"),
        ({"$": "float", "bits": "7ff8"}, "16 hexadecimal"),
        ({"$": "float", "bits": "zz"}, "hexadecimal"),
        ({"$": "complex", "items": [1.0]}, "two numbers"),
        ({"$": "complex", "items": [1, 2]}, "two numbers"),
        ({"$": "bytes", "base64": "a"}, "base64"),
        ({"$": "bytes", "base64": "é"}, "base64"),
        ({"$": "str", "base64": "/w=="}, "UTF-8"),
        ({"$": "dtype", "name": "nn"}, "a dtype"),
        ({"$": "counter", "items": [[1, 2, 3]]}, "[key, value]"),
        (2**60, "within 2**53"),
    ],
)
def test_trees_that_flatten_never_wrote_are_damage(tree: Any, words: str) -> None:
    tensors = {"w": torch.zeros(1), "bf16": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(DamagedCheckpointError, match=r"file: tree\['a'\]\[0\]") as caught:
        rebuild({"a": [tree]}, tensors, where="file")
    assert words in str(caught.value)


def test_a_bottomless_tree_is_damage() -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(DamagedCheckpointError, match="too deep"):
        rebuild(tree, {})
    while isinstance(tree, list):  # freed from the outside in, without recursion
        tree = tree.pop()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("$ name items base64 hex bits a".split()), inner)
        | st.builds(
            lambda kind, name, value: {"$": kind, name: value},
            st.sampled_from(
                "tensor array per_rank dict ordered_dict counter tuple size int float complex str "
                "bytes dtype".split()
            ),
            st.sampled_from("name items base64 hex bits".split()),
            inner,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_any_json_is_a_state_or_damage(tree: Any) -> None:
    try:
        rebuild(tree, {"w": torch.zeros(1)}, {"a": tree})
    except DamagedCheckpointError as error:
        assert "checkpoint: tree" in str(error)
