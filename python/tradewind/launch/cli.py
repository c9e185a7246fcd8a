"""The `tradewind` command.

Facts go to stdout (with `--json`, exactly one JSON document), everything else to stderr. Exit
codes: 0 success, 1 a command that failed, 2 bad usage, which includes a RUN that is no run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tradewind.launch.checkpoint_cli import checkpoint

if TYPE_CHECKING:
    from tradewind.track import Metrics

T = TypeVar("T")


def _version() -> str:
    from tradewind.track.facts import tradewind_version

    return tradewind_version()


def _show_version(context: click.Context, parameter: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        click.echo(f"tradewind {_version()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Tradewind, a training engine for rented accelerators.

    \b
    Example:
      tradewind doctor
    """


main.add_command(checkpoint)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the page.")
@click.option("--json", "as_json", is_flag=True, help="Print the run's figures as JSON.")
def report(run: Path, output: Path | None, as_json: bool) -> None:
    """Write the page of RUN, a run directory, and print its path.

    The page is RUN/report.html unless --output names another file; it needs no network.

    \b
    Example:
      tradewind report runs/a
      tradewind report runs/a --json --output /tmp/a.html
    """
    from tradewind.report import write_report

    page = _checked(run, lambda: write_report(run, output))
    if as_json:
        _print_json({"report": str(page), **_checked(run, lambda: _figures(run))})
    else:
        click.echo(str(page))


@main.command()
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(command: tuple[str, ...], as_json: bool) -> None:
    """Look at this machine: what it has, what is missing, what that costs and what to do.

    \b
    Example:
      tradewind doctor
      tradewind doctor --json > machine.json
    """
    if command:
        raise click.UsageError(
            f"doctor: expected no command, got {' '.join(command)!r}; the doctor cannot watch a "
            "command yet, only the machine: run `tradewind doctor` alone"
        )
    from tradewind.doctor import inspect_machine

    click.echo("looking at this machine ...", err=True)
    found = inspect_machine()
    if as_json:
        _print_json(found.to_json())
    else:
        from rich.console import Console

        Console(file=sys.stdout).print(found.table())


def _checked(run: Path, work: Callable[[], T]) -> T:
    """`work()`, with the errors that a user can cause as messages and exit codes."""
    from tradewind.track import RunRecordError

    try:
        return work()
    except (RunRecordError, IsADirectoryError) as error:
        raise click.UsageError(str(error)) from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"report of {str(run)!r}: {error}") from error


def _figures(run: Path) -> dict[str, object]:
    from tradewind.track import open_metrics, read_run

    record = read_run(run)
    with open_metrics(run) as metrics:
        last, steps = _last_values(metrics)
    return {
        "run": str(run),
        "name": record.name,
        "status": record.status,
        "steps": steps,
        "last": last,
        "attempts": [dict(attempt) for attempt in record.attempts],
    }


def _last_values(metrics: Metrics) -> tuple[dict[str, object], int]:
    """The newest value of each name, and the newest step."""
    last: dict[str, object] = {}
    newest_step = 0
    for name in metrics.names():
        series = metrics.series(name)
        if len(series):
            last[name] = float(series.values[-1])
            newest_step = max(newest_step, int(series.steps[-1]))
    return last, newest_step


def _print_json(document: dict[str, Any]) -> None:
    from tradewind.track.facts import json_safe

    click.echo(json.dumps(json_safe(document), indent=1, allow_nan=False))
