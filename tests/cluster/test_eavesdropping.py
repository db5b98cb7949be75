"""What somebody at the switch can read of a job: everything without encryption, nothing of the training with it.

The control comes first: the same search finds inputs, gradients, weights and tables when nothing is encrypted.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from eavesdrop import Eavesdropper, End, Flow, Haystack, Heard, reassemble, runs_of, sort, texts, windows_of
from sshd import serving

import nightly
from poseidon.lab import Job, Lab
from poseidon.lab.job import JobOptions
from poseidon.wire.message import VERSION
from run_jobs import Started

pytestmark = pytest.mark.cluster

PROGRAM = str(Path(__file__).with_name("eavesdropped.py"))
ELASTIC = str(Path(__file__).with_name("eavesdropped_elastic.py"))
MODES = ("short", "split", "distribute", "server", "ps")
CARRIED = {
    "allreduce": ("gradients", "weights"),
    "short": ("inputs", "rows", "gradients", "weights"),
    "split": ("gradients", "weights"),
    "distribute": ("inputs", "rows", "gradients", "weights"),
    "server": ("gradients", "weights"),
    "ps": ("changes", "values"),
    "elastic": ("weights", "moments"),
}
"""What each way of training sends as it is."""
ROUTES = {
    "allreduce": "allreduce",
    "short": "factors rows sharded tied",
    "split": "sharded split",
    "distribute": "factors rows sharded tied",
    "server": "served split",
}

IN_STORE = [
    r'\{"host": "machine\d", "address": \["10\.77\.0\.\d", \d+\], "fingerprint": "[0-9a-f]{16}", "encrypts": true, '
    r'"nonce": "[0-9a-f]{32}", "problem": ""\}',
    r".?(/default_pg)?/0//poseidon/\d+/\d+/(hello/)?\d.{0,2}",
]
"""All that Poseidon puts into torch's store, as SECURITY.md says: addresses, host names, random numbers."""


def found_of(folder: Path, heard: Heard) -> dict[tuple[str, str], int]:
    """Return how many pieces of each kind of data the streams show."""
    haystack, everything = Haystack(heard.all), b"|".join(heard.all)
    found: dict[tuple[str, str], int] = {}
    for path in sorted(folder.glob("*.npy")):
        mode, kind, _ = path.stem.split("-")
        values = np.load(path)
        if kind == "rows":
            count = sum(run in everything for run in runs_of(values)[-20:])
        else:
            count = haystack.count(windows_of(values))
        found[mode, kind] = found.get((mode, kind), 0) + count
    return found


def check_silent(folder: Path, heard: Heard, modes: Sequence[str] = MODES) -> None:
    """Check that nothing of a job that encrypts can be read, apart from what is left in torch's store."""
    found = found_of(folder, heard)
    assert set(found) >= {(mode, kind) for mode in modes for kind in CARRIED[mode]}
    assert not {what for what, count in found.items() if count}, "readable"
    secret = (folder / "secret").read_bytes()
    forms = [secret, secret.hex().encode()]
    if re.fullmatch(rb"[0-9a-f]+", secret):
        forms.append(bytes.fromhex(secret.decode()))
    assert not any(form in one for form in forms for one in heard.all)
    check_store(heard)


def check_store(heard: Heard) -> None:
    """Check that what can be read is torch's own, and what Poseidon leaves in the store; nothing in other protocols."""
    readable = [one for some in heard.readable.values() for one in some]
    assert not any(magic in one for magic in (b"poseidn1", b"PW" + bytes([VERSION])) for one in readable)
    # Of gloo's random numbers four in a row may be printable, one of them a brace; eight are not.
    ours = [
        text for one in readable for text in texts(one) if re.search(r"^.*[{}].*$(?<=.{8})|poseidon|[a-z]+\":", text)
    ]
    odd = [text for text in ours if not any(re.fullmatch(pattern, text) for pattern in IN_STORE)]
    assert not [text for text in odd if not re.search(r'torchelastic|torch\.rendezvous|/none/|"role":', text)], odd
    # gloo connects and counts; there is nothing for it to carry.
    assert sum(map(len, readable)) < 50_000


def check_routes(out: str) -> None:
    for mode in MODES:
        if mode != "ps":
            assert f"routes {mode} {ROUTES[mode]}" in out


def test_without_encryption_the_search_finds_everything(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, str(tmp_path), *ROUTES, "ps"]
    with Lab(machines=2) as lab, Eavesdropper(lab) as ear:
        result = Job(lab, command, JobOptions(timeout_s=100)).run()
    assert result.status == 0, result.reason
    heard = sort(ear.streams())
    found = found_of(tmp_path, heard)
    expected = [(mode, kind) for mode in ("allreduce", *MODES) for kind in CARRIED[mode]]
    assert not [one for one in expected if found[one] < 5], found
    everything = b"|".join(heard.all)
    for text in (b"machine1", b"poseidn1", b"PW" + bytes([VERSION]), b'"fingerprint"'):
        assert text in everything
    # Not even now: it is never sent.
    assert (tmp_path / "secret").read_bytes() not in everything


def test_an_encrypted_job_of_poseidon_run_shows_nothing(tmp_path: Path) -> None:
    with Lab(machines=2) as lab, serving(lab, tmp_path) as ssh, Eavesdropper(lab) as ear:
        words = ["--quiet", "--log-dir", "none", "--hosts", "machine0,machine1", PROGRAM, tmp_path]
        env = {**ssh.env, "POSEIDON_WIRE_ENCRYPT": "1"}
        job = Started(words, tmp_path, env, lambda command, **options: lab.spawn(0, command, **options))
        ended = job.end()
    assert ended.status == 0, ended.err
    check_routes(ended.out)
    check_silent(tmp_path, sort(ear.streams()))


@pytest.mark.parametrize("encrypts", nightly.amount([True], [False, True]))
def test_an_elastic_job_hands_its_state_to_a_worker_that_joins_unseen_if_it_encrypts(
    encrypts: bool, tmp_path: Path
) -> None:
    with Lab(machines=2) as lab, serving(lab, tmp_path) as ssh, Eavesdropper(lab) as ear:
        words = ["--quiet", "--log-dir", "none", "--nodes", "1:2", "--hosts", "machine0,machine1"]
        env = {**ssh.env, "POSEIDON_WIRE_ENCRYPT": str(int(encrypts)), "OMP_NUM_THREADS": "1"}
        job = Started([*words, ELASTIC, tmp_path], tmp_path, env, lambda command, **kw: lab.spawn(0, command, **kw))
        ended = job.end(limit_s=100)
    assert ended.status == 0, ended.err
    assert (tmp_path / "joined").exists(), "nobody came in the place of the worker that was killed"
    heard = sort(ear.streams())
    if encrypts:
        check_silent(tmp_path, heard, ["elastic"])
    else:
        found = found_of(tmp_path, heard)
        assert all(found["elastic", kind] > 1000 for kind in CARRIED["elastic"]), found


@nightly.only
def test_an_encrypted_job_of_torchrun_with_a_secret_file_shows_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "given"
    secret.touch(mode=0o600)
    secret.write_text("a secret for the workers of torchrun\n")
    env = {**os.environ, "POSEIDON_WIRE_ENCRYPT": "1", "POSEIDON_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    env["GLOO_SOCKET_IFNAME"] = "eth0"
    env.pop("POSEIDON_SECRET", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-port=29400"]
    with Lab(machines=2) as lab, Eavesdropper(lab) as ear:
        place = [f"--master-addr={lab.address(0)}", PROGRAM, str(tmp_path)]
        jobs = [
            lab.spawn(rank, [*command, f"--node-rank={rank}", *place], env, stdout=subprocess.PIPE) for rank in range(2)
        ]
        outs = [job.communicate(timeout=100)[0].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert (tmp_path / "secret").read_bytes() == secret.read_bytes().strip()
    check_routes(outs[0])
    check_silent(tmp_path, sort(ear.streams()))


def _frame(flow: Flow, number: int, data: bytes, is_first: bool = False) -> bytes:
    ports = flow.source.port.to_bytes(2, "big") + flow.target.port.to_bytes(2, "big")
    tcp = ports + number.to_bytes(4, "big") + bytes(4) + bytes([0x50, 2 if is_first else 16]) + bytes(6)
    addresses = b"".join(socket.inet_aton(end.address) for end in flow)
    size = (20 + len(tcp) + len(data)).to_bytes(2, "big")
    return bytes(12) + b"\x08\x00\x45\x00" + size + bytes(5) + b"\x06" + bytes(2) + addresses + tcp + data


def test_streams_are_put_together_from_packets_in_any_order() -> None:
    flow = Flow(End("10.0.0.1", 1000), End("10.0.0.2", 2000))
    start = 2**32 - 4
    frames = [
        _frame(flow, start - 1, b"", is_first=True),
        _frame(flow, (start + 6) % 2**32, b"world"),
        _frame(flow, start, b"hel"),
        _frame(flow, start, b"hello "),
        _frame(flow, (start + 6) % 2**32, b"world"),
    ]
    assert reassemble(frames) == {flow: [b"hello world"]}
    with pytest.raises(AssertionError, match="hole at 0"):
        reassemble(frames[:2])


@nightly.only
@pytest.mark.parametrize("script", ["lbfgs.py", "by_hand.py", "tf2_loop.py", "keras_digits.py"])
def test_an_encrypted_script_that_knows_nothing_of_workers_shows_nothing(script: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "auto_scripts" / script
    with Lab(machines=2) as lab, serving(lab, tmp_path) as ssh, Eavesdropper(lab) as ear:
        words = ["--quiet", "--log-dir", "none", "--hosts", "machine0,machine1", "--auto", path]
        env = {**ssh.env, "POSEIDON_WIRE_ENCRYPT": "1"}
        job = Started(words, tmp_path, env, lambda command, **options: lab.spawn(0, command, **options))
        ended = job.end(limit_s=300)
    assert ended.status == 0, ended.err
    heard = sort(ear.streams())
    check_store(heard)
    # Far less than the model.
    assert sum(len(one) for some in heard.readable.values() for one in some) < 20_000
    assert sum(map(len, heard.encrypted)) > 100_000
