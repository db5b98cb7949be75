from __future__ import annotations

import os
import shutil
import sys

import pytest
from caffe_golden import GOLDENS, Case

import poseidon.caffe


@pytest.fixture
def caffe(monkeypatch):
    """The module under test, also found by ``import caffe`` inside recorded scripts.

    CAFFE_GOLDEN_MODE=gpu in the environment replays the cases on a GPU.
    """
    monkeypatch.setitem(sys.modules, "caffe", poseidon.caffe)
    if os.environ.get("CAFFE_GOLDEN_MODE") == "gpu":
        poseidon.caffe.set_mode_gpu()
    yield poseidon.caffe
    poseidon.caffe.set_mode_cpu()


@pytest.fixture
def case(request, tmp_path, monkeypatch):
    """The golden case named by the test's parameter, copied, as working directory and on Python's path."""
    kind, name = request.param
    folder = tmp_path / name
    shutil.copytree(GOLDENS / kind / name, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return Case(kind, name)
