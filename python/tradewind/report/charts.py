"""Charts as inline SVG, drawn by matplotlib's object interface; pyplot is never loaded.

Colours are placeholders in matplotlib and become CSS variables in the page, so that one drawing
serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from tradewind.report.curves import Curve, isolated, smoothed, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID, _RAW, _LINE, _ALARM, _QUIET = (f"#01020{digit}" for digit in range(1, 7))
_CSS_VARIABLES = {
    _INK: "--chart-ink",
    _GRID: "--chart-grid",
    _RAW: "--chart-raw",
    _LINE: "--chart-line",
    _ALARM: "--chart-alarm",
    _QUIET: "--chart-quiet",
}
_MAX_MARK_LINES = 40


@dataclass(frozen=True)
class Marks:
    """Steps to point out in a chart: vetoed updates, and where later attempts began."""

    vetoed: Sequence[int] = ()
    restarts: Sequence[int] = ()


def chart(curve: Curve, *, width_in: float, height_in: float, marks: Marks | None = None) -> str:
    """The curve as an <svg> element: raw faint below a smoothed line, alarms at the top edge."""
    from matplotlib.figure import Figure

    with _own_settings():
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        _draw_curve(axes, curve)
        _draw_marks(axes, curve, marks or Marks())
        _style(axes, curve)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inlined(buffer.getvalue(), curve.name)


@contextmanager
def _own_settings() -> Iterator[None]:
    """matplotlib's defaults, whatever the user's matplotlibrc says, and the user's afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "tradewind",
                "font.size": 9.0,
                "axes.edgecolor": _GRID,
                "axes.unicode_minus": False,
            }
        )
        yield


def _draw_curve(axes: Axes, curve: Curve) -> None:
    smooth = smoothed(curve.values)
    steps, values = thinned(curve.steps, curve.values)
    raw_colour, raw_width = (_LINE, 1.6) if smooth is None else (_RAW, 0.9)
    axes.plot(steps, values, color=raw_colour, linewidth=raw_width, solid_joinstyle="round")
    alone = isolated(values)
    axes.plot(steps[alone], values[alone], ".", color=raw_colour, markersize=4)
    if smooth is not None:
        axes.plot(*thinned(curve.steps, smooth), color=_LINE, linewidth=1.8)


def _draw_marks(axes: Axes, curve: Curve, marks: Marks) -> None:
    edge: Any = axes.get_xaxis_transform()  # x in steps, y from 0 (bottom) to 1 (top)
    alarms = sorted({*marks.vetoed, *curve.non_finite_steps})
    if len(alarms) <= _MAX_MARK_LINES:
        for step in alarms:
            axes.axvline(step, color=_ALARM, linewidth=0.8, alpha=0.5)
    for steps, marker in ((marks.vetoed, "v"), (curve.non_finite_steps, "x")):
        heights = np.full(len(steps), 0.97 if marker == "v" else 0.90)
        axes.plot(steps, heights, marker, color=_ALARM, markersize=5, transform=edge, clip_on=False)
    for step in marks.restarts:
        axes.axvline(step, color=_QUIET, linewidth=1.0, linestyle=(0, (3, 3)))


def _style(axes: Axes, curve: Curve) -> None:
    from matplotlib.ticker import MaxNLocator

    if curve.spans_decades:
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0, which="both", labelsize=9)
    axes.yaxis.get_offset_text().set_color(_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.01, y=0.08)


def _inlined(svg: str, name: str) -> str:
    """matplotlib's SVG file as an element of a page: no prologue, no metadata, no outside names,
    ids of its own, colours by CSS variable."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)
    label = escape(f"{name} over steps", quote=True)
    head = f'<svg {view_box[0] if view_box else ""} role="img" aria-label="{label}"'
    prefix = re.sub(r"\W", "-", name) + f"-{len(name)}-"
    rest = rest.replace("xlink:href=", "href=")
    rest = re.sub(r'\b(id="|href="#)', rf"\g<1>{prefix}", rest)
    rest = rest.replace("url(#", f"url(#{prefix}")
    rest = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", rest)
    for placeholder, variable in _CSS_VARIABLES.items():
        rest = rest.replace(placeholder, f"var({variable})")
    return f"{head}>{rest}".strip()
