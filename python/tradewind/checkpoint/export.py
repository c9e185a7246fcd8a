"""Checkpoints as files for other tools: one safetensors file, or one for `torch.load`. A file is
whole when it is there: it is written beside its place, synced and moved."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from tradewind.checkpoint.dtypes import DTYPE_OF
from tradewind.checkpoint.errors import NoSuchCheckpointError
from tradewind.checkpoint.manifest import Manifest
from tradewind.checkpoint.outline import of_all_ranks
from tradewind.checkpoint.restoring import CommitReader
from tradewind.checkpoint.safetensors_header import compose
from tradewind.checkpoint.targets import Fill
from tradewind.checkpoint.window import BUFFER_BYTES, Window, grouped

Format = Literal["safetensors", "torch"]


@dataclass(frozen=True)
class Exported:
    """`path`: the file; `num_tensors` in it; `size_bytes` of it."""

    path: Path
    num_tensors: int
    size_bytes: int


def export(
    reader: CommitReader,
    path: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    only: str = "",
    replaces: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> Exported:
    """Write a commit, every block of which is checked on the way, as one file at `path`.

    Args:
        format: "safetensors": tensors by name, whole ones of their shapes, through `buffer_bytes`
            of memory. "torch": for `torch.load(path, weights_only=True)`, through memory for all of
            it: the state as it was saved, with tensors in place of numpy arrays and, in place of
            each rank's own values, a list of those of all ranks.
        only: tensors whose names begin like this, without that beginning; "model." gives what
            `model.load_state_dict` takes, where the state had it as "model". With "torch", too,
            these are names and tensors alone.
        replaces: whether a file at `path` is replaced.

    Raises:
        FileExistsError: there is something at `path`, and it is not to be replaced.
        NoSuchCheckpointError: no tensor has such a name.
        DamagedCheckpointError, OSError: the commit cannot be read, or the file not be written;
            nothing is left of it.
    """
    target = Path(path)
    names = _selected(reader.manifest, only)
    with _appears_whole(target, replaces) as file:
        if format == "torch":
            tree = _flat(reader, names) if only else _nested(reader)
            torch.save(tree, file)
        else:
            _write_safetensors(reader, names, file, buffer_bytes)
    return Exported(target, len(names), target.stat().st_size)


def _selected(manifest: Manifest, only: str) -> dict[str, str]:
    """The names of the tensors that are wanted: in the commit, to in the file."""
    names = {name: name[len(only) :] for name in manifest.tensors if name.startswith(only)}
    names = {name: given for name, given in names.items() if given}
    if only and not names:
        there = ", ".join(sorted({name.partition(".")[0] + "." for name in manifest.tensors})[:8])
        raise NoSuchCheckpointError(
            f"checkpoint of step {manifest.step}: expected tensors whose names begin with "
            f"{only!r}, found none; names begin with {there or 'nothing: it has no tensors'}"
        )
    return names


# --- safetensors ----------------------------------------------------------------------------------


def _write_safetensors(
    reader: CommitReader, names: Mapping[str, str], file: BinaryIO, buffer_bytes: int
) -> None:
    tensors = reader.manifest.tensors
    # The largest elements first, as the library has it: every tensor lies at a multiple of its own.
    ordered = sorted(names, key=lambda name: (-DTYPE_OF[tensors[name].dtype].itemsize, names[name]))
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    end = 0
    for name in ordered:
        entry = tensors[name]
        begin, end = end, end + _num_bytes(reader.manifest, name)
        entries.append((names[name], entry.dtype, entry.shape, begin, end))
    file.write(compose(entries, {"format": "pt", "step": str(reader.manifest.step)}))
    window = Window(reader, buffer_bytes)
    for group in grouped(reader, ordered, buffer_bytes):
        for values in window.read(group):
            file.write(values.view(torch.uint8).numpy().data)


def _num_bytes(manifest: Manifest, name: str) -> int:
    entry = manifest.tensors[name]
    return sum(piece.count for piece in entry.pieces) * DTYPE_OF[entry.dtype].itemsize


# --- torch ----------------------------------------------------------------------------------------


def _flat(reader: CommitReader, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    give = _read_all(reader, list(names))
    return {names[name]: give(name) for name in names}


def _nested(reader: CommitReader) -> Any:
    give = _read_all(reader, list(reader.manifest.tensors))
    num_ranks = max(1, len(reader.manifest.per_rank))
    views = [reader.saved(rank) for rank in range(num_ranks)]
    return of_all_ranks(views, lambda stored: give(stored.name))


def _read_all(reader: CommitReader, names: list[str]) -> Callable[[str], torch.Tensor]:
    """Tensors of these names, by name. Those that are stored once share their memory."""
    tensors = reader.manifest.tensors
    memory: dict[Any, torch.Tensor] = {}
    key_of: dict[str, Any] = {}
    fills: list[Fill] = []
    for name in names:
        entry = tensors[name]
        places = tuple((piece.file, piece.offset_bytes, piece.count) for piece in entry.pieces)
        key_of[name] = key = (entry.dtype, entry.shape, places) if places else name
        if key not in memory:
            memory[key] = torch.empty(entry.shape, dtype=DTYPE_OF[entry.dtype])
            fills.append(Fill(name, 0, memory[key]))
    reader.read(fills)
    return lambda name: memory[key_of[name]]


# --- the file -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _appears_whole(target: Path, replaces: bool) -> Iterator[BinaryIO]:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected the path of a file", str(target))
    if not replaces and os.path.lexists(target):
        raise _there_already(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.replace(temporary, target)
        else:
            _move_if_free(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no such sync
            os.fsync(folder)
    finally:
        os.close(folder)


def _move_if_free(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except OSError:
        if os.path.lexists(target):
            raise _there_already(target) from None
        os.replace(temporary, target)  # a file system without hard links


def _there_already(target: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "there is a file already", str(target))
