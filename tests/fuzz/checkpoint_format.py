"""Fuzzes the readers of the checkpoint format: manifests, trees and headers of safetensors files.

    pip install 'tradewind[fuzz]'
    python tests/fuzz/checkpoint_format.py -max_total_time=600 NEW_INPUTS tests/fuzz/corpus

Each input begins with a letter: "m" a manifest, "s" a manifest that is sealed here (so that what
stands before the seal is reached), "h" the whole of a safetensors file. The property: an input is
read, or is refused by a CheckpointError; and what is read is written and read again to the same.
tests/python/checkpoint/test_fuzz.py runs the corpus always, and this for a while where it can."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

CORPUS = Path(__file__).parent / "corpus"


class AnyName(dict[str, object]):
    """Tensors of every name, so that trees are read to their ends."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> object:
        return name


def check(data: bytes) -> str:
    """Try one input; how it ended, in one word. Raises whatever no reader should raise."""
    from tradewind.checkpoint.errors import CheckpointError

    kind = _KINDS.get(data[:1])
    if kind is None:
        return "none"
    try:
        again = kind(data[1:])
    except CheckpointError:
        return "refused"
    again()
    return "read"


def _manifest(data: bytes) -> Callable[[], None]:
    from tradewind.checkpoint import manifest
    from tradewind.checkpoint.errors import CheckpointError, DamagedCheckpointError
    from tradewind.checkpoint.rebuilding import rebuild

    found = manifest.decode(data, "input")

    def again() -> None:
        try:
            written = manifest.encode(found)
        except CheckpointError as error:
            assert "recursion" in str(error), error  # read, but too deep to be written
            return
        assert manifest.decode(written, "again") == found
        assert manifest.encode(manifest.decode(written, "again")) == written
        with contextlib.suppress(DamagedCheckpointError):
            rebuild(found.tree, AnyName(), next(iter(found.per_rank), None))

    return again


def _sealed(data: bytes) -> Callable[[], None]:
    from tradewind._core import native

    return _manifest(data + b',"seal":"%08x"}\n' % native.crc32c(data))


def _header(data: bytes) -> Callable[[], None]:
    from tradewind.checkpoint import safetensors_header as headers

    found = headers.parse(data, len(data), "input")

    def again() -> None:
        size = found.entries[-1].end if found.entries else 0
        written = headers.compose(found.entries, found.metadata)
        read = headers.parse(written, len(written) + size, "again")
        assert (read.entries, read.metadata) == (found.entries, found.metadata)

    return again


_KINDS: dict[bytes, Callable[[bytes], Callable[[], None]]] = {
    b"m": _manifest,
    b"s": _sealed,
    b"h": _header,
}


def main() -> None:
    import atheris

    # By hand: atheris does not see the sources of a package that is installed editable.
    for name in (
        "manifest manifest_checks rebuilding safetensors_header strict_json names"
    ).split():
        module = importlib.import_module(f"tradewind.checkpoint.{name}")
        for function in _functions(module):
            atheris.instrument_func(function)

    def test_one_input(data: Any) -> None:
        check(bytes(data))

    arguments = sys.argv if len(sys.argv) > 1 else [*sys.argv, "-max_total_time=60"]
    atheris.Setup(arguments, test_one_input)
    atheris.Fuzz()


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Functions and methods that `module` defines."""
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            if isinstance(member, FunctionType) and member.__module__ == module.__name__:
                yield member


if __name__ == "__main__":
    main()
