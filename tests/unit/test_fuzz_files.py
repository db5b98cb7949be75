"""Damaged files and lines: every reader takes them or refuses them with one error of ours, never anything else."""

import contextlib
import io
import os
import warnings
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import ODD_VALUES, damaged, fuzz, odd_json, only_refused
from poseidon.engine.choices import FORMAT as CHOICE
from poseidon.engine.choices import Choices
from poseidon.errors import ConfigError, FrameError, ServerError
from poseidon.job.tell import parse
from poseidon.lab import state
from poseidon.launch.hosts import parse_hostfile, parse_hosts, read_cluster_file, read_hostfile
from poseidon.launch.places import place_workers
from poseidon.launch.protocol import pack as pack_line
from poseidon.launch.protocol import unpack as unpack_line
from poseidon.launch.run_settings import resolve
from poseidon.planning.cluster import Cluster
from poseidon.planning.profile import FORMAT, Profile, UnitProfile
from poseidon.tables import snapshot
from poseidon.tables.rows import Patch
from poseidon.tables.table_messages import read_patch, read_rows, write_patch, write_rows
from poseidon.tables.tables import TableSpec
from poseidon.units import Load, ParameterSpec, Unit
from poseidon.wire.message import Header, Kind, pack, unpack

PROFILE = Profile(
    "net",
    "cpu",
    8,
    (
        UnitProfile(Unit("fc", "linear", (ParameterSpec("fc.w", (8, 4), 4),)), Load(8.0), 0.1, 0.2),
        UnitProfile(Unit("table", "embedding", (ParameterSpec("t.w", (9, 4), 4),)), Load(3.0), 0.1, 0.2),
    ),
    (0, 1),
    (1, 0),
    0.01,
)
CLUSTER = {
    "hosts": [{"name": "a", "slots": 2, "env": {"A": "1"}, "port": 22}, "user@b:2"],
    "python": "/usr/bin/python3",
    "restarts": 1,
    "grace": 3.5,
}
ORIGINAL = {"worker_nodes": ["a", "b:9000", "a"], "master_node": "b", "virtualenv": "/v", "username": "u"}
CHOSEN = {"format": CHOICE, "name": "n", "tried": [{"name": "n", "predicted_s": 0.1, "measured_s": None}]}
TOML = b'hosts = ["a", "b:2"]\nrestarts = 2\n[env]\nA = "x"\n'
DENSE, SPARSE = TableSpec("t", 6, 2), TableSpec("t", 6, 9, sparse=True)
PATCHES = {
    DENSE: [Patch(np.array([1, 4]), np.ones((2, 2), np.float32)), Patch(np.array([0]), np.ones((1, 2), np.float32))],
    SPARSE: [Patch(np.array([1, 4]), np.ones(3, np.float32), np.array([0, 8, 2]), np.array([0, 2, 3]))],
}


def snapshot_bytes(tmp_path, spec):
    snapshot.save(tmp_path / "good.npz", spec, 3, PATCHES[spec])
    return (tmp_path / "good.npz").read_bytes()


def is_sound(spec, patches):
    """Whether rows can be put into a table: they exist, and once only."""
    rows = [row for patch in patches for row in patch.rows.tolist()]
    return len(set(rows)) == len(rows) and all(0 <= row < spec.rows for row in rows)


@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_snapshots_of_tables(spec, tmp_path):
    good = snapshot_bytes(tmp_path, spec)
    path = tmp_path / "bad.npz"

    @given(damaged(good))
    @fuzz(60)
    def check(content):
        path.write_bytes(content)
        with only_refused():
            clock, patches = snapshot.load(path, spec)
            whole = spec.make_rows()
            for patch in patches:
                whole.put(patch)
            assert is_sound(spec, patches)
            assert clock >= 0

    check()


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"rows_0": np.array([-1])}, "it names row -1"),
        ({"rows_0": np.array([6])}, "it names row 6; a table of 6 rows has 0 to 5"),
        ({"rows_0": np.array([1.0])}, "rows_0 is float64"),
        ({"values_0": np.ones((1, 1), np.float32)}, r"shape \(1, 1\), expected \(1, 2\)"),
        ({"values_0": np.ones((1, 2))}, "values are float64, expected float32"),
        ({"rows_0": np.array([[1]])}, "expected a list of int64"),
    ],
)
def test_rows_that_do_not_fit_a_table_are_not_loaded(arrays, match, tmp_path):
    about = b'{"rows": 6, "width": 2, "dtype": "float32", "sparse": false, "clock": 1, "patches": 1}'
    whole = {"rows_0": np.array([1]), "values_0": np.ones((1, 2), np.float32), **arrays}
    np.savez(tmp_path / "t.npz", about=np.frombuffer(about, np.uint8), **whole)
    with pytest.raises(ConfigError, match=match):
        snapshot.load(tmp_path / "t.npz", DENSE)


def test_snapshots_that_are_none_or_claim_too_much_are_refused(tmp_path):
    path = tmp_path / "t.npz"
    with pytest.raises(ConfigError, match=r"it is a folder, expected a file"):
        snapshot.load(tmp_path, DENSE)
    with pytest.raises(ConfigError, match=r"No such file"):
        snapshot.load(path, DENSE)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"t\.npz is not a snapshot of a table .*Table\.snapshot\(\) writes them"):
        snapshot.load(path, DENSE)
    np.savez_compressed(path, about=np.zeros(1 << 22, np.uint8))
    with pytest.raises(ConfigError, match="its parts are compressed"):
        snapshot.load(path, DENSE)
    giant = io.BytesIO()
    np.lib.format.write_array_header_1_0(giant, {"descr": "|u1", "fortran_order": False, "shape": (40 << 40,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("about.npy", giant.getvalue() + bytes(8))
    with only_refused(), pytest.raises(ConfigError, match="that is 43980465111040 bytes, and has 8"):
        snapshot.load(path, DENSE)


@given(odd_json({"format": FORMAT, **PROFILE.to_dict()}))
@fuzz(80)
def test_profiles(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with only_refused():
        profile = Profile.load_file(path)
        assert profile.size_bytes >= 0
        profile.with_batch(16)
        profile.scaled_to(1.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": [-8, 4]}, r"shape \(-8, 4\) of parameter 'fc.w' of unit 'fc' is -8, expected a whole number from 0"),
        ({"shape": [2**40, 2**40]}, "the number of values"),
        ({"shape": [8]}, "a linear one has a matrix first"),
        ({"itemsize": -4}, "itemsize of parameter 'fc.w'"),
    ],
)
def test_profiles_of_impossible_parameters_are_refused(change, match):
    data = PROFILE.to_dict()
    data["units"] = [dict(one, unit=dict(one["unit"])) for one in data["units"]]
    data["units"][0]["unit"]["parameters"] = [{"name": "fc.w", "shape": [8, 4], "itemsize": 4} | change]
    with pytest.raises(ConfigError, match=match):
        Profile.from_dict(data)


@given(odd_json(Cluster(4, 2).to_dict()))
@fuzz(60)
def test_clusters_for_plans(tmp_path, content):
    path = tmp_path / "cluster.json"
    path.write_bytes(content)
    with only_refused():
        assert Cluster.load(path).workers >= 1


@given(odd_json(CHOSEN))
@fuzz(60)
def test_stored_choices(tmp_path, content):
    choices = Choices(tmp_path)
    choices.key = "k"
    choices.path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with only_refused():
            found = choices.read()
            assert found is None or all(one["predicted_s"] >= 0 for one in found["tried"])


@pytest.mark.parametrize("data", [CLUSTER, ORIGINAL], ids=["ours", "original"])
def test_cluster_files(data, tmp_path):
    path = tmp_path / "cluster.json"

    @given(odd_json(data))
    @fuzz(60)
    def check(content):
        path.write_bytes(content)
        with only_refused():
            cluster = read_cluster_file(path)
            resolve({}, cluster.settings, str(path), {})
            place_workers(cluster.hosts)
            for host in cluster.hosts:
                # What a process can be started with.
                os.fsencode(host.python + host.directory + host.identity)
                assert not any("=" in name or "\0" in name + value for name, value in host.env)

    check()


@given(damaged(TOML))
@fuzz(60)
def test_cluster_files_in_toml(tmp_path, content):
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with only_refused():
        read_cluster_file(path)


@given(damaged(b"0 10.0.0.1 9000\n1 10.0.0.2 9000\n") | damaged(b"node1 slots=2 port=22\nu@node2:3 # second\n"))
@fuzz(80)
def test_host_files(tmp_path, content):
    path = tmp_path / "hosts"
    path.write_bytes(content)
    with only_refused():
        place_workers(read_hostfile(path))


@given(st.text(max_size=30) | st.sampled_from([str(value) for value in ODD_VALUES]).map("a:{}".format))
@fuzz(60)
def test_hosts_on_a_command_line(text):
    with only_refused():
        place_workers(parse_hosts(text))


def test_a_host_file_cannot_ask_for_millions_of_workers():
    with pytest.raises(ConfigError, match="slots is 20000000, expected 1 to 1024"):
        parse_hostfile("node1 slots=20000000")


@given(odd_json({"kind": "output", "rank": 1, "text": "x"}))
@fuzz(60)
def test_lines_between_launcher_and_agents(content):
    with only_refused():
        unpack_line(pack_line("x")[:1] + content)
        parse(content)


@given(damaged(pack(Header(Kind.PART, 1, 2, 3, 4, 8))))
@fuzz(80)
def test_headers_of_messages(content):
    with contextlib.suppress(FrameError):
        assert unpack(content, 8).length <= 8


@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_payloads_of_tables(spec):
    @given(damaged(write_patch(0, 1, PATCHES[spec][0]).tobytes()) | damaged(write_rows(0, np.arange(3)).tobytes()))
    @fuzz(60)
    def check(content):
        for read in (read_rows, lambda payload: read_patch(spec, payload)):
            with contextlib.suppress(ServerError):
                read(memoryview(content))

    check()


@given(odd_json({"name": "t", "rows": 3, "width": 2, "dtype": "float32"}))
@fuzz(60)
def test_descriptions_of_tables(content):
    with only_refused():
        assert TableSpec.from_json(content).rows >= 1


@given(
    odd_json({"name": "x", "warden": {"pid": 1, "start": 2}, "owner": None, "machines": [], "cut": [], "paused": []})
)
@fuzz(40)
def test_records_of_labs(tmp_path, content):
    os.environ[state.FOLDER_VARIABLE] = str(tmp_path)
    try:
        (tmp_path / "x.json").write_bytes(content)
        with only_refused():
            state.load("x")
    finally:
        del os.environ[state.FOLDER_VARIABLE]
