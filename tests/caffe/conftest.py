from __future__ import annotations

import shutil
import sys

import pytest
from caffe_golden import GOLDENS, Case

import poseidon.caffe


@pytest.fixture
def caffe(monkeypatch):
    """The module under test, also found by ``import caffe`` inside recorded scripts."""
    monkeypatch.setitem(sys.modules, "caffe", poseidon.caffe)
    poseidon.caffe.set_mode_cpu()
    return poseidon.caffe


@pytest.fixture
def case(request, tmp_path, monkeypatch):
    """The golden case named by the test's parameter, copied, as working directory and on Python's path."""
    kind, name = request.param
    folder = tmp_path / name
    shutil.copytree(GOLDENS / kind / name, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return Case(kind, name)
