"""``poseidon train``, ``test`` and ``time``: flags, log lines, several workers."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import poseidon.caffe as caffe
from poseidon.caffe.commands.train import add_arguments, launch_flags, worker_count, worker_flags
from poseidon.caffe.scoring import benchmark
from poseidon.errors import ConfigError, PoseidonError
from poseidon.job.world import World
from poseidon.launch.local import run_workers, worker_environment

LOGS = pytest.mark.parametrize("case", [pytest.param(("formats", "logs"), id="logs")], indirect=True)
# The same as `poseidon train ...`, for a process of its own.
TRAIN = """
import argparse, sys
from poseidon.caffe.commands import train
parser = argparse.ArgumentParser()
train.add_arguments(parser)
sys.exit(train.run(parser.parse_args(sys.argv[1:])))
"""


def parse(command, *flags):
    module = importlib.import_module(f"poseidon.caffe.commands.{command}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module, parser.parse_args(flags)


def poseidon(command, *flags):
    module, args = parse(command, *flags)
    return module.run(args)


def form(text):
    """Return the lines without what differs from run to run: prefix and numbers."""
    found = []
    for line in text.splitlines():
        line = re.sub(r"^[IWEF]\d+ [\d:.]+ +\d+ \S+:\d+\] ", "] ", line)
        line = re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "N", line)
        # Caffe builds a softmax layer inside its loss layer and says so; the class of data is told once per process.
        is_inner_layer = line == "] Creating layer loss" and found[-1:] == ["] loss -> loss"]
        if not is_inner_layer and not line.startswith("] Datatype class"):
            found.append(line)
    return found


@LOGS
@pytest.mark.parametrize(
    ("name", "command", "flags"),
    [
        ("train", "train", ["--solver=solver.prototxt"]),
        ("train_resume", "train", ["-solver", "solver.prototxt", "-snapshot=tiny_iter_20.solverstate"]),
        ("finetune", "train", ["--solver", "solver.prototxt", "--weights=tiny_iter_30.caffemodel"]),
        ("test", "test", ["-model=net.prototxt", "--weights", "tiny_iter_30.caffemodel", "--iterations=2"]),
        ("time", "time", ["--model", "net.prototxt", "--iterations", "5"]),
    ],
)
def test_logs_have_caffes_form(case, capfd, name, command, flags):
    assert poseidon(command, *flags) == 0
    assert form(capfd.readouterr().err) == form(Path(f"{name}.log").read_text())


@LOGS
def test_programs_that_read_logs_find_their_way(case, capfd):
    poseidon("train", "--solver=solver.prototxt")
    log = capfd.readouterr().err
    # What Caffe's own tools look for.
    stamp = re.compile(r"I(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6})\s+\d+ \w+\.cpp:\d+\] ")
    assert all(stamp.match(line) for line in log.splitlines() if "Iteration" in line or "net output" in line)
    assert re.search(r"solver\.cpp:\d+\] Solving tiny", log)
    assert re.findall(r"Iteration (\d+), lr = ([-+]?[0-9]*\.?[0-9]+)", log)[-1] == ("25", "0.05")
    train = re.findall(r"Iteration (\d+) \(([\d.]+) iter/s, ([\d.]+)s/5 iters\), loss = ([\d.e+-]+)", log)
    assert [int(row[0]) for row in train] == [0, 5, 10, 15, 20, 25]
    assert len(re.findall(r"Train net output #(\d+): (\S+) = ([\.\deE+-]+)", log)) == 6
    assert len(re.findall(r"Test net output #(\d+): (\S+) = ([\.\deE+-]+)", log)) == 8
    assert "\r" not in log, "no progress bar outside a terminal"


@LOGS
def test_stages_and_levels_reach_the_net(case, capfd):
    net = Path("net.prototxt")
    net.write_text(
        net.read_text()
        + 'layer { name: "extra" type: "Silence" bottom: "ip1" include { phase: TRAIN stage: "wide" min_level: 2 } }'
    )
    for flags, expected in (([], False), (["--stage=wide,other", "--level=2"], True)):
        assert poseidon("time", "--model=net.prototxt", "--iterations=1", *flags) == 0
        assert ("Creating Layer extra" in capfd.readouterr().err) is expected


@LOGS
def test_log_levels_and_folders(case, capfd, monkeypatch):
    monkeypatch.setenv("GLOG_minloglevel", "2")
    poseidon("test", "--model=net.prototxt", "--weights=tiny_iter_30.caffemodel", "--iterations=1")
    assert capfd.readouterr().err == ""
    monkeypatch.delenv("GLOG_minloglevel")
    poseidon("test", "--model=net.prototxt", "--weights=tiny_iter_30.caffemodel", "--iterations=1", "--log_dir=.")
    assert Path("caffe.INFO").read_text() == capfd.readouterr().err


@LOGS
def test_outputs_and_stats_files(case):
    poseidon("train", "--solver=solver.prototxt", "--net_outputs=out.csv", "--stats_path=stats.json")
    rows = [line.split(",") for line in Path("out.csv").read_text().splitlines()]
    assert rows[0] == ["net", "iteration", "seconds", "output", "value"]
    assert [(row[0], row[1], row[3]) for row in rows[1:4]] == [
        ("test 0", "0", "acc"),
        ("test 0", "0", "loss"),
        ("train", "0", "loss"),
    ]
    assert json.loads(Path("stats.json").read_text())["iterations"] == 30


def test_gflags_spellings():
    for flags in (["-svb=false"], ["--svb", "false"], ["--nosvb"], ["-nosvb"]):
        assert parse("train", *flags)[1].svb is False
    assert parse("train", "--svb", "--logtostderr=1")[1].svb is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--solver is missing"),
        (["--solver=s", "--snapshot=a", "--weights=b"], "but not both"),
        (["--solver=s", "--table_staleness=-1"], "counts iterations, 0 or more"),
        (["--solver=s", "--table_staleness=1", "--consistency_model=BSP"], "BSP allows none"),
        (["--solver=s", "--num_clients=2"], "needs --hostfile"),
        (["--solver=s", "--consistency_model=X"], "none of SSPPush"),
        (["--solver=s", "--gpu=x"], "--gpu 'x' is not understood"),
        (["--solver=s", "--workers=0"], "--workers is 0"),
        (["--solver=s", "--sigint_effect=jump"], "unknown sigint_effect 'jump'; known: none, snapshot, stop"),
        (["--solver=missing.prototxt"], "cannot read prototxt missing.prototxt"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(PoseidonError, match=message):
        poseidon("train", *flags)


def test_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("0 10.0.0.1 9999 # first\n\n1 10.0.0.2 9999\n")
    for flags, message in (
        (["--num_clients=3"], "names 2 machine"),
        (["--client_id=1"], "on the first machine alone"),
    ):
        with pytest.raises(PoseidonError, match=message):
            poseidon("train", "--solver=s", f"--hostfile={path}", *flags)
    with pytest.raises(PoseidonError, match="needs --hostfile"):
        poseidon("train", "--solver=s", "--num_clients=2")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = launch_flags(parser.parse_args(["--solver=s.prototxt", f"--hostfile={path}", "--num_clients=2"]))
    assert flags[:5] == ["--hostfile", str(path), "-m", "poseidon.cli", "train"]
    assert "--solver=s.prototxt" in flags
    assert not any(flag.startswith(("--hostfile=", "--num_clients", "--client_id", "--workers")) for flag in flags)


def test_how_many_workers():
    alone, member = World(), World(rank=1, size=4)
    assert worker_count(None, None, alone) == 1
    assert worker_count(3, None, alone) == 3
    assert worker_count(None, (0, 2), alone) == 2
    assert worker_count(None, (0, 2), member) == 1
    with pytest.raises(ConfigError, match="worker 1 of 4"):
        worker_count(2, None, member)


def test_workers_get_the_same_flags_but_their_number():
    _, args = parse("train", "--solver=s.prototxt", "--workers=4", "--nosvb", "--level=-1")
    flags = worker_flags(args)
    assert not any(flag.startswith("--workers") for flag in flags)
    _, again = parse("train", *flags)
    assert vars(again) == {**vars(args), "workers": None}


def test_worker_environment_is_torchruns():
    env = worker_environment(2, 4, 1234, {"OMP_NUM_THREADS": "3"})
    assert World.from_environment(env) == World(2, 4, 2, 4, "127.0.0.1", 1234)
    assert env["OMP_NUM_THREADS"] == "3"


def test_the_first_worker_that_fails_ends_the_others(capfd):
    command = "import os, signal, sys; sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()"
    assert run_workers([sys.executable, "-c", command], 3) == 3
    assert "worker 1 ended with status 3, the others were ended" in capfd.readouterr().err


def test_workers_end_with_their_launcher():
    # Both write to one pipe, so each line is one write: print() makes two where output is not buffered.
    worker = (
        "import os, signal; from poseidon.launch.local import follow_launcher; follow_launcher(); "
        "os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
    )
    launcher = f"from poseidon.launch.local import run_workers; run_workers([{sys.executable!r}, '-c', {worker!r}], 2)"
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert all(int(process.stdout.readline()) for _ in range(2))
        process.kill()
        # The workers hold the other end of this pipe: it ends when both are gone.
        assert process.stdout.read() == ""


@LOGS
def test_two_workers_train_and_stop_when_asked(case):
    solver = Path("solver.prototxt")
    solver.write_text(solver.read_text().replace("max_iter: 30", "max_iter: 1000000") + "snapshot_after_train: true\n")
    code = (
        "import sys; from poseidon.launch.local import run_workers; "
        f"flags = ['-c', {TRAIN!r}, '--solver=solver.prototxt', '--net_outputs=o.csv']; "
        "sys.exit(run_workers([sys.executable, *flags], 2))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "Iteration 20 " in line:
                process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    log = "".join(seen)
    assert "Plan of the exchange" in log
    assert log.count("Solving tiny") == 1, "only one worker logs"
    assert "Optimization stopped early." in log
    stopped_at = int(re.findall(r"Snapshotting solver state to binary proto file tiny_iter_(\d+)", log)[-1])
    assert stopped_at > 20
    assert Path(f"tiny_iter_{stopped_at}.caffemodel").exists()
    assert Path("o.csv").read_text().startswith("net,iteration")


def test_time_goes_backward_through_a_net_without_loss(tmp_path, monkeypatch):
    """As Caffe does: layers with parameters compute their gradients."""
    monkeypatch.chdir(tmp_path)
    Path("deploy.prototxt").write_text(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 5 } } } '
        'layer { name: "a" type: "Convolution" bottom: "x" top: "a" '
        "convolution_param { num_output: 4 kernel_size: 3 } } "
        'layer { name: "relu" type: "ReLU" bottom: "a" top: "a" } '
        'layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 5 } } '
        'layer { name: "p" type: "Softmax" bottom: "b" top: "p" }'
    )
    net = caffe.Net("deploy.prototxt", caffe.TEST)
    assert not any(layer.needs_backward for layer in net.layers)
    benchmark(net, 1)
    assert {name: [blob.has_diff for blob in blobs] for name, blobs in net.params.items()} == {
        "a": [True, True],
        "b": [True, True],
    }


@pytest.mark.parametrize("command", ["train", "test", "time"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_gpu_that_is_not_there_is_named_by_its_flag(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--gpu 0: this machine has no usable GPU; leave --gpu out to use the CPU$"):
        poseidon(command, "-gpu", "0", "--solver=s", "--model=m", "--weights=w")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_script_that_asks_for_a_gpu_computes_without_one(caplog):
    with caplog.at_level("WARNING", "poseidon.caffe"):
        caffe.set_mode_gpu()
    assert "no usable GPU: computing on the CPU" in caplog.text


def test_flags_of_the_original_are_accepted_or_explained():
    flags = [
        "--num_app_threads=1",
        "--num_table_threads",
        "2",
        "--init_thread_access_table=true",
        "--bg_idle_milli",
        "10",
    ]
    module, args = parse("train", *flags, "--nosuppression_on", "--numa_opt", "--snapshot_clock=-1")
    module.check_original_flags(args)
    assert "--num_table_threads=2" in worker_flags(args)
    for flag, message in (
        ("--num_app_threads=4", "--num_app_threads 4: every net .* use --workers"),
        ("--snapshot_dir=x", "--snapshot_dir x: set `snapshot_prefix`"),
        ("--resume_clock=7", "--resume_clock 7: name a .solverstate with --snapshot"),
    ):
        with pytest.raises(ConfigError, match=message):
            module.check_original_flags(parse("train", flag)[1])


def test_workers_of_this_machine_and_a_host_file_do_not_go_together(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    module, args = parse("train", "--workers=2", f"--hostfile={tmp_path / 'hosts'}")
    with pytest.raises(ConfigError, match=r"--workers 2 counts workers of this machine alone; in .*hosts, write"):
        module.check_original_flags(args)
