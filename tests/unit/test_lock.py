"""What is locked by hash is what ``constraints.txt`` pins and ``pyproject.toml`` needs."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lock():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_is_locked_in_the_version_that_is_tested(lock):
    pinned = lock.pinned()
    assert {"numpy", "psutil", "protobuf"} <= set(lock.wanted())
    assert {name: version for name, (version, _) in lock.locked().items()} == {
        name: pinned[name] for name in lock.wanted()
    }, "run python scripts/lock.py"


def test_the_file_is_what_the_script_writes_and_names_no_index(lock):
    text = lock.LOCK.read_text()
    assert text == lock.draw(lock.locked())
    assert "://" not in text


@pytest.mark.parametrize(
    ("file", "name", "version"),
    [
        ("psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.whl", "psutil", "7.2.2"),
        ("ml_dtypes-0.6.0-cp311-cp311-macosx_11_0_arm64.whl", "ml-dtypes", "0.6.0"),
        ("scikit-learn-1.9.1.tar.gz", "scikit-learn", "1.9.1"),
        ("psutil-7.2.2.tar.gz", "psutil", "7.2.2"),
        ("numpy_stubs-1.0-py3-none-any.whl", "numpy", None),
        ("numpy-stubs-1.0.tar.gz", "numpy", None),
    ],
)
def test_versions_are_read_from_the_names_of_files(lock, file, name, version):
    assert lock.version_of(file, name) == version


def test_a_page_of_an_index_is_read(lock, tmp_path):
    folder = tmp_path / "psutil"
    folder.mkdir()
    (folder / "index.html").write_text(
        f'<a href="../f/psutil-7.2.2.tar.gz#sha256={"a" * 64}">x</a><a href="psutil-7.2.1.tar.gz#sha256={"b" * 64}">'
        f'<a href="https://host/psutil-7.2.2-cp36-abi3-win32.whl#sha256={"c" * 64}"><a href="other">'
    )
    assert lock.offered(tmp_path.as_uri(), "psutil", "7.2.2") == {"a" * 64, "c" * 64}
    assert lock.offered(tmp_path.as_uri(), "numpy", "1.0") == set()
