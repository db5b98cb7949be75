from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.job import tell as report
from poseidon.job.interfaces import address_of, interface_with, reserve_port
from poseidon.launch import processes, protocol
from poseidon.launch.agent import look_around, network_variables
from poseidon.launch.hosts import Host
from poseidon.launch.lines import LONGEST, LineCutter
from poseidon.launch.output import JobOutput, prefixes, wants_colour
from poseidon.launch.places import Meeting, passed_on, place_workers, worker_environment
from poseidon.launch.script import check_module, check_script
from poseidon.launch.stopping import Stopping
from poseidon.observe.folder import RunFolder

PLACES = place_workers([Host("ape", slots=2), Host("bee")])
MEETING = Meeting("10.0.0.1", 29500, "s3cret", "run1", restart=2)


def test_workers_are_counted_machine_by_machine() -> None:
    assert [(place.rank, place.host, place.local_rank, place.local_size) for place in PLACES] == [
        (0, "ape", 0, 2),
        (1, "ape", 1, 2),
        (2, "bee", 0, 1),
    ]


def test_a_worker_finds_torchruns_variables_and_the_secret() -> None:
    env = worker_environment(PLACES[1], 3, 2, MEETING, {"PATH": "/bin", "RANK": "99"}, cores=8)
    assert env["PATH"] == "/bin"
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("1", "3", "1", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert (env["POSEIDON_SECRET"], env["POSEIDON_RESTART"]) == ("s3cret", "2")
    assert env["OMP_NUM_THREADS"] == "4", "two workers share eight cores"


def test_what_the_user_set_stands() -> None:
    env = worker_environment(PLACES[0], 3, 2, MEETING, {"OMP_NUM_THREADS": "7"}, cores=8)
    assert env["OMP_NUM_THREADS"] == "7"


def test_only_some_variables_travel_by_themselves() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "POSEIDON_CLUSTER": "c",
        "POSEIDON_SSH_OPTIONS": "-F x",
        "AWS": "k",
        "TF_CONFIG": "{}",
    }
    for_libraries = {"KERAS_BACKEND": "jax", "TF_USE_LEGACY_KERAS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "-f"}
    travel = {"NCCL_DEBUG": "INFO", "POSEIDON_CLUSTER": "c", "OMP_PROC_BIND": "close", **for_libraries}
    assert passed_on({**environ, **travel}, {"AWS": "k"}) == {**travel, "AWS": "k"}


def test_messages_survive_the_way_and_noise_does_not_disturb() -> None:
    line = protocol.pack(protocol.OUTPUT, rank=1, text="a\nb\u2028")
    assert line.count(b"\n") == 1
    assert protocol.unpack(line.rstrip(b"\n")) == {"kind": "output", "rank": 1, "text": "a\nb\u2028"}
    for noise in (b"Welcome to Debian", b"", b'{"kind": "exit"}', protocol.MARK + b"{", protocol.MARK + b"[1]"):
        assert protocol.unpack(noise) is None


@given(st.lists(st.binary(max_size=40)))
def test_however_bytes_arrive_the_lines_are_the_same(pieces: list[bytes]) -> None:
    data = b"".join(pieces).replace(b"\r", b"")
    cutter, whole = LineCutter(), LineCutter()
    cut = [line for piece in pieces for line in cutter.feed(piece.replace(b"\r", b""))]
    assert [*cut, *cutter.end()] == [*whole.feed(data), *whole.end()]


def test_a_progress_bar_leaves_its_last_state() -> None:
    cutter = LineCutter()
    assert list(cutter.feed(b"start\n 10%\r 20%\r")) == [("start", False), (" 20%", True)]
    assert list(cutter.feed(b" 30%\r")) == [(" 30%", True)]
    assert list(cutter.feed(b" 40%\n")) == [(" 40%", False)]
    assert list(cutter.feed(b" 50%\r")) == [(" 50%", True)]
    assert list(cutter.end()) == [(" 50%", False)]
    assert list(LineCutter().feed(b"windows\r\n")) == [("windows", False)]


def test_a_line_without_end_is_cut() -> None:
    cutter = LineCutter()
    lines = list(cutter.feed(b"x" * (2 * LONGEST + 5)))
    assert [len(text) for text, _ in lines] == [LONGEST, LONGEST]
    assert list(cutter.end()) == [("x" * 5, False)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it() -> None:
    assert wants_colour(Terminal(), {})
    assert not wants_colour(Terminal(), {"NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {})


def test_prefixes_are_of_one_width_and_name_hosts_where_there_are_several() -> None:
    assert prefixes(PLACES, colour=False) == ["[0 ape] ", "[1 ape] ", "[2 bee] "]
    assert prefixes(PLACES[:2], colour=False) == ["[0] ", "[1] "]
    coloured = prefixes(PLACES, colour=True)
    assert len(set(coloured)) == 3
    assert all("\x1b[" in one and one.endswith("\x1b[0m ") for one in coloured)


def test_lines_go_to_their_streams_and_logs(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    output = JobOutput(PLACES, tmp_path / "logs", out, err)
    assert not (tmp_path / "logs").exists()
    output.open_logs()
    output.line(0, "hello", is_error=False)
    output.line(2, "trouble", is_error=True)
    output.status("never seen off a terminal")
    output.say("done")
    output.close()
    assert out.getvalue() == "[0 ape] hello\n"
    assert err.getvalue() == "[2 bee] trouble\nposeidon run: done\n"
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "hello\n"
    assert (tmp_path / "logs" / "worker-2.log").read_text() == "trouble\n"


def test_the_live_line_gives_way_to_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    output = JobOutput(PLACES, None, terminal, terminal)
    output.status("0:01 | step 1")
    output.status("drawn too soon")
    output.line(0, "hello", is_error=False)
    output.close()
    text = terminal.getvalue()
    assert "drawn too soon" not in text
    before, _, after = text.partition("step 1")
    assert before.startswith("\r\x1b[2K")
    assert after.startswith("\r\x1b[2K")
    assert after.endswith("hello\n")


def test_a_status_of_two_lines_is_removed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    output = JobOutput(PLACES, None, terminal, terminal)
    output.status("0:01 | step 1\nlimited by the wire")
    output.line(0, "hello", is_error=False)
    output.close()
    assert terminal.getvalue().partition("the wire")[2].startswith("\r\x1b[2K\x1b[1A\r\x1b[2K")


def test_logs_that_cannot_be_written_are_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the log file"):
        JobOutput(PLACES, tmp_path / "file", io.StringIO(), io.StringIO()).open_logs()


def test_two_jobs_do_not_write_to_one_folder_of_logs(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def writing(is_shared: bool = False) -> Iterator[JobOutput]:
        folder = RunFolder(tmp_path / "logs", is_shared)
        output = JobOutput(PLACES, tmp_path / "logs", io.StringIO(), io.StringIO(), folder)
        try:
            output.open_logs()
            yield output
        finally:
            output.close()
            folder.close()

    with writing() as output:
        refused = pytest.raises(ConfigError, match=r"another job is writing its logs to .*logs; give each")
        with refused, writing():
            pass
        with writing(is_shared=True):  # another machine of the same job
            pass
        output.open_logs(restart=1)
    with writing():
        pass


def test_scripts_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no script .*a\.py \(no such file\)"):
        check_script(tmp_path / "a.py")
    with pytest.raises(ConfigError, match="a directory; use -m"):
        check_script(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\ndef f(:\n    pass\n")
    with pytest.raises(ConfigError, match=r"a\.py:2: invalid syntax: def f\(:"):
        check_script(tmp_path / "a.py")
    (tmp_path / "a.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(ConfigError, match=r"a\.py: invalid or missing encoding"):
        check_script(tmp_path / "a.py")
    (tmp_path / "a.py").write_text("'\\d'\nimport no_such_module_at_all\n")
    check_script(tmp_path / "a.py")


def test_modules_are_looked_for(tmp_path: Path) -> None:
    check_module("json.tool", tmp_path)
    with pytest.raises(ConfigError, match="there is no module 'my_training'"):
        check_module("my_training.main", tmp_path)
    (tmp_path / "my_training").mkdir()
    check_module("my_training.main", tmp_path)
    with pytest.raises(ConfigError, match="not the name of a module"):
        check_module("train.py --lr", tmp_path)


def test_the_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 4711 192.0.2.9 22")
    asked = {"directory": str(tmp_path), "script": None, "interface": "", "via_ssh": True}
    seen = look_around(asked)
    assert (seen["address"], seen["seen_from"], seen["directory"]) == ("192.0.2.9", "192.0.2.1", str(tmp_path))
    here = look_around({**asked, "via_ssh": False})
    assert (here["address"], here["seen_from"]) == ("", ""), "that login was the user's, not ours"
    assert look_around({**asked, "interface": "lo"})["address"] == "127.0.0.1"
    with pytest.raises(ConfigError, match="there is no directory"):
        look_around({**asked, "directory": str(tmp_path / "none")})


def test_traffic_stays_on_the_interface_of_the_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.200") == ""
    variables = network_variables("127.0.0.1")
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["POSEIDON_WIRE_IP"] == "127.0.0.1"
    assert "NCCL_SOCKET_IFNAME" not in variables
    assert network_variables("") == {}
    with pytest.raises(ConfigError, match=r"interface 'eth77' has no address.*lo \(127\.0\.0\.1\)"):
        address_of("eth77")


def test_ports_are_free_or_refused() -> None:
    with reserve_port("127.0.0.1") as holder:
        port = holder.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # Worker 0 listens there.
        refusal = pytest.raises(ConfigError, match=f"port {port} at 127.0.0.1 cannot be used here")
        with socket.create_server(("127.0.0.1", port)), refusal:
            reserve_port("127.0.0.1", port)
    with reserve_port("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port
    with pytest.raises(ConfigError, match=r"address 192\.0\.2\.200 cannot be used here"):
        reserve_port("192.0.2.200")


def test_a_request_to_stop_is_noted_and_does_not_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stopping(every=2) as stop:
        assert not stop.agreed()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.is_requested
        assert stop.agreed()
        assert not stop.agreed(), "asked every second time only"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_on_another_thread_runs_without_hearing_signals() -> None:
    def loop() -> bool:
        with Stopping() as stop:
            return stop.agreed()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(loop).result() is False


def test_a_worker_tells_the_launcher_through_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    try:
        report.tell(step=0)
        monkeypatch.setenv(report.VARIABLE, report.name_pipe(writing))
        report.tell(step=3, doing="in forward")
        assert report.parse(os.read(reading, 4096)) == {"step": 3, "doing": "in forward"}
        for _ in range(10_000):
            report.tell(step=4, doing="nobody reads, nobody waits")
        monkeypatch.setenv(report.VARIABLE, f"{writing}:1")
        report.tell(step=5)
        monkeypatch.setenv(report.VARIABLE, "nonsense")
        report.tell(step=5)
        assert b'"step": 5' not in os.read(reading, 1 << 20)
    finally:
        os.close(reading)
        os.close(writing)
    assert report.parse(b"noise") == {}
    assert report.parse(b"[1]") == {}


def test_a_busy_machine_of_the_launchers_own_is_not_lost() -> None:
    assert protocol.patience_s(protocol.SILENCE_S, is_local=True) == protocol.LOCAL_SILENCE_S
    assert protocol.patience_s(protocol.SILENCE_S, is_local=False) == protocol.SILENCE_S
    # In an elastic job a machine that was given up too early comes back.
    assert protocol.patience_s(protocol.ELASTIC_SILENCE_S, is_local=True) == protocol.ELASTIC_SILENCE_S
    assert protocol.beat_s(protocol.LOCAL_SILENCE_S) == protocol.ALIVE_S


HALF_ENDED = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("there", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_has_ended_when_all_its_threads_have() -> None:
    with subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.sched_yield()
        assert process.pid in processes.descendants(os.getpid()), "its other thread holds its files and locks"
        process.kill()
        process.wait()
        assert process.pid not in processes.descendants(os.getpid())
