"""The tables of `skips`, as docs/compatibility.md publishes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from skips import ERRORS, SKIPS, UNSUPPORTED_FLAGS

FILE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN = "<!-- from tests/torch_suite/skips.py: python tests/torch_suite/run.py --write-docs -->\n"
END = "<!-- end -->\n"


def write(file: Path) -> None:
    """Put the tables between the file's marks. Raises ValueError where it has none."""
    text = file.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file}: expected the lines {BEGIN!r} and {END!r}, found no such pair")
    file.write_text(f"{before}{BEGIN}\n{_tables()}\n{END}{after}")


def _tables() -> str:
    errors = ((desc.replace("\\", ""), ours.why) for desc, ours in ERRORS.items())
    tables = (
        _table("test that does not run", ((f"`{p}`", why) for p, why in SKIPS.items())),
        _table(
            "flag that is never True", ((f"`{f}`", why) for f, why in UNSUPPORTED_FLAGS.items())
        ),
        _table("bad argument, as torch describes it", errors),
    )
    return "\n".join("\n".join(table) + "\n" for table in tables)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {title} | why |"
    yield "| --- | --- |"
    for name, why in rows:
        yield f"| {name} | {why} |"
