"""The tables of `skips`, as docs/compatibility.md publishes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import distributed_skips
from skips import ERRORS, SKIPS, UNSUPPORTED_FLAGS

FILE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN = "<!-- from tests/torch_suite/{}: python tests/torch_suite/run.py --write-docs -->\n"
END = "<!-- end -->\n"


def write(file: Path) -> None:
    """Put the tables between the file's marks. Raises ValueError where it has none."""
    text = file.read_text()
    for source, tables in (
        ("skips.py", _of_optimizers()),
        ("distributed_skips.py", _of_gradient_sharing()),
    ):
        mark = BEGIN.format(source)
        before, begin, rest = text.partition(mark)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{file}: expected the lines {mark!r} and {END!r}, found no such pair")
        text = f"{before}{mark}\n{tables}\n{END}{after}"
    file.write_text(text)


def _of_optimizers() -> str:
    errors = ((desc.replace("\\", ""), ours.why) for desc, ours in ERRORS.items())
    return _joined(
        _table("test that does not run", ((f"`{p}`", why) for p, why in SKIPS.items())),
        _table(
            "flag that is never True", ((f"`{f}`", why) for f, why in UNSUPPORTED_FLAGS.items())
        ),
        _table("bad argument, as torch describes it", errors),
    )


def _of_gradient_sharing() -> str:
    names: dict[str, list[str]] = {}
    for pattern, why in distributed_skips.SKIPS.items():
        names.setdefault(why, []).append(f"`{pattern}`")
    rows = ((", ".join(patterns), why) for why, patterns in names.items())
    return _joined(_table("tests that do not run", rows))


def _joined(*tables: Iterable[str]) -> str:
    return "\n".join("\n".join(table) + "\n" for table in tables)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {title} | why |"
    yield "| --- | --- |"
    for name, why in rows:
        yield f"| {name} | {why} |"
