"""A run's page: what it shows, what it must not load, and what it does with odd runs."""

from __future__ import annotations

import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tradewind.report import write_report
from tradewind.report.curves import curve_of, isolated, smoothed, thinned
from tradewind.report.story import steps_text
from tradewind.track import Run, RunRecordError, SegmentError, Series

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page as a browser reads it: its text, elements and their attributes; checks nesting."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.open_tags, self.elements = "", list[str](), list[tuple[str, dict]]()
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open_tags or self.open_tags[-1] != "style":
            self.text += data + "\n"

    def figures(self) -> list[str]:
        labels = [attrs.get("aria-label", "") for tag, attrs in self.elements if tag == "svg"]
        return [label.removesuffix(" over steps") for label in labels]


def page_of(path: Path) -> Page:
    return Page(write_report(path).read_text())


def train(path: Path, steps: int = 100, bad: tuple[int, ...] = ()) -> None:
    with Run.open(path, config={"lr": 0.1, "nested": {"depth": 3}}, seed=5) as run:
        for step in range(1, steps + 1):
            is_bad = step in bad
            run.log(
                step,
                {
                    "loss": math.nan if is_bad else 2.0 / step,
                    "grad_norm": math.inf if is_bad else 1.5,
                    "samples_per_s": 1000.0 + step,
                    "lr": 0.1,
                    "vetoed": int(is_bad),
                    "val/accuracy": step / 200,
                },
            )


def test_the_page_tells_the_run(tmp_path: Path) -> None:
    train(tmp_path / "digits")
    path = write_report(tmp_path / "digits")
    assert path == tmp_path / "digits" / "report.html"
    page = Page(path.read_text())
    assert "<title>digits</title>" in path.read_text()
    for part in ("digits", "finished", "100", "0.02", "1,050", "nested.depth", "lr", "seed", "5"):
        assert f"\n{part}\n" in f"\n{page.text}", part
    assert page.figures() == ["loss", "samples_per_s", "grad_norm", "lr", "val/accuracy"]
    assert "CPU" in page.text or "cpu" in page.text


def test_the_page_stands_alone(tmp_path: Path) -> None:
    train(tmp_path / "run", bad=(7,))
    html = write_report(tmp_path / "run").read_text()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert "http" not in html and "@import" not in html and "//" not in html.replace("</", "")
    for tag, attrs in page.elements:
        assert tag != "base" and not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")
    assert re.findall(r"url\((?!#)", html) == []
    assert "prefers-color-scheme: dark" in html


def test_ids_and_references_of_the_drawings_match(tmp_path: Path) -> None:
    train(tmp_path / "run", bad=(7,))
    html = write_report(tmp_path / "run").read_text()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]+)"', html) + re.findall(r"url\(#([^)]+)\)", html)
    assert references and set(references) <= set(ids)


def test_colours_are_variables(tmp_path: Path) -> None:
    train(tmp_path / "run", bad=(7,))
    html = write_report(tmp_path / "run").read_text()
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert re.findall(r"#[0-9a-fA-F]{6}\b", drawings.replace("#000000", "")) == []
    for variable in set(re.findall(r"var\((--[\w-]+)\)", html)):
        assert html.count(f"{variable}:") == 2, variable  # light and dark


def test_vetoed_and_non_finite_steps_are_marked(tmp_path: Path) -> None:
    train(tmp_path / "run", bad=(40, 41, 77))
    html = write_report(tmp_path / "run").read_text()
    page = Page(html)
    assert "Vetoed updates (weights left as they were): 3 steps (40-41, 77)." in page.text
    assert "loss was not finite, shown as gaps: 3 steps (40-41, 77)." in page.text
    loss = re.search(r'aria-label="loss over steps".*?</svg>', html, re.DOTALL)
    assert loss is not None and loss[0].count("var(--chart-alarm)") >= 6
    clean = re.search(r'aria-label="lr over steps".*?</svg>', html, re.DOTALL)
    assert clean is not None and "var(--chart-alarm)" not in clean[0]


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"$x"
    name = "</svg><b>$bold$"
    run = Run.open(tmp_path / "<i>run & co", config={evil: evil, "list": [evil]})
    run.log(1, {name: 1.0, "loss": 1.0})
    run.log(2, {name: 2.0, "loss": math.nan})
    run.close("failed", evil)
    page = page_of(tmp_path / "<i>run & co")
    assert not {"script", "b", "i"} & {tag for tag, _ in page.elements}
    assert page.text.count(evil) >= 3 and "<i>run & co" in page.text
    assert name in page.figures()


def test_a_live_run(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"loss": 1.0})
        run.log(2, {"loss": 0.5})
        run.flush()
        page = page_of(tmp_path)
        assert "The run is live" in page.text and "running" in page.text
        assert page.figures() == ["loss"]
        run.log(3, {"loss": 0.25})
    assert "The run is live" not in page_of(tmp_path).text


def test_an_empty_run(tmp_path: Path) -> None:
    Run.open(tmp_path, config={}).close()
    page = page_of(tmp_path)
    assert "No metrics were logged yet" in page.text
    assert page.figures() == [] and "none yet" in page.text


def test_a_run_of_one_step_and_a_run_of_no_finite_loss(tmp_path: Path) -> None:
    with Run.open(tmp_path / "one", config={}) as run:
        run.log(0, {"loss": 1.0})
    assert page_of(tmp_path / "one").figures() == ["loss"]
    with Run.open(tmp_path / "nan", config={}) as run:
        for step in range(3):
            run.log(step, {"loss": math.nan})
    page = page_of(tmp_path / "nan")
    assert page.figures() == [] and "No finite value to draw." in page.text
    assert "NaN" in page.text


def test_text_only(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"note": "hello"})
    assert page_of(tmp_path).figures() == []


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    train(tmp_path / "run")
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace('"finished"', '"running"'))
    page = page_of(tmp_path / "run")
    assert "ended without closing" in page.text and "killed" in page.text


def test_attempts_are_listed_and_marked(tmp_path: Path) -> None:
    for attempt, (first, last) in enumerate([(1, 50), (40, 80)], start=1):
        run = Run.open(tmp_path, config={})
        for step in range(first, last):
            run.log(step, {"loss": 1.0 / step})
        run.close(*(("failed", "spot machine went away") if attempt == 1 else ("finished", None)))
    page = page_of(tmp_path)
    assert "spot machine went away" in page.text and "later attempt" in page.text
    assert "\n79\n" in page.text


def test_out_names_another_file(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=3)
    out = tmp_path / "page.html"
    out.write_text("old")
    assert write_report(tmp_path / "run", out) == out
    assert out.read_text().startswith("<!doctype html>")
    assert not (tmp_path / "run" / "report.html").exists()
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        write_report(tmp_path / "run", tmp_path)


def test_a_failed_write_keeps_the_earlier_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", steps=3)
    path = write_report(tmp_path / "run")
    before = path.read_bytes()

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match=r"report\.html"):
        write_report(tmp_path / "run")
    monkeypatch.undo()
    assert path.read_bytes() == before


def test_no_run_and_damaged_metrics(tmp_path: Path) -> None:
    with pytest.raises(RunRecordError, match="expected a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    train(tmp_path / "run", steps=3)
    (tmp_path / "run" / "metrics" / "000009.jsonl").write_text("{")
    with pytest.raises(SegmentError, match=r"000009\.jsonl"):
        write_report(tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()


def test_settings_of_matplotlib_stay_the_users(tmp_path: Path) -> None:
    import matplotlib

    train(tmp_path / "run", steps=40)
    with matplotlib.rc_context({"svg.fonttype": "path", "axes.grid": True, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        write_report(tmp_path / "run")
        assert dict(matplotlib.rcParams) == before
        html = (tmp_path / "run" / "report.html").read_text()
    assert "<text" in html  # glyphs are the page's, whatever the user's settings


def series(values: list[float]) -> Series:
    array = np.array(values)
    return Series("x", np.arange(len(values)), np.zeros(len(values)), array)


def test_curves_have_gaps() -> None:
    curve = curve_of(series([1.0, math.nan, math.inf, 2.0]))
    assert curve.non_finite_steps == (1, 2) and curve.last == 2.0
    assert np.isnan(curve.values[[1, 2]]).all() and curve.finite.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1.0, 101.0], True), ([1.0, 99.0], False), ([0.0, 1e9], False), ([-1.0, 1e9], False)],
)
def test_a_log_scale_is_for_more_than_two_decades(values: list[float], is_log: bool) -> None:
    assert curve_of(series(values)).spans_decades is is_log


def test_thinning_keeps_every_spike() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=50_000)
    values[12_345], values[40_001] = 1e6, -1e6
    values[20_000:20_500] = np.nan
    steps, kept = thinned(np.arange(50_000.0), values)
    assert len(kept) <= 2_000 and (np.diff(steps) >= 0).all()
    assert kept[steps == 12_345] == 1e6 and kept[steps == 40_001] == -1e6
    assert np.isnan(kept[(steps > 20_050) & (steps < 20_450)]).all()
    assert all(values[int(s)] == v or math.isnan(v) for s, v in zip(steps, kept, strict=True))


def test_smoothing_is_the_mean_of_a_window() -> None:
    values = np.random.default_rng(0).normal(loc=1e9, size=1_000)
    values[100:103] = np.nan
    found = smoothed(values)
    assert found is not None
    half = 1_000 // 50 // 2
    for place in (0, 5, 99, 104, 500, 999):
        window = values[max(0, place - half) : place + half + 1]
        assert found[place] == pytest.approx(np.nanmean(window), abs=1e-5)
    assert np.isnan(found[100:103]).all() and np.isfinite(np.delete(found, [100, 101, 102])).all()
    assert smoothed(values[:20]) is None


def test_isolated_points() -> None:
    values = np.array([1.0, np.nan, 2.0, np.nan, 3.0, 4.0])
    assert isolated(values).tolist() == [True, False, True, False, False, False]


def test_steps_in_words() -> None:
    assert steps_text([5]) == "step (5)"
    assert steps_text([5, 6, 7, 9]) == "4 steps (5-7, 9)"
    assert steps_text(list(range(0, 40, 2))) == "20 steps (0, 2, 4, 6, 8, 10, …)"
