"""The examples run as a reader would run them, and meet bad input with a clear error."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHARED = ROOT.parent / "shared" / "data"


def run(
    script: str, *arguments: str, cwd: pathlib.Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def make_images(folder: pathlib.Path, count: int = 8) -> pathlib.Path:
    """Small JPEGs of two classes, train/CLASS/NUMBER.jpg."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / "train" / name).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(level - 30, level + 30, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / name / f"{index}.jpg")
    return folder


def zip_of(folder: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*.jpg")):
            archive.write(path, path.relative_to(folder))
    return target


@pytest.mark.parametrize("script", ["digits.py", "cifar10.py", "language_model.py"])
def test_help_and_length(script: str, tmp_path: pathlib.Path) -> None:
    done = run(script, "--help", cwd=tmp_path)
    assert done.returncode == 0 and f"python examples/{script}" in done.stdout
    assert len((EXAMPLES / script).read_text().splitlines()) < 120


def test_digits_reaches_97_percent(tmp_path: pathlib.Path) -> None:
    done = run("digits.py", "--run", "runs/a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("test accuracy ")[1].split("%")[0])
    assert accuracy >= 97.0
    assert "samples/s" in done.stdout and "report: runs/a/report.html" in done.stdout
    assert (tmp_path / "runs/a/report.html").exists()


def test_cifar10_from_a_folder(tmp_path: pathlib.Path) -> None:
    data = make_images(tmp_path / "data")
    done = run("cifar10.py", "--data", str(data), "--steps", "3", "--batch", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout


def test_cifar10_as_a_managed_service_calls_it(tmp_path: pathlib.Path) -> None:
    zip_of(make_images(tmp_path / "images"), tmp_path / "cifar10-train.zip")
    model = tmp_path / "model"
    model.mkdir()
    done = run(
        "cifar10.py",
        cwd=tmp_path,
        SM_CHANNEL_TRAINING=str(tmp_path),
        SM_HPS=json.dumps({"steps": 2, "batch": 4, "lr": 0.01}),
        SM_MODEL_DIR=str(model),
    )
    assert done.returncode == 0, done.stderr
    assert (model / "model.pt").stat().st_size > 0
    record = json.loads((tmp_path / "runs/cifar10/run.json").read_text())
    assert record["attempts"][-1]["config"]["optimizer"] == "SGD"


def test_cifar10_names_a_corrupt_entry_of_a_zip(tmp_path: pathlib.Path) -> None:
    archive = zip_of(make_images(tmp_path / "images"), tmp_path / "train.zip")
    data = bytearray(archive.read_bytes())
    middle = data.find(b"train/light/3.jpg") + 100
    data[middle] ^= 0xFF
    archive.write_bytes(data)
    done = run("cifar10.py", "--data", str(archive), "--steps", "1", cwd=tmp_path)
    assert done.returncode != 0
    assert "entry train/light/3.jpg is corrupt" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_cifar10_names_a_file_that_is_no_image(tmp_path: pathlib.Path) -> None:
    data = make_images(tmp_path / "data", count=2)
    for path in (data / "train" / "dark").iterdir():
        path.write_bytes(b"not a picture")
    done = run("cifar10.py", "--data", str(data), "--steps", "1", "--batch", "2", cwd=tmp_path)
    assert done.returncode != 0 and "dark" in done.stderr and "not a readable image" in done.stderr


def test_cifar10_without_data_says_what_it_looked_for(tmp_path: pathlib.Path) -> None:
    done = run("cifar10.py", "--data", str(tmp_path), cwd=tmp_path)
    assert done.returncode != 0 and "expected train/CLASS/*.jpg or a zip" in done.stderr


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside this checkout")
def test_cifar10_on_the_real_images(tmp_path: pathlib.Path) -> None:
    done = run("cifar10.py", "--steps", "5", "--batch", "32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_language_model_learns(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    sizes = ["--steps", "60", "--batch", "8", "--context", "16", "--width", "32", "--depth", "1"]
    done = run("language_model.py", "--text", str(text), *sizes, "--lr", "0.01", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loss = float(done.stdout.split("loss ")[1].split(";")[0])
    assert loss < 2.0  # a uniform guess over its 28 characters has 3.3


@pytest.mark.parametrize("content", ["", "short"])
def test_language_model_refuses_a_text_too_short(tmp_path: pathlib.Path, content: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(content)
    done = run("language_model.py", "--text", str(text), cwd=tmp_path)
    assert done.returncode != 0
    assert f"expected more than 65 characters, got {len(content)}" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


def test_notebook_runs_top_to_bottom(tmp_path: pathlib.Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    import nbformat

    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    plots = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(plots) == 1, "one plot, redrawn in place"
