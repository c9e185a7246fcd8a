"""Weights of others as a start: safetensors files, torch.save files, and the folders of both that
Hugging Face calls models. Nothing of a file is ever executed."""

from __future__ import annotations

import os
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch

from tradewind.checkpoint import safetensors_header, strict_json
from tradewind.checkpoint.dtypes import DTYPE_OF
from tradewind.checkpoint.errors import DamagedCheckpointError, StateMismatchError, WeightsError
from tradewind.checkpoint.names import MARKER

# What a folder of a model holds, in the order of preference.
_OF_A_FOLDER = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
# Under which of a training script's names a state dict may stand.
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_MAX_INDEX_BYTES = 256 << 20
_MOST_SHOWN = 6
_PLAIN_NAME = re.compile(r"[^/\\\0]+")


@dataclass
class Started:
    """What `start_from` did. `filled`: names in the model; `missing` in the file; `unexpected` in
    it; `misfits`: (name, what is wrong)."""

    filled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[tuple[str, str]] = field(default_factory=list)


def start_from(
    model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True, key: str = ""
) -> Started:
    """Fill the parameters and buffers of `model` from a file of weights, before training begins.

    ::

        model = Net()
        tw.checkpoint.start_from(model, "pretrained.safetensors")
        engine = tw.Engine(model, tw.AdamW(lr=1e-3))

    Call it before the Engine is made, which copies 16-bit parameters into masters. Floating-point
    values are converted to the model's dtype. A "module." before all names of the file (DDP's) and
    "_orig_mod." in them (torch.compile's) are taken off. Of parameters that the model has under
    several names, one name in the file is enough.

    Args:
        path: see `load_weights`.
        strict: whether every name has to fit; else what fits is filled, and the rest is listed.
        key: see `load_weights`.

    Raises:
        StateMismatchError: names or shapes that do not fit; nothing was changed.
        WeightsError, OSError: as `load_weights`.
    """
    with torch.no_grad():
        source = _opened(Path(path), key)
        targets = _targets(model)
        names = _clean(source.names())
        started = Started()
        pairs: list[tuple[torch.Tensor, str]] = []
        for name, original in names.items():
            target = targets.get(name)
            if target is None:
                started.unexpected.append(name)
            elif problem := _problem(target, *source.describe(original)):
                started.misfits.append((name, problem))
            else:
                pairs.append((target, original))
                started.filled.append(name)
        memory = {_place(targets[name]) for name in started.filled}
        started.missing = [
            name
            for name, target in targets.items()
            if name not in names and _place(target) not in memory
        ]
        if strict:
            _check(started, path)
        for target, original in pairs:
            target.copy_(source.tensor(original))
    return started


def load_weights(path: str | os.PathLike[str], *, key: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a file by name, on the CPU.

    Args:
        path: a safetensors file; a file of torch.save that holds names and tensors; an index of
            several of either (`*.index.json`); or a folder with such files under the names that
            Hugging Face gives them.
        key: where in the dict of a torch.save file the names stand, parts joined by "."; found by
            itself where it is "state_dict", "model_state_dict" or "model".

    Raises:
        WeightsError: no such file, a damaged one, one that `weights_only` refuses to load.
        OSError: the file is not there or cannot be read.
    """
    source = _opened(Path(path), key)
    return {name: source.tensor(name) for name in source.names()}


# --- files ----------------------------------------------------------------------------------------


class _Source(ABC):
    """Tensors by name, one at a time."""

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def describe(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """dtype (None: one that torch does not have) and shape."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor: ...


class _Safetensors(_Source):
    def __init__(self, path: Path) -> None:
        self._path = path
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            try:
                start = file.read(8)
                end = safetensors_header.header_bytes(start, size_bytes, str(path))
                data = start + file.read(end - len(start))
                header = safetensors_header.parse(data, size_bytes, str(path))
            except DamagedCheckpointError as error:
                raise WeightsError(str(error)) from error
        self._entries = {
            entry.key: entry
            for entry in header.entries
            if not entry.key.startswith(safetensors_header.PAD_PREFIX)
        }
        self._file = safetensors.safe_open(path, framework="pt")

    def names(self) -> list[str]:
        return list(self._entries)

    def describe(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        entry = self._entries[name]
        return DTYPE_OF.get(entry.dtype), tuple(entry.shape)

    def tensor(self, name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (safetensors.SafetensorError, AttributeError) as error:
            raise WeightsError(f"{str(self._path)!r}: tensor {name!r}: {error}") from error
        return found


class _Tensors(_Source):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        found = self._tensors[name]
        return found.dtype, tuple(found.shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class _Index(_Source):
    """Several files, and which holds what."""

    def __init__(self, path: Path) -> None:
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_INDEX_BYTES:
            raise WeightsError(f"{str(path)!r}: expected an index, got {size_bytes} bytes")
        try:
            index = strict_json.loads(path.read_bytes(), str(path))
        except DamagedCheckpointError as error:
            raise WeightsError(str(error)) from error
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise WeightsError(
                f"{str(path)!r}: expected an index with a weight_map of names to files, got "
                f"{strict_json.excerpt(index)}"
            )
        sources: dict[str, _Source] = {}
        for file in sorted(set(files.values())):
            if not _PLAIN_NAME.fullmatch(file) or file in (".", ".."):
                raise WeightsError(
                    f"{str(path)!r}: names the file {file!r}; expected one of its own folder"
                )
            if not (path.parent / file).is_file():
                raise WeightsError(f"{str(path)!r}: names {file!r}, which is not there; fetch it")
            sources[file] = _file(path.parent / file, "")
        self._of = {name: sources[file] for name, file in files.items()}
        for name, file in files.items():
            if name not in sources[file].names():
                raise WeightsError(f"{str(path)!r}: {file!r} has no tensor {name!r}")

    def names(self) -> list[str]:
        return list(self._of)

    def describe(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        return self._of[name].describe(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._of[name].tensor(name)


def _opened(path: Path, key: str) -> _Source:
    if not path.is_dir():
        return _file(path, key)
    for name in _OF_A_FOLDER:
        if (path / name).is_file():
            return _file(path / name, key)
    hint = ""
    if (path / MARKER).exists():
        hint = (
            "; it is a directory of checkpoints: tw.Checkpointer(...).restore(..., partial=True) "
            "fills from it, and `tradewind checkpoint export` makes a file of one"
        )
    raise WeightsError(
        f"{str(path)!r}: expected a file of weights, or a folder with {', '.join(_OF_A_FOLDER)}"
        f"{hint}"
    )


def _file(path: Path, key: str) -> _Source:
    if path.name.endswith(".index.json"):
        return _Index(path)
    with path.open("rb") as file:
        start = file.read(16)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _Safetensors(path)
    return _Tensors(_of_torch(path, key))


def _of_torch(path: Path, key: str) -> dict[str, torch.Tensor]:
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # files of before torch 1.6 cannot be mapped
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{str(path)!r}: torch.load(weights_only=True) refuses it: {_first_line(error)}. Such "
            "a file can run any code when it is loaded in full. If you trust whoever made it, load "
            "it with weights_only=False in a script of your own and torch.save its state dict, or "
            "ask for a safetensors file"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{str(path)!r}: expected a safetensors file or one of torch.save, got one that torch "
            f"cannot read: {_first_line(error)}"
        ) from error
    return _state_dict(found, path, key)


def _state_dict(found: Any, path: Path, key: str) -> dict[str, torch.Tensor]:
    """The names and tensors of a file, wherever in it they stand."""
    for part in key.split(".") if key else ():
        if not isinstance(found, Mapping) or part not in found:
            raise WeightsError(f"{str(path)!r}: has no {key!r}; it holds {_contents(found)}")
        found = found[part]
    if not key and not _is_state_dict(found) and isinstance(found, Mapping):
        inner = [name for name in _WRAPPERS if _is_state_dict(found.get(name))]
        if len(inner) == 1:
            found = found[inner[0]]
    if not _is_state_dict(found):
        raise WeightsError(
            f"{str(path)!r}: expected names and tensors, got {_contents(found)}; say where they "
            "are with key="
        )
    return {name: value.detach() for name, value in found.items() if torch.is_tensor(value)}


def _is_state_dict(found: Any) -> bool:
    """Names and tensors; a module's extra state, which may be anything, is passed over."""
    return (
        isinstance(found, Mapping)
        and any(torch.is_tensor(value) for value in found.values())
        and all(
            isinstance(name, str) and (torch.is_tensor(value) or name.endswith("_extra_state"))
            for name, value in found.items()
        )
    )


def _contents(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a dict of {', '.join(map(repr, list(found)[:_MOST_SHOWN])) or 'nothing'}"
    return f"a {type(found).__name__}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


# --- the model ------------------------------------------------------------------------------------


def _targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    targets = {
        name.replace("_orig_mod.", ""): value
        for name, value in model.state_dict(keep_vars=True).items()
        if torch.is_tensor(value)
    }
    for name, target in targets.items():
        if target.is_meta:
            raise StateMismatchError(
                f"{name}: is on the meta device without memory; materialize it first (to_empty)"
            )
    return targets


def _clean(names: Iterable[str]) -> dict[str, str]:
    """What the file's names are in a model: to what they are in the file."""
    listed = list(names)
    prefix = "module." if listed and all(name.startswith("module.") for name in listed) else ""
    return {name.removeprefix(prefix).replace("_orig_mod.", ""): name for name in listed}


def _place(target: torch.Tensor) -> tuple[object, ...]:
    return target.device, target.data_ptr(), target.dtype, target.shape, target.stride()


def _problem(target: torch.Tensor, dtype: torch.dtype | None, shape: tuple[int, ...]) -> str:
    if dtype is None:
        return "is of a dtype that torch does not have"
    if dtype != target.dtype and not (dtype.is_floating_point and target.is_floating_point()):
        return f"expected {target.dtype}, the file has {dtype}"
    if shape != tuple(target.shape):
        return f"expected shape {tuple(target.shape)}, the file has {shape}"
    return ""


def _check(started: Started, path: str | os.PathLike[str]) -> None:
    told = [
        *(f"{name}: {problem}" for name, problem in started.misfits),
        *(f"{name}: is not in the file" for name in started.missing),
        *(f"{name}: is in the file, not in the model" for name in started.unexpected),
    ]
    if told:
        more = f"; and {len(told) - _MOST_SHOWN} more" if len(told) > _MOST_SHOWN else ""
        raise StateMismatchError(
            f"{os.fspath(path)!r} does not fit the model: {'; '.join(told[:_MOST_SHOWN])}{more}. "
            f"Nothing was changed. strict=False would fill what fits ({len(started.filled)} of "
            f"{len(started.filled) + len(told)} names)"
        )
