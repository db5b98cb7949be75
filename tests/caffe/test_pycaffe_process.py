"""Unedited scripts, logs, workers and the module's names."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import poseidon.caffe
from poseidon.caffe import as_caffe, process
from poseidon.caffe.proto import caffe_pb2
from poseidon.errors import ConfigError, UnsupportedError

SCRIPT = """
import sys
sys.path.insert(0, "/caffe/python")
import numpy as np
import caffe, caffe.draw, caffe.proto.caffe_pb2
from caffe import layers as L, params as P
from caffe.proto import caffe_pb2
from caffe.coord_map import crop
from caffe._caffe import BlobVec
from google.protobuf import text_format

class Double(caffe.Layer):
    def setup(self, bottom, top):
        self.factor = float(self.param_str)
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)
    def forward(self, bottom, top):
        top[0].data[...] = self.factor * bottom[0].data
    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = self.factor * top[0].diff

if __name__ == "__main__":
    caffe.set_mode_cpu()
    n = caffe.NetSpec()
    n.data = L.Input(shape=dict(dim=[2, 3]))
    n.twice = L.Python(n.data, module="script", layer="Double", param_str=sys.argv[1])
    param = n.to_proto()
    param.force_backward = True
    with open("net.prototxt", "w") as f:
        f.write(str(param))
    net = caffe.Net("net.prototxt", caffe.TEST)
    net.blobs["data"].data[...] = 1
    print(net.forward()["twice"].sum(), net.backward(twice=np.ones((2, 3)))["data"].sum(), sys.argv, __file__)
"""


def run(folder, *arguments, **environment):
    command = [sys.executable, "-m", "poseidon.caffe.as_caffe", *arguments]
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_an_unedited_script_runs(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "script.py", "2.5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "15.0 15.0 ['script.py', '2.5'] script.py\n"
    line = next(line for line in done.stderr.splitlines() if "Network initialization done." in line)
    assert re.match(r"I\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ \w+\.cpp:\d+\] Network", line)
    assert run(tmp_path, "script.py", "1", GLOG_minloglevel="2").stderr == ""


def test_a_script_that_fails_or_is_missing_says_so(tmp_path):
    (tmp_path / "bad.py").write_text("import sys; sys.exit(7)")
    assert run(tmp_path, "bad.py").returncode == 7
    assert "no script nowhere.py" in run(tmp_path, "nowhere.py").stderr
    assert "usage" in run(tmp_path).stderr


PLAIN = """
import caffe.io
from caffe import layers as L
from caffe.proto import caffe_pb2
import caffe
print(caffe.__name__, caffe.io.__name__, caffe_pb2.NetParameter.__name__, L.ReLU.__name__ is not None)
"""


def test_a_plain_import_of_caffe_is_ours_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "caffe", raising=False)
    assert "imports poseidon.caffe now" in as_caffe.place(str(tmp_path))
    source = str(Path(poseidon.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PLAIN]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("poseidon.caffe poseidon.caffe.io NetParameter True\n", "")
    assert "removed" in as_caffe.remove(str(tmp_path))
    with pytest.raises(ConfigError, match="was not written by --install"):
        as_caffe.remove(str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "caffe.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"a module caffe already, .*other/caffe\.py"):
        as_caffe.place(str(tmp_path))


def test_another_caffe_is_not_replaced_behind_its_back(monkeypatch):
    other = type(sys)("caffe")
    other.__file__ = "/opt/caffe/__init__.py"
    monkeypatch.setitem(sys.modules, "caffe", other)
    with pytest.raises(ConfigError, match=re.escape(other.__file__)):
        as_caffe.install()


def test_every_name_of_pycaffe_is_there():
    module = (
        "AdaDeltaSolver AdaGradSolver AdamSolver Classifier Detector Layer NCCL Net NetSpec NesterovSolver "
        "RMSPropSolver SGDSolver TEST TRAIN Timer __version__ get_solver has_nccl init_log io layer_type_list layers "
        "log params set_device set_mode_cpu set_mode_gpu set_multiprocess set_random_seed set_solver_count "
        "set_solver_rank solver_count solver_rank to_proto"
    )
    net = (
        "backward after_backward after_forward before_backward before_forward blob_loss_weights blobs bottom_names "
        "clear_param_diffs copy_from forward forward_all forward_backward_all inputs layer_dict layers load_hdf5 "
        "outputs params reshape save save_hdf5 set_input_arrays share_with top_names _forward _backward _blobs "
        "_blob_names _layer_names _inputs _outputs _bottom_ids _top_ids _blob_loss_weights _set_input_arrays"
    )
    assert not [name for name in module.split() if not hasattr(poseidon.caffe, name)]
    # Attributes made when a net is built are not on the class.
    assert [name for name in net.split() if not hasattr(poseidon.caffe.Net, name)] == ["layers"]
    assert caffe_pb2.TRAIN == poseidon.caffe.TRAIN
    assert caffe_pb2.NetParameter is type(poseidon.caffe.NetSpec().to_proto())


def test_the_log_is_shown_from_a_level_on(capsys, monkeypatch):
    logger = logging.getLogger("poseidon.caffe")
    monkeypatch.setattr(logger, "handlers", [])
    before = logger.level
    try:
        process.init_log(1)
        process.log("hidden")
        logger.warning("shown %d", 3)
        process.init_log()
        process.log("now shown")
    finally:
        logger.setLevel(before)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^(.).* (\S+):\d+\] ", r"\1 \2 ", line) for line in lines] == [
        "W test_pycaffe_process.cpp shown 3",
        "I test_pycaffe_process.cpp now shown",
    ]


def test_the_place_among_workers_comes_from_the_launcher_or_the_script(monkeypatch):
    monkeypatch.setattr(process, "_place", process._Place())
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert (process.solver_rank(), process.solver_count()) == (0, 1)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (process.solver_rank(), process.solver_count()) == (2, 4)
    process.set_solver_rank(1)
    process.set_solver_count(3)
    process.set_multiprocess(True)
    assert (process.solver_rank(), process.solver_count()) == (1, 3)


def test_what_is_not_offered_says_what_to_do_instead():
    assert not poseidon.caffe.has_nccl()
    with pytest.raises(UnsupportedError, match="several workers"):
        poseidon.caffe.NCCL(None, b"uid")


def test_a_timer_counts_milliseconds():
    timer = poseidon.caffe.Timer()
    timer.start()
    total = float(np.arange(1000).sum())
    timer.stop()
    assert timer.ms > 0
    assert total == 499500


MEMORY = (
    'layer { name: "m" type: "MemoryData" top: "data" top: "label"'
    " memory_data_param { batch_size: 2 channels: 1 height: 1 width: 3 } }"
)


def test_input_arrays_are_handed_out_in_batches(tmp_path):
    (tmp_path / "net.prototxt").write_text(MEMORY)
    net = poseidon.caffe.Net(str(tmp_path / "net.prototxt"), poseidon.caffe.TEST)
    rows = np.arange(12, dtype=np.float32).reshape(4, 1, 1, 3)
    net.set_input_arrays(rows, np.arange(4, dtype=np.float32))
    for first in (0, 2, 0):
        out = net.forward()
        np.testing.assert_array_equal(out["data"], rows[first : first + 2])
        np.testing.assert_array_equal(out["label"].ravel(), [first, first + 1])
    with pytest.raises(ConfigError, match="multiple"):
        net.set_input_arrays(rows[:3], np.zeros(3, np.float32))


def test_input_arrays_need_a_layer_that_takes_them(tmp_path):
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 } } }'
    )
    net = poseidon.caffe.Net(str(tmp_path / "net.prototxt"), poseidon.caffe.TEST)
    with pytest.raises(ConfigError, match=r"MemoryData.*'in' \(Input\)"):
        net.set_input_arrays(np.zeros((1, 1, 1, 1), np.float32), np.zeros(1, np.float32))


def test_loss_weights_are_named_and_backward_may_come_first(tmp_path):
    (tmp_path / "net.prototxt").write_text(
        "force_backward: true\n"
        'layer { name: "in" type: "Input" top: "a" top: "b" input_param { shape { dim: 2 dim: 3 } } }'
        'layer { name: "ip" type: "InnerProduct" bottom: "a" top: "ip" inner_product_param { num_output: 3'
        ' weight_filler { type: "constant" value: 2 } } }'
        'layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "b" top: "loss" loss_weight: 0.5 }'
    )
    net = poseidon.caffe.Net(str(tmp_path / "net.prototxt"), poseidon.caffe.TRAIN)
    assert net.blob_loss_weights == {"a": 0, "b": 0, "ip": 0, "loss": 0.5}
    net.blobs["ip"].diff[...] = 1
    diffs = net.backward(start="ip", end="ip")
    np.testing.assert_array_equal(diffs["a"], np.full((2, 3), 6))
