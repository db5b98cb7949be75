"""The built wheel in a clean environment, used from a folder far from the checkout."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import nightly

pytestmark = pytest.mark.timeout(600)  # some 15 s where nothing else runs

CHECKOUT = Path(__file__).parents[2]
EVERY_COMMAND = """
import contextlib, io
from poseidon.cli.main import COMMANDS, main
for name in COMMANDS:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main([name, "--help"])
        except SystemExit as end:
            assert not end.code, (name, end.code)
    assert f"usage: poseidon {name}" in out.getvalue(), name
print(len(COMMANDS), "commands")
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with this one's packages except Poseidon's checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(CHECKOUT / "src" / "poseidon", source / "src" / "poseidon", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", source, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    # Files of this kind inside the other folder, such as that of an editable install, are not followed.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, "--python", folder / "env" / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "env"


def test_the_wheel_works_far_from_the_checkout(environment: Path, tmp_path: Path) -> None:
    bin_folder = environment / "bin"
    python = bin_folder / "python"
    where = Path(run(python, "-c", "import poseidon; print(poseidon.__file__)", cwd=tmp_path).strip()).parent
    assert where.is_relative_to(environment)
    assert (where / "py.typed").exists()
    assert list((where / "caffe" / "schema").glob("*.pyi"))
    assert "poseidon COMMAND" in run(bin_folder / "poseidon", "--help", cwd=tmp_path)
    assert "usage: psd_run" in run(bin_folder / "psd_run", "--help", cwd=tmp_path)
    assert run(python, "-m", "poseidon", "--version", cwd=tmp_path).startswith("poseidon ")
    assert "commands" in run(python, "-c", EVERY_COMMAND, cwd=tmp_path)


@nightly.only  # tests/multiprocess/test_commands.py runs it in the suite, from the checkout
def test_quickstart_runs_from_any_folder(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    words = ("quickstart", "--workers", "2", "--epochs", "1", "--batch", "1000", "--machines", "0")
    assert "same result" in run(environment / "bin" / "poseidon", *words, cwd=tmp_path)


def test_caffe_is_imported_where_one_asked_for_it(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    python = environment / "bin" / "python"
    code = "import sys; sys.path.append('.'); import caffe; print(caffe.Net.__module__)"
    failed = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert "No module named 'caffe'" in failed.stderr
    run(python, "-m", "poseidon.caffe.as_caffe", "--install", tmp_path, cwd=tmp_path)
    assert run(python, "-c", code, cwd=tmp_path).startswith("poseidon.caffe")


def test_messages_name_only_files_that_ship() -> None:
    """Docstrings may name the guides; what a program prints must make sense without a checkout."""
    found = []
    for path in (CHECKOUT / "src" / "poseidon").rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
            if is_text and re.search(r"\b(docs|examples|scripts|benchmarks)/\w", str(node.value)):  # type: ignore[attr-defined]
                found.append(f"{path.name}:{node.lineno} {node.value}")  # type: ignore[attr-defined]
    assert found == []
