"""Shards from Python: what is written is read back, and memory being saved is waited for."""

from __future__ import annotations

import copy
import errno
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tradewind as tw
from tradewind._core import native

BLOCK = 64 * 1024
HEADER = b"a header".ljust(4096)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def random_bytes(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def reference_crc32c(data: bytes) -> int:
    """Bit by bit, by RFC 3720's polynomial."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def save(
    path: Path, tensors: list[torch.Tensor], **options: Any
) -> tuple[native.ShardResult, list[int]]:
    """One shard of these tensors; where each one stands."""
    regions, offset = [], len(HEADER)
    for tensor in tensors:
        address, size = memory_of(tensor)
        regions.append((offset, address, size))
        offset += -(-size // 4096) * 4096
    writer = native.ShardWriter(num_threads=3)
    write = writer.start(native.posix_env(), str(path), HEADER, regions, BLOCK, **options)
    assert write.wait(timeout_s=60)
    result = write.result()
    writer.close()
    return result, [at for at, _, _ in regions]


def wait_for_waiter(closing: native.GateClosing) -> None:
    """Until somebody waits: needs the interpreter meanwhile, so the waiter must have let it go."""
    deadline = time.monotonic() + 60
    while closing.waited_s == 0.0:
        assert time.monotonic() < deadline, "nobody waits for the gate"
        time.sleep(0)


def while_closed(ranges: list[tuple[int, int]], call: Callable[[], object]) -> None:
    """Runs `call` on a thread; it must wait for `ranges`, and change nothing until they open."""
    closing = native.close_gate(ranges)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # shown by the test's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for_waiter(closing)
    finally:
        closing.open()
        thread.join()
    assert not failures, failures
    assert closing.held_bytes == 0


# --- files ----------------------------------------------------------------------------------------


def test_a_shard_holds_header_memory_and_zeros_and_its_sums(tmp_path: Path) -> None:
    tensors = [random_bytes(size, size) for size in (200_000, 1, 4096, 5000)]
    result, offsets = save(tmp_path / "shard", tensors)
    data = (tmp_path / "shard").read_bytes()
    expected = HEADER
    for tensor in tensors:
        expected += tensor.numpy().tobytes()
        expected += bytes(-len(expected) % 4096)
    assert data == expected
    assert result.size_bytes == len(expected)
    assert result.crc32c == reference_crc32c(expected)
    assert result.block_crc32c == b"".join(
        reference_crc32c(expected[begin : begin + BLOCK]).to_bytes(4, "little")
        for begin in range(0, len(expected), BLOCK)
    )
    assert offsets[0] == 4096


def read(path: Path, result: native.ShardResult, targets: Any, **options: Any) -> None:
    native.read_shard(
        native.posix_env(),
        str(path),
        result.size_bytes,
        BLOCK,
        result.block_crc32c,
        targets,
        **options,
    )


def test_what_was_written_is_read_where_it_is_wanted(tmp_path: Path) -> None:
    tensors = [random_bytes(300_000, 1), random_bytes(70_001, 2)]
    result, offsets = save(tmp_path / "shard", tensors)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    part = torch.zeros(1000, dtype=torch.uint8)
    targets = [
        (offset, size, address)
        for offset, (address, size) in zip(offsets, map(memory_of, copies), strict=True)
    ]
    targets.insert(0, (offsets[0] + 123, 1000, part.data_ptr()))
    read(tmp_path / "shard", result, targets)
    for tensor, copied in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copied)
    assert torch.equal(part, tensors[0][123:1123])


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    result, offsets = save(path, [random_bytes(300_000, 1)])
    good = path.read_bytes()
    part = torch.zeros(10, dtype=torch.uint8)
    wanted = [(offsets[0], 10, part.data_ptr())]
    place = 2 * BLOCK + 77
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    read(path, result, wanted)  # another block
    with pytest.raises(native.DamagedCheckpointError, match=rf"{path}.*block 2 .*{2 * BLOCK}"):
        read(path, result, wanted, verify_all=True)
    path.write_bytes(good[:-4096])
    with pytest.raises(native.DamagedCheckpointError, match=rf"{len(good)}.*{len(good) - 4096}"):
        read(path, result, wanted)


def test_errors_of_the_system_are_oserrors_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with pytest.raises(FileNotFoundError) as missing:
        save(path, [random_bytes(10, 1)], recycle=True)
    assert missing.value.filename == str(path)
    result, offsets = save(path, [random_bytes(10, 1)])
    with pytest.raises(FileExistsError):
        save(path, [random_bytes(10, 1)])
    lock = native.posix_env().lock_file(str(path), exclusive=True)
    assert lock is not None
    with lock, pytest.raises(BlockingIOError, match="overwrites"):
        read(path, result, [(offsets[0], 1, random_bytes(1, 1).data_ptr())])


def test_a_recycled_file_keeps_its_place_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    save(path, [random_bytes(500_000, 1)])
    inode = path.stat().st_ino
    tensor = random_bytes(1000, 2)
    result, _ = save(path, [tensor], recycle=True)
    assert path.read_bytes() == HEADER + tensor.numpy().tobytes() + bytes(4096 - 1000)
    assert path.stat().st_ino == inode
    assert result.size_bytes == 8192


def test_an_error_in_the_middle_opens_the_gate(tmp_path: Path) -> None:
    env = native.RecordingEnv(keep_data=False)
    env.inject(3, error=errno.ENOSPC)
    tensor = random_bytes(10 * BLOCK, 1)
    closing = native.close_gate([memory_of(tensor)])
    writer = native.ShardWriter()
    regions = [(4096, *memory_of(tensor))]
    write = writer.start(env, str(tmp_path / "shard"), HEADER, regions, BLOCK, closing=closing)
    assert write.wait(60)
    with pytest.raises(OSError, match="No space") as full:
        write.result()
    assert full.value.errno == errno.ENOSPC
    assert full.value.filename == str(tmp_path / "shard")
    assert closing.held_bytes == 0
    native.wait_for_gate(*memory_of(tensor), timeout_s=0)


def test_bad_values_are_named(tmp_path: Path) -> None:
    env, path = native.posix_env(), str(tmp_path / "shard")
    tensor = random_bytes(100, 1)
    address, size = memory_of(tensor)
    writer = native.ShardWriter(2)
    with pytest.raises(ValueError, match="whole pages of 4096 bytes, got 5 bytes"):
        writer.start(env, path, b"short", [], BLOCK)
    with pytest.raises(ValueError, match="next region at a multiple of 4096"):
        writer.start(env, path, HEADER, [(5000, address, size)], BLOCK)
    with pytest.raises(ValueError, match="four bytes for each block, got 3"):
        native.read_shard(env, path, 4096, BLOCK, b"abc", [])
    with pytest.raises(ValueError, match="targets within its 4096 bytes, got 100 bytes from 4000"):
        native.read_shard(env, path, 4096, BLOCK, b"abcd", [(4000, size, address)])
    with pytest.raises(ValueError, match="expected 1 to 64 threads, got 65"):
        native.ShardWriter(65)
    with pytest.raises(ValueError, match="zero or more bytes, got -1"):
        native.close_gate([(address, -1)])
    with pytest.raises(ValueError, match="NaN"):
        native.wait_for_gate(address, size, timeout_s=float("nan"))
    writer.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        writer.start(env, path, HEADER, [], BLOCK)
    assert not Path(path).exists()


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_native_handles_refuse_copies_by_name(tmp_path: Path, copier: Any) -> None:
    writer = native.ShardWriter(1)
    write = writer.start(native.posix_env(), str(tmp_path / "shard"), HEADER, [], BLOCK)
    handles = {"ShardWriter": writer, "ShardWrite": write, "GateClosing": native.close_gate([])}
    for name, handle in handles.items():
        with pytest.raises(TypeError, match=f"{name} is a native handle"):
            copier(handle)
    assert write.wait(60)


# --- the gate -------------------------------------------------------------------------------------


def test_a_wait_for_held_memory_ends_with_its_deadline_or_its_closing() -> None:
    tensor = random_bytes(100, 1)
    address, size = memory_of(tensor)
    closing = native.close_gate([(address, size)])
    assert closing.held_bytes == size
    with pytest.raises(RuntimeError, match=f"gate: expected {size} bytes .* within 0.01 s"):
        native.wait_for_gate(address, size, timeout_s=0.01)
    native.wait_for_gate(address + size, 10, timeout_s=0)
    del closing
    native.wait_for_gate(address, size, timeout_s=0)


RULES: list[tuple[str, Callable[[list[torch.Tensor]], Any]]] = [
    ("adamw", lambda p: tw.optim.AdamW(p, lr=0.1)),
    ("adamw 8bit", lambda p: tw.optim.AdamW(p, lr=0.1, state_dtype="8bit")),
    ("sgd", lambda p: tw.optim.SGD(p, lr=0.1, momentum=0.9)),
]


def stepped(make: Callable[[list[torch.Tensor]], Any]) -> tuple[list[torch.Tensor], Any]:
    """Parameters and an optimizer that has done one step, with the next step's gradients."""
    generator = torch.Generator().manual_seed(3)
    parameters = [
        torch.randn(shape, generator=generator).requires_grad_() for shape in ((300, 70), (5,))
    ]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if not optimizer.state:
            optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(("name", "make"), RULES)
def test_a_step_waits_without_the_interpreter_and_is_then_the_same(
    name: str, make: Callable[[list[torch.Tensor]], Any]
) -> None:
    expected, other = stepped(make)
    other.step()
    parameters, optimizer = stepped(make)
    while_closed(optimizer.native_table.memory_ranges(), optimizer.step)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert torch.equal(parameter, wanted), name
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, other.state[wanted][key]), (name, key)


@pytest.mark.parametrize(("name", "make"), RULES)
def test_a_tables_ranges_hold_its_states_and_no_step_counts(
    name: str, make: Callable[[list[torch.Tensor]], Any]
) -> None:
    parameters, optimizer = stepped(make)
    ranges = optimizer.native_table.memory_ranges()
    assert all(address % 4096 == 0 for address, _ in ranges)
    for parameter in parameters:
        for key, value in optimizer.state[parameter].items():
            address, size = memory_of(value)
            is_inside = any(a <= address and address + size <= a + s for a, s in ranges)
            assert is_inside == (key != "step"), (name, key)


def test_masters_and_states_that_are_set_wait_too() -> None:
    parameter = torch.ones(1000, dtype=torch.bfloat16).requires_grad_()
    optimizer = tw.optim.AdamW([parameter], lr=0.1, masters="fp32")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    table = optimizer.native_table
    assert isinstance(table, native.OptimizerTable)
    state = optimizer.state[parameter]
    values = torch.linspace(1, 2, 1000)
    while_closed([memory_of(state["exp_avg"])], lambda: table.set_state(0, 0, values))
    assert torch.equal(state["exp_avg"], values)
    while_closed([memory_of(state["master"])], lambda: table.set_master(0, values))
    assert torch.equal(state["master"], values)
    while_closed([memory_of(parameter)], lambda: table.set_master(0, 2 * values))
    assert torch.equal(parameter, (2 * values).bfloat16())
    # Somebody wrote to the parameter: the master takes it up, at the next step.
    with torch.no_grad():
        parameter.mul_(2)
    while_closed([memory_of(state["master"])], optimizer.step)


def test_parameters_with_gaps_are_written_back_only_when_they_may_be() -> None:
    whole = torch.ones(50, 4)
    parameter = whole[:, ::2].detach().requires_grad_()
    optimizer = tw.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones_like(parameter)
    while_closed([memory_of(whole)], optimizer.step)
    assert torch.equal(whole, torch.tensor([0.5, 1.0, 0.5, 1.0]).expand(50, 4))


def test_an_arenas_ranges_hold_its_parameters_which_come_home_only_when_they_may() -> None:
    parameters = [torch.nn.Parameter(torch.randn(100, 3)), torch.nn.Parameter(torch.randn(7))]
    arena = native.ParameterArena(list(parameters), ["a", "b"])
    ranges = arena.memory_ranges()
    assert sum(size for _, size in ranges) == arena.size_bytes
    for parameter in parameters:
        address, size = memory_of(parameter)
        assert any(a <= address and address + size <= a + s for a, s in ranges)
    home = parameters[0].data
    parameters[0].data = torch.full((100, 3), 4.0)
    while_closed(ranges, arena.bring_home)
    assert parameters[0].data_ptr() == home.data_ptr()
    assert torch.equal(home, torch.full((100, 3), 4.0))


def test_a_save_beside_a_step_holds_what_was_there_before(tmp_path: Path) -> None:
    parameters, optimizer = stepped(RULES[0][1])
    state = optimizer.state[parameters[0]]
    before = state["exp_avg"].clone()
    ranges = optimizer.native_table.memory_ranges()
    closing = native.close_gate(ranges)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    wait_for_waiter(closing)
    result, offsets = save(tmp_path / "shard", [state["exp_avg"]], closing=closing)
    thread.join()
    assert not torch.equal(state["exp_avg"], before)
    saved = torch.zeros_like(before)
    read(tmp_path / "shard", result, [(offsets[0], memory_of(saved)[1], saved.data_ptr())])
    assert torch.equal(saved, before)
