"""Puts the page together: reads the run, draws, escapes, writes the file in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import numpy as np

from tradewind.report.charts import Marks, chart
from tradewind.report.curves import Curve, curve_of
from tradewind.report.story import attempts_table, facts, notes, steps_text, tiles
from tradewind.track import Metrics, RunRecord, open_metrics, read_run
from tradewind.track.atomic import write_atomically

_MAX_SMALL_CHARTS = 120
_TITLES = {
    "loss": "Loss",
    "samples_per_s": "Samples per second",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "clip_factor": "Clip factor",
    "hot_gradients": "Gradients measured in backward",
    "wait_s": "Wait for input, s",
    "share_wait_s": "Wait for other ranks, s",
    "clip_wait_s": "Wait for the norm to clip by, s",
    "step_s": "Step time, s",
}
_LARGE = ("loss",)
_MEDIUM = ("samples_per_s", "grad_norm")


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run and return its path: `out`, or report.html in the run directory.

    Raises RunRecordError where `run_path` is no run directory, SegmentError for damaged metrics
    (both ValueErrors), OSError where the file cannot be written; an earlier page then stays.
    """
    folder = Path(run_path)
    record = read_run(folder)
    path = Path(out) if out is not None else folder / "report.html"
    if path.is_dir():
        raise IsADirectoryError(
            f"report: expected a file to write, but {str(path)!r} is a directory; name a file in it"
        )
    with open_metrics(folder) as metrics:
        page = _page(record, metrics)
    write_atomically(path, page.encode("utf-8", "replace"))
    return path


def _page(record: RunRecord, metrics: Metrics) -> str:
    series = {name: metrics.series(name) for name in metrics.names()}
    curves = {name: curve_of(each) for name, each in series.items() if len(each)}
    vetoed = _vetoed_steps(curves.get("vetoed"))
    marks = Marks(vetoed, _restarts(metrics))
    last_time = max(
        (float(each.times.max()) for each in series.values() if len(each)), default=None
    )
    template = resources.files("tradewind.report").joinpath("template.html").read_text("utf-8")
    return Template(template).substitute(
        title=escape(record.name),
        status=escape(record.status),
        status_class=escape(record.status.replace(" ", "-")),
        tiles="".join(
            f'<div class="tile{" alarm" if tile.is_alarm else ""}"><dt>{escape(tile.label)}</dt>'
            f"<dd>{escape(tile.value)}</dd></div>"
            for tile in tiles(record, curves, vetoed, last_time)
        ),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes(record, curves, vetoed)),
        charts=_charts(curves, marks),
        attempts=_table(("attempt", "started", "ended", "status", "error"), attempts_table(record)),
        facts="".join(_facts_section(title, rows) for title, rows in facts(record) if rows),
        made=escape(datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
    )


def _charts(curves: dict[str, Curve], marks: Marks) -> str:
    names = [name for name in curves if name != "vetoed"]
    large = [name for name in _LARGE if name in curves]
    medium = [name for name in _MEDIUM if name in curves]
    small = [name for name in names if name not in (*large, *medium)]
    parts = [_figure(curves[name], marks, "large", 10.0, 3.3) for name in large]
    parts += [_figure(curves[name], marks, "medium", 5.4, 2.4) for name in medium]
    quiet = Marks(restarts=marks.restarts)
    parts += [_figure(curves[name], quiet, "small", 3.8, 2.1) for name in small[:_MAX_SMALL_CHARTS]]
    if len(small) > _MAX_SMALL_CHARTS:
        left_out = ", ".join(small[_MAX_SMALL_CHARTS:])
        parts.append(f'<p class="quiet">Not drawn, to keep the page small: {escape(left_out)}</p>')
    return "".join(parts)


def _figure(curve: Curve, marks: Marks, size: str, width_in: float, height_in: float) -> str:
    title = escape(_TITLES.get(curve.name, curve.name))
    keys = []
    if marks.vetoed:
        keys.append('<span class="key alarm">▼ vetoed</span>')
    if curve.non_finite_steps:
        label = escape(f"✕ not finite: {steps_text(curve.non_finite_steps)}")
        keys.append(f'<span class="key alarm">{label}</span>')
    if marks.restarts and size == "large":
        keys.append('<span class="key">┆ later attempt</span>')
    if curve.spans_decades:
        keys.append('<span class="key">log scale</span>')
    if curve.finite.size:
        drawing = chart(curve, width_in=width_in, height_in=height_in, marks=marks)
    else:
        drawing = '<p class="quiet">No finite value to draw.</p>'
    return (
        f'<figure class="{size}"><figcaption><strong>{title}</strong>{"".join(keys)}</figcaption>'
        f"{drawing}</figure>"
    )


def _vetoed_steps(curve: Curve | None) -> tuple[int, ...]:
    if curve is None:
        return ()
    return tuple(int(step) for step in curve.steps[np.asarray(curve.values == 1.0)])


def _restarts(metrics: Metrics) -> tuple[int, ...]:
    return tuple(metrics.first_step(attempt) for attempt in metrics.attempts()[1:])


def _facts_section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        if name
        else f'<tr><td colspan="2">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<section><h2>{escape(title)}</h2><table>{body}</table></section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
