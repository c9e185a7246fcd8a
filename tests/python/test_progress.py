"""Progress in its four displays, with a clock that the test turns."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tradewind import progress as progress_module
from tradewind.progress import Progress, Snapshot, line_of

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


class Loss:
    """A loss on a device: reading it is counted."""

    def __init__(self, value: float = 0.5) -> None:
        self.value, self.num_reads = value, 0

    def __float__(self) -> float:
        self.num_reads += 1
        return self.value


class Broken(io.StringIO):
    """A stream that was closed at the other end."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(
    total: int | None, seconds: float, num_batches: int, **options: Any
) -> tuple[list[str], Loss]:
    stream, clock, loss = io.StringIO(), Clock(), Loss()
    progress = Progress(total, stream=stream, mode="lines", clock=clock, **options)
    for batch in range(1, num_batches + 1):
        clock.now += seconds
        progress.update(step=batch * 10, samples=32, loss=loss, fields={"grad_norm": 1.25})
    progress.close()
    return stream.getvalue().splitlines(), loss


def test_lines_come_each_ten_seconds_with_the_first_and_the_last() -> None:
    found, loss = lines(100, seconds=1.0, num_batches=25, description="train")
    assert [int(re.search(r"batch (\d+)/100", line)[1]) for line in found] == [1, 11, 21, 25]  # type: ignore[index]
    assert found[1] == (
        "train: batch 11/100 step 110 samples/s 32 loss 0.5 eta 0:01:29 grad_norm 1.25"
    )
    assert loss.num_reads == 4


def test_the_last_line_is_not_repeated() -> None:
    found, _ = lines(None, seconds=10.0, num_batches=3)
    assert len(found) == 3
    assert found[0] == "batch 1 step 10 samples/s 3.2 loss 0.5 grad_norm 1.25"
    assert lines(5, seconds=1.0, num_batches=0)[0] == []


def test_lines_are_ascii_and_one_line_each() -> None:
    found, _ = lines(2, seconds=20.0, num_batches=2, description="époque\n1")
    assert len(found) == 2
    assert found[0].startswith("?poque 1: batch 1/2") and found[0].isascii()


def test_a_resumed_epoch_counts_on() -> None:
    found, _ = lines(100, seconds=20.0, num_batches=2, initial_batches=40)
    assert "batch 42/100" in found[-1]
    assert "eta 0:19:20" in found[-1]  # 58 batches at one each twenty seconds


def test_the_rate_is_of_the_last_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream=stream, mode="lines", clock=clock)
    for samples in (10, 1000, 1000):
        clock.now += 10
        progress.update(step=1, samples=samples)
    rates = [float(rate) for rate in re.findall(r"samples/s (\S+)", stream.getvalue())]
    assert rates == [1, 100, 100]


def test_a_loss_may_be_a_callable_or_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream=stream, mode="lines", clock=clock)
    progress.update(step=1, samples=1)
    clock.now += 10
    progress.update(step=2, samples=1, loss=lambda: Loss(0.25), fields={"phase": "warm\nup"})
    first, second = stream.getvalue().splitlines()
    assert "loss" not in first
    assert second.endswith("loss 0.25 phase warm up")


@pytest.mark.parametrize("mode", ["auto", "lines", "terminal"])
def test_trouble_with_the_display_never_reaches_the_training(mode: Any) -> None:
    clock = Clock()
    progress = Progress(10, stream=Broken(), mode=mode, clock=clock)
    for step in range(10):
        clock.now += 20
        progress.update(step=step, samples=1, loss=0.5)
    progress.close()
    progress.close()


def test_a_closed_stream_is_trouble_too() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(10, stream=stream, mode="lines", clock=clock)
    progress.update(step=1, samples=1)
    stream.close()
    clock.now += 20
    progress.update(step=2, samples=1)
    progress.close()
    Progress(10, stream=stream).close()


def test_a_loss_that_cannot_be_read_ends_the_display_only() -> None:
    def read() -> float:
        raise RuntimeError("CUDA error")

    progress = Progress(10, stream=io.StringIO(), mode="lines")
    progress.update(step=1, samples=1, loss=read)
    progress.close()


def test_an_interrupt_is_not_swallowed() -> None:
    def read() -> float:
        raise KeyboardInterrupt

    progress = Progress(10, stream=io.StringIO(), mode="lines")
    with pytest.raises(KeyboardInterrupt):
        progress.update(step=1, samples=1, loss=read)


def test_off_shows_and_reads_nothing() -> None:
    stream, loss, clock = io.StringIO(), Loss(), Clock()
    with Progress(10, stream=stream, mode="off", clock=clock) as progress:
        for step in range(5):
            clock.now += 100
            progress.update(step=step, samples=1, loss=loss)
    assert stream.getvalue() == "" and loss.num_reads == 0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="auto, terminal, lines, notebook, off"):
        Progress(1, mode="bar")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more"):
        Progress(-1)


def test_auto_is_lines_off_a_terminal_and_a_bar_on_it() -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream) as progress:
        progress.update(step=1, samples=1)
    assert stream.getvalue().splitlines()[0].startswith("batch 1/10")
    terminal = Terminal()
    with Progress(10, stream=terminal) as progress:
        progress.update(step=1, samples=1)
    assert "\x1b[" in terminal.getvalue()


SHOWN = """
import sys, time
from tradewind.progress import Progress
progress = Progress(40, description="epoch [1/3]")
for step in range(1, 41):
    progress.update(step=step, samples=64, loss=lambda: 1 / step, fields={"grad_norm": 1.25})
    if step == 20:
        print("a word from the user")
    time.sleep(0.01)
progress.close()
"""


def on_a_terminal(code: str, columns: int) -> str:
    """What `code` writes to a real terminal of that width."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=slave,
        stderr=slave,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(slave)
    data = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # EIO: the terminal's other end closed
            break
        if not piece:
            break
        data += piece
    os.close(master)
    assert process.wait() == 0, data
    return data.decode()


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_the_bar_fits_its_terminal(columns: int) -> None:
    text = ANSI.sub("", on_a_terminal(SHOWN, columns))
    drawn = [line for line in re.split(r"[\r\n]+", text) if "40/40" in line]
    assert drawn and all(len(line) <= columns for line in drawn)
    assert "a word from the user" in text
    assert "epoch [1/3]" in drawn[-1] and "━" in drawn[-1]
    if columns >= 80:
        for part in (r"samples/s \d+", r"loss 0\.025", r"eta 0:00:00"):
            assert re.search(part, drawn[-1])
    if columns >= 160:
        assert "grad_norm 1.25" in drawn[-1]


def test_the_bar_gives_the_cursor_back() -> None:
    text = on_a_terminal(SHOWN + "\nraise SystemExit", 80)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


class Handle:
    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    """IPython as a kernel has it, with its display recorded."""
    import IPython.display

    handle = Handle()
    shell = type("Shell", (), {"kernel": object()})()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", lambda *a, **k: handle)
    yield handle


def test_a_notebook_redraws_one_plot(notebook: Handle) -> None:
    import base64

    clock = Clock()
    stream = io.StringIO()
    progress = Progress(20, stream=stream, clock=clock, description="$a$_<b>")
    for step in range(1, 21):
        clock.now += 0.2
        loss = float("nan") if step == 4 else 1000.0 / step**3
        progress.update(step=step, samples=8, loss=loss)
    progress.close()
    assert stream.getvalue() == ""
    assert 6 <= len(notebook.shown) <= 9  # at most one each half second, and the last
    for data in notebook.shown:
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert notebook.shown[-1]["text/plain"].startswith("$a$_<b>: batch 20/20")


def test_a_long_notebook_thins_its_points(notebook: Handle) -> None:
    from tradewind import progress_plot

    plot = progress_plot.Plot()
    plot._picture = lambda title: ""  # type: ignore[method-assign]
    for step in range(5_000):
        plot.draw(Snapshot("", step, None, step, None, None, 0.5))
    assert 500 < len(plot._steps) <= 2_001
    assert plot._steps == sorted(plot._steps) and plot._steps[-1] == 4_999


def test_a_real_kernel_shows_one_picture(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    code = """
import sys
from tradewind.progress import Progress
class Clock:
    now = 0.0
    def __call__(self):
        self.now += 0.3
        return self.now
progress = Progress(6, clock=Clock())
for step in range(1, 7):
    progress.update(step=step, samples=4, loss=1.0 / step)
progress.close()
"""
    cells = [nbformat.v4.new_code_cell(code)]
    cells.append(nbformat.v4.new_code_cell("print('matplotlib.pyplot' in sys.modules)"))
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (shown,) = [out for out in book.cells[0].outputs if out["output_type"] == "display_data"]
    assert "image/png" in shown["data"]
    assert json.loads(json.dumps(shown["data"]["text/plain"])).startswith("batch 6/6")
    assert book.cells[1].outputs[0]["text"].strip() == "False"


def test_a_forked_child_draws_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w") as stream:
        clock = Clock()
        progress = Progress(10, stream=stream, mode="lines", clock=clock)
        progress.update(step=1, samples=1)
        child = os.fork()
        if child == 0:
            clock.now += 100
            progress.update(step=2, samples=1)
            progress.close()
            os._exit(0)
        os.waitpid(child, 0)
        progress.update(step=2, samples=1)
        progress.close()
    assert [line.split()[1] for line in path.read_text().splitlines()] == ["1/10", "2/10"]


def test_line_of_says_what_is_known() -> None:
    assert line_of(Snapshot("", 3, None, 7, None, None, None)) == "batch 3  step 7"
    full = Snapshot("t", 3, 9, 7, 1234.4, 3723.9, 0.12345, {"lr": 1e-4, "event": "ok"})
    assert line_of(full) == (
        "t: batch 3/9  step 7  samples/s 1234  loss 0.1235  eta 1:02:03  lr 0.0001  event ok"
    )


def test_progress_loads_nothing_heavy_until_it_is_shown() -> None:
    code = "import sys, tradewind.progress\n"
    code += "print(sorted({'torch', 'rich', 'matplotlib', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
    assert not progress_module.is_notebook()
