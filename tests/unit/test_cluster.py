import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster, Link, format_rate, parse_rate

LINKS = st.builds(Link, st.floats(1, 1e12), st.floats(0, 1))
CLUSTERS = st.builds(
    Cluster,
    machines=st.integers(1, 100),
    workers_per_machine=st.integers(1, 16),
    between=LINKS,
    inside=LINKS,
    shared=st.none() | LINKS,
    flops=st.floats(1, 1e15),
    source=st.sampled_from(["assumed", "given", "measured"]),
)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("10gbit", 1e10),
        ("2.5Gbit/s", 2.5e9),
        ("100mbit", 1e8),
        (" 1 Gbps ", 1e9),
        ("64kbit", 64e3),
        ("9600bit", 9600),
        ("1e3mbit", 1e9),
        ("0.4tbit", 4e11),
    ],
)
def test_rates_are_read(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bits_per_s)


@pytest.mark.parametrize(
    "text", ["", "10", "gbit", "fast", "-1gbit", "10gbyte", "10gb", "10 g", "0gbit", "1.2.3gbit", "1e999bit"]
)
def test_other_rates_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="rate") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("bits_per_s", "text"), [(9.41e9, "9.41 Gbit/s"), (1e8, "100 Mbit/s"), (2500, "2.5 kbit/s"), (7, "7 bit/s")]
)
def test_rates_are_written_as_people_say_them(bits_per_s: float, text: str) -> None:
    assert format_rate(bits_per_s) == text


@given(st.sampled_from([1.0, 1e3, 1e6, 1e9]), st.integers(1, 999))
def test_a_written_rate_reads_back(scale: float, value: int) -> None:
    assert parse_rate(format_rate(value * scale)) == pytest.approx(value * scale)


def test_a_link_counts_bytes_in_eights() -> None:
    assert Link(1e9, 0).bytes_per_s == 125e6


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Link(0, 0), "link rate is 0"),
        (lambda: Link(float("nan"), 0), "link rate is nan"),
        (lambda: Link(1e9, -1e-6), "link latency is -1e-06"),
        (lambda: Link(1e9, float("nan")), "link latency is nan"),
        (lambda: Cluster(0), "at least 1 machine, not 0"),
        (lambda: Cluster(2, 0), "at least 1 worker, not 0"),
        (lambda: Cluster(2, flops=0), "rate is 0 flop/s"),
    ],
)
def test_impossible_figures_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_workers_are_counted_over_all_machines() -> None:
    assert Cluster(3, 4).workers == 12


@given(CLUSTERS)
def test_a_cluster_survives_json(cluster: Cluster) -> None:
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_a_cluster_survives_a_file(tmp_path: Path) -> None:
    cluster = Cluster(4, 2, Link(9.4e9, 60e-6), Link(80e9, 5e-6), 5e13, "measured")
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_what_a_file_leaves_out_is_assumed(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"machines": 8, "between": {"rate": "10gbit"}}')
    assert Cluster.load(path) == Cluster(8, between=Link(1e10, 200e-6))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1, 2]", "holds list, expected an object"),
        ("{}", "machines"),
        ('{"machines": 0}', "at least 1 machine"),
        ('{"machines": "many"}', "cluster file"),
        ('{"machines": 2, "nodes": 2}', "unknown field 'nodes'; known: between"),
        ('{"machines": 2, "between": "10gbit"}', "between is '10gbit', expected an object"),
        ('{"machines": 2, "between": {"rate": "10gbit", "speed": 1}}', "between: unknown field 'speed'"),
        ('{"machines": 2, "between": {"latency_s": 1}}', "between: give either rate or bits_per_s"),
        ('{"machines": 2, "between": {"rate": "1gbit", "bits_per_s": 1}}', "give either rate or bits_per_s"),
        ('{"machines": 2, "inside": {"rate": "quick"}}', "rate 'quick' is not a number and a unit"),
        ('{"machines": 2, "inside": {"bits_per_s": -1}}', "link rate is -1"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        Cluster.load(path)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "no folder" / "cluster.json"
    with pytest.raises(ConfigError, match=str(missing)):
        Cluster.load(missing)
    with pytest.raises(ConfigError, match=str(missing)):
        Cluster(2).save(missing)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        Cluster.load(tmp_path / "binary")


def test_a_cluster_prints_only_the_links_it_has() -> None:
    assert str(Cluster(1)) == "1 machine x 1 worker(s); device 50 GFLOP/s (assumed)"
    assert "between machines 1 Gbit/s, 200 us" in str(Cluster(2))
    assert "inside" not in str(Cluster(2))
    assert "inside a machine 40 Gbit/s, 30 us" in str(Cluster(1, 2))
    assert "between" not in str(Cluster(1, 2))
    assert "shared" not in str(Cluster(1, 2))
    assert "sums in shared memory 80 Gbit/s, 20 us" in str(Cluster(1, 2, shared=Link(80e9, 20e-6)))
