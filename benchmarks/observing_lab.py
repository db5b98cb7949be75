"""Runs ``observing_cost.py`` under ``poseidon run --page`` on emulated machines, and reads the page meanwhile.

    python benchmarks/observing_lab.py --machines 4 --rate 1gbit -- --model resnet18 --batch 8 --laps 20 --steps 3

What is behind ``--`` goes to ``observing_cost.py``. The launcher runs on the first machine and serves the page there.
In every observed lap a reader has the page's stream of events open, as a browser would; in the others it has not. How
many events it read is printed, and how much of a processor the launcher took with the page. The launcher logs in on the
other machines by the lab itself instead of by ssh, so neither ssh nor sshd is needed; nor is anything for the page,
which is served by Python's own library. Needs root, and the extra ``lab``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from poseidon.lab import Lab, gpu
from poseidon.lab.cluster import own_environment
from poseidon.lab.environment import INTERFACE, places, shared_gpu_environment

ADDRESS = re.compile(r"the page is at http://([\d.]+):(\d+)/\?token=(\S+)")
TICK = os.sysconf("SC_CLK_TCK")


class Reader:
    """Has the page open in the observed laps, and counts what comes."""

    def __init__(self, lab: Lab, laps: Path, launcher: int) -> None:
        self._lab = lab
        self._launcher = launcher
        self._laps = os.open(laps, os.O_RDWR)
        self._connection: socket.socket | None = None
        self._reading: threading.Thread | None = None
        self._stop = threading.Event()
        self._lap = ""
        self._since = (time.monotonic(), 0.0)
        self.page = ("", 0, "")
        """Address, port and token, once the launcher has said them."""
        self.events = 0
        self.bytes = 0
        self.laps = {"o": 0, "p": 0}
        self.seconds = {"o": 0.0, "p": 0.0}
        self.launcher_s = {"o": 0.0, "p": 0.0}
        """Of a processor, by kind of lap."""
        self._following = threading.Thread(target=self._follow)
        self._following.start()

    def close(self) -> None:
        """Close the page; what was counted stays."""
        self._stop.set()
        self._following.join()
        self._end_lap()
        self._close_page()
        os.close(self._laps)

    def _follow(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._laps], [], [], 0.2)[0]:
                continue
            word = os.read(self._laps, 1).decode()
            self._end_lap()
            if word == "o" and self._connection is None:
                self._open_page()
            elif word != "o":
                self._close_page()
            self._lap = word if word in self.laps else ""

    def _end_lap(self) -> None:
        now, used_s = time.monotonic(), _cpu_s(self._launcher)
        if self._lap:
            self.laps[self._lap] += 1
            self.seconds[self._lap] += now - self._since[0]
            self.launcher_s[self._lap] += used_s - self._since[1]
        self._since, self._lap = (now, used_s), ""

    def _open_page(self) -> None:
        host, port, token = self.page
        assert port, "the launcher has not said where the page is"
        self._connection = self._lab.connect(0, (host, port), timeout_s=10.0)
        self._connection.settimeout(None)
        self._connection.sendall(f"GET /stream?token={token} HTTP/1.0\r\n\r\n".encode())
        self._reading = threading.Thread(target=self._read, args=(self._connection,))
        self._reading.start()

    def _close_page(self) -> None:
        if self._connection is None or self._reading is None:
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reading.join()
        self._connection.close()
        self._connection = self._reading = None

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as stream:
            for line in stream:
                self.events += line.startswith(b"data: ")
                self.bytes += len(line)


def _cpu_s(process: int) -> float:
    """Return what a process has used of a processor so far."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


def stand_in(folder: Path, lab: Lab) -> Path:
    """Make a program that is called as ssh is, but starts its command on a machine of the lab; return its folder."""
    cases = " ".join(f"{lab.address(number)}) number={number};;" for number in range(lab.machines))
    script = folder / "ssh"
    script.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != -- ]; do shift; done\n'
        f'case "$2" in {cases} *) echo "could not resolve hostname $2" >&2; exit 255;; esac\n'
        f"exec {shlex.quote(sys.executable)} -m poseidon.cli lab exec --lab {lab.name} "
        '"$number" -- sh -c "$3"\n'
    )
    script.chmod(0o755)
    return folder


@contextlib.contextmanager
def running(lab: Lab, folder: Path, args: argparse.Namespace, mps: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the job on all machines of the lab."""
    hosts = ",".join(lab.address(number) for number in range(lab.machines))
    command = [sys.executable, "-m", "poseidon", "run", "--page", "--quiet", "--log-dir", str(folder / "run")]
    command += [
        "--hosts",
        hosts,
        "--interface",
        INTERFACE,
        str(Path(__file__).with_name("observing_cost.py").resolve()),
    ]
    command += ["--say-laps", str(folder / "laps"), "--output", str(folder / "laps.json"), *args.options]
    env = {**own_environment(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    env["PATH"] = f"{stand_in(folder, lab)}{os.pathsep}{env.get('PATH', '')}"
    if args.gpu == "share":
        env |= shared_gpu_environment(places(lab.machines, 1)[0], lab.name, mps)
    process = lab.spawn(0, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--gpu", choices=("none", "share"), default="none")
    parser.add_argument("--result", type=Path, help="everything as JSON")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="-- OPTIONS OF observing_cost.py")
    args = parser.parse_args()
    args.options = args.options[1:] if args.options[:1] == ["--"] else args.options
    with (
        tempfile.TemporaryDirectory() as text,
        Lab(machines=args.machines, rate=args.rate) as lab,
        gpu.sharing(lab.name, args.gpu == "share") as mps,
    ):
        folder = Path(text)
        os.mkfifo(folder / "laps")
        with running(lab, folder, args, mps) as process:
            assert process.stdout is not None
            with contextlib.closing(Reader(lab, folder / "laps", process.pid)) as reader:
                for line in process.stdout:
                    words = line.decode(errors="replace")
                    found = ADDRESS.search(words)
                    if found:
                        reader.page = found[1], int(found[2]), found[3]
                    else:
                        print(words, end="", flush=True)
                status = process.wait()
        result = folder / "laps.json"
        if status or not result.exists():
            return status or 1
        shares = {lap: reader.launcher_s[lap] / max(1e-9, reader.seconds[lap]) for lap in reader.laps}
        print(
            f"the page was open in {reader.laps['o']} laps, its reader got {reader.events} events, "
            f"{reader.bytes / 1e6:.2f} MB; launcher and page took {shares['o']:.1%} of a processor then, "
            f"{shares['p']:.1%} in the {reader.laps['p']} laps without"
        )
        if args.result:
            measured = json.loads(result.read_text())
            page = {"events": reader.events, "bytes": reader.bytes, "laps": reader.laps["o"]}
            lab_words = {"machines": args.machines, "rate": args.rate, "gpu": args.gpu}
            found_all = {"lab": lab_words, "page": page, "launcher_share": shares, **measured}
            args.result.write_text(json.dumps(found_all, indent=1) + "\n")
    if not reader.events:
        print("the page was not read: this is no measurement of a job with the page open", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
