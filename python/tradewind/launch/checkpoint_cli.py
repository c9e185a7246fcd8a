"""`tradewind checkpoint`: look into checkpoints, check, compare and export them.

A checkpoint is meant by its directory (the newest one), DIRECTORY@STEP, or its own folder; URLs of
stores work, too. Exit codes: 0 success, 1 damage or a difference was found or a command failed, 2
bad usage, which includes a path without checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

if TYPE_CHECKING:
    from tradewind.checkpoint.difference import Difference, TensorChange
    from tradewind.checkpoint.names import CommitName
    from tradewind.checkpoint.reference import Reference

FOUND = 1  # the exit code for damage and differences


@click.group()
def checkpoint() -> None:
    """Look into checkpoints, check, compare and export them.

    CHECKPOINT is a directory of checkpoints (its newest one) or of a run, DIRECTORY@STEP, the
    folder of one checkpoint, or a URL (s3://bucket/prefix@300).

    \b
    Example:
      tradewind checkpoint list runs/a/checkpoints
      tradewind checkpoint verify runs/a/checkpoints@300
    """


@checkpoint.command("list")
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def list_(directory: str, as_json: bool) -> None:
    """List the checkpoints of DIRECTORY, newest first, and what is ignored there.

    "whole" is said of manifests, and of files that are there in their sizes: what is in them is
    checked by `verify`.

    \b
    Example:
      tradewind checkpoint list runs/a/checkpoints
      tradewind checkpoint list s3://bucket/runs/a --json
    """
    with _reference(directory) as reference, _failing():
        from tradewind.checkpoint.survey import survey

        found = survey(reference)
    now_s = time.time()
    rows = [
        {
            **_name_facts(commit.name),
            "is_newest": commit.name == found.newest,
            "created_s": commit.manifest.created_s if commit.manifest else None,
            "age_s": now_s - commit.manifest.created_s if commit.manifest else None,
            "size_bytes": commit.size_bytes,
            "world_size": commit.manifest.world_size if commit.manifest else None,
            "num_tensors": len(commit.manifest.tensors) if commit.manifest else None,
            "is_whole": not commit.problem,
            "problem": commit.problem or None,
        }
        for commit in found.commits
    ]
    ignored = [{"folder": each.folder, "why": each.why} for each in found.ignored]
    if as_json:
        _print_json({"directory": found.where, "checkpoints": rows, "ignored": ignored})
        return
    header = ("step", "attempt", "age", "size", "ranks", "tensors", "")
    table = [
        (
            str(row["step"]),
            str(row["attempt"]),
            _age(row["age_s"]),
            _size(row["size_bytes"]),
            _or_unknown(row["world_size"]),
            _or_unknown(row["num_tensors"]),
            row["problem"] or ("whole, newest" if row["is_newest"] else "whole"),
        )
        for row in rows
    ]
    click.echo(_aligned([header, *table]) if table else f"{found.where}: no checkpoints")
    for each in found.ignored:
        click.echo(f"ignored: {each.folder}: {each.why}")


@checkpoint.command()
@click.argument("which", metavar="CHECKPOINT")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def show(which: str, as_json: bool) -> None:
    """Show what is in CHECKPOINT: facts, JSON values and tensors, as the state had them.

    \b
    Example:
      tradewind checkpoint show runs/a/checkpoints
      tradewind checkpoint show runs/a/checkpoints@300 --json
    """
    with _reference(which) as reference, _failing():
        from tradewind.checkpoint.outline import outline

        name = reference.name()
        found = outline(reference.manifest(name), name.folder)
        where = reference.directory.where
    if as_json:
        _print_json({"directory": where, **_name_facts(name), **found.to_json()})
    else:
        click.echo(f"{where}/{name.folder}")
        click.echo("\n".join(found.lines()))


@checkpoint.command()
@click.argument("which", metavar="CHECKPOINT")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(which: str, as_json: bool) -> None:
    """Read all of CHECKPOINT and check every block; of a directory, all of its checkpoints.

    Ends with exit code 1 where anything is damaged, and names it.

    \b
    Example:
      tradewind checkpoint verify runs/a/checkpoints
      tradewind checkpoint verify runs/a/checkpoints@300 --json
    """
    rows = []
    with _reference(which) as reference, _failing():
        for name in reference.names():
            if not as_json:
                click.echo(f"reading {name.folder} ...", err=True)
            damages = _damages(reference, name)
            if damages is None:
                click.echo(f"{name.folder} was retired meanwhile", err=True)
                continue
            rows.append({**_name_facts(name), "is_whole": not damages, "damages": damages})
            if not as_json:
                click.echo(f"{name.folder}: {'whole' if not damages else 'DAMAGED'}")
                for damage in damages:
                    click.echo(f"  {damage}")
        where = reference.directory.where
    num_damaged = sum(not row["is_whole"] for row in rows)
    if as_json:
        facts = {"directory": where, "checkpoints": rows, "num_damaged": num_damaged}
        _print_json(facts)
    raise SystemExit(FOUND if num_damaged else 0)


@checkpoint.command()
@click.argument("before")
@click.argument("after")
@click.option("--tensors-only", is_flag=True, help="Compare tensors alone, no JSON values.")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff(before: str, after: str, tensors_only: bool, as_json: bool) -> None:
    """Compare two checkpoints, element by element. A number as AFTER is a step beside BEFORE.

    Ends with exit code 0 where they are the same to the bit, and 1 where they differ.

    \b
    Example:
      tradewind checkpoint diff runs/a/checkpoints@300 400
      tradewind checkpoint diff runs/a/checkpoints@300 runs/b/checkpoints@300 --tensors-only
    """
    with _reference(before) as old, _reference(_beside(old, after)) as new, _failing():
        from tradewind.checkpoint.difference import difference

        old_name, new_name = old.name(), new.name()
        with old.reader(old_name) as first, new.reader(new_name) as second:
            found = difference(first, second)
        if tensors_only:
            found.values.clear()
    if as_json:
        ends = {"before": _name_facts(old_name), "after": _name_facts(new_name)}
        _print_json({**ends, **_difference_facts(found)})
    else:
        _print_difference(found)
    raise SystemExit(FOUND if found else 0)


@checkpoint.command()
@click.argument("which", metavar="CHECKPOINT")
@click.option(
    "--to", "path", required=True, type=click.Path(path_type=Path), help="The file to write."
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["safetensors", "torch"]),
    help="By default, torch where FILE ends in .pt, .pth or .bin, else safetensors.",
)
@click.option(
    "--only",
    default="",
    metavar="PREFIX",
    help='Only tensors whose names begin with PREFIX, which is taken off: "model."',
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(
    which: str, path: Path, format_: str | None, only: str, force: bool, as_json: bool
) -> None:
    """Write CHECKPOINT as one file for other tools.

    safetensors: tensors by name, through bounded memory. torch: the whole state, for
    torch.load(FILE, weights_only=True); with --only names and tensors alone.

    \b
    Example:
      tradewind checkpoint export runs/a/checkpoints --only model. --to model.safetensors
      tradewind checkpoint export runs/a/checkpoints@300 --to state.pt
    """
    format_ = format_ or ("torch" if path.suffix in (".pt", ".pth", ".bin") else "safetensors")
    with _reference(which) as reference, _failing():
        from tradewind.checkpoint.export import export as write

        _refuse_inside(reference, path)
        name = reference.name()
        with reference.reader(name) as reader:
            chosen = cast('Literal["safetensors", "torch"]', format_)
            done = write(reader, path, format=chosen, only=only, replaces=force)
    if as_json:
        facts = {"format": format_, "num_tensors": done.num_tensors, "size_bytes": done.size_bytes}
        _print_json({"file": str(done.path), **_name_facts(name), **facts})
    else:
        click.echo(str(done.path))
        click.echo(
            f"step {name.step}: {done.num_tensors} tensors, {_size(done.size_bytes)}", err=True
        )


# --- what is meant, and what goes wrong -----------------------------------------------------------


@contextlib.contextmanager
def _reference(text: str) -> Iterator[Reference]:
    with _failing():
        from tradewind.checkpoint.reference import Reference

        opened = Reference(text)
    with opened:
        yield opened


def _beside(before: Reference, after: str) -> str:
    return f"{before.directory.where}@{after}" if after.isdecimal() else after


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Errors that a user can cause as messages and exit codes."""
    try:
        from tradewind.checkpoint import errors
    except (ImportError, OSError, RuntimeError) as error:
        raise click.ClickException(
            f"checkpoints are read by tradewind's native module and torch, which do not load: "
            f"{error}; `tradewind doctor` says what is wrong with them"
        ) from error
    try:
        yield
    except (errors.NoSuchCheckpointError, errors.NotACheckpointDirectoryError) as error:
        raise click.UsageError(str(error)) from error
    except (FileExistsError, IsADirectoryError) as error:
        raise click.UsageError(
            f"{error.filename}: {error.strerror}; name another file, or replace it with --force"
        ) from error
    except (errors.CheckpointError, OSError, ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def _damages(reference: Reference, name: CommitName) -> list[str] | None:
    """None where the checkpoint is not there any more."""
    from tradewind.checkpoint.errors import DamagedCheckpointError, VanishedCheckpointError

    try:
        with reference.reader(name) as reader:
            return reader.damages()
    except VanishedCheckpointError:
        return None
    except DamagedCheckpointError as error:
        return [str(error)]


def _refuse_inside(reference: Reference, path: Path) -> None:
    """Readers of the format take every safetensors file of a folder for a shard."""
    inside = path.resolve().parent
    for folder in (inside, *inside.parents):
        if str(folder) == reference.directory.where:
            raise click.UsageError(
                f"--to {path}: lies in the directory of checkpoints; write it somewhere else"
            )


# --- what is printed ------------------------------------------------------------------------------


def _name_facts(name: CommitName) -> dict[str, Any]:
    return {"step": name.step, "attempt": name.attempt, "folder": name.folder}


def _difference_facts(found: Difference) -> dict[str, Any]:
    return {
        "is_same": not found,
        "num_same_tensors": found.num_same,
        "tensors": [vars(change) for change in found.tensors],
        "values": [vars(change) for change in found.values],
    }


def _print_difference(found: Difference) -> None:
    for change in found.tensors:
        click.echo(_change_line(change))
    for value in found.values:
        if value.before is None:
            click.echo(f"+ {value.path} = {value.after}")
        elif value.after is None:
            click.echo(f"- {value.path} = {value.before}")
        else:
            click.echo(f"! {value.path}: {value.before} -> {value.after}")
    click.echo(
        f"{found.num_same} tensors are the same, {len(found.tensors)} are not; "
        f"{len(found.values)} values are not"
    )


def _change_line(change: TensorChange) -> str:
    if change.kind == "added":
        return f"+ {change.name}  {change.after}"
    if change.kind == "removed":
        return f"- {change.name}  {change.before}"
    what = change.after if change.kind == "values" else f"{change.before} -> {change.after}"
    line = f"! {change.name}  {what}"
    if change.num_differing is not None:
        line += (
            f"  {change.num_differing} of {change.num_elements} elements differ, by at most "
            f"{change.max_abs:.6g} ({change.max_relative:.3g} relative)"
        )
    return line


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row[:-1], widths, strict=False))
        + f"  {row[-1]}".rstrip()
        for row in rows
    )


def _or_unknown(value: object) -> str:
    return "?" if value is None else str(value)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"


def _print_json(document: dict[str, Any]) -> None:
    from tradewind.track.facts import json_safe

    click.echo(json.dumps(json_safe(document), indent=1, allow_nan=False))
