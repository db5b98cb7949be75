from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster, Link
from poseidon.team import calibrate
from poseidon.team.calibrate import arithmetic_digest, find_cluster, measure_cluster, measure_flops
from poseidon.team.team import Team
from poseidon.team.topology import Topology

CPU = torch.device("cpu")
MEASURED = Cluster(2, source="measured")


class Room:
    """Stands for a team: everybody else says what is given here."""

    def __init__(self, rank: int, names: str, others: list[Any]) -> None:
        self.rank = rank
        self.topology = Topology.from_names(names)
        self._others = others

    @property
    def size(self) -> int:
        return self.topology.workers

    @property
    def mail(self) -> Any:
        """Nobody is pinged."""
        return SimpleNamespace(new_channel=lambda: 7)

    def gather_json(self, mine: Any) -> list[Any]:
        return [*self._others[: self.rank], mine, *self._others[self.rank :]]

    def gather_ints(self, values: list[int], _what: str) -> list[list[int]]:
        return [values] * self.topology.workers


def room(rank: int = 0, names: str = "ab", others: list[Any] | None = None) -> Team:
    return cast("Team", Room(rank, names, [{}] if others is None else others))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure_cluster", lambda *_: MEASURED)
    monkeypatch.delenv("POSEIDON_CLUSTER", raising=False)


@pytest.mark.usefixtures("measured")
def test_what_is_given_counts_and_nothing_given_is_measured() -> None:
    given = Cluster(7)
    assert find_cluster(room(), CPU, given) == given
    assert find_cluster(room(), CPU) is MEASURED


@pytest.mark.usefixtures("measured")
def test_a_file_on_rank_0_is_read_there_and_told_to_the_others(tmp_path: Path) -> None:
    stored, path = Cluster(5, source="given"), tmp_path / "cluster.json"
    stored.save(path)
    assert find_cluster(room(rank=0), CPU, path) == stored
    assert find_cluster(room(rank=1, others=[{"cluster": stored.to_dict()}]), CPU, tmp_path / "not here.json") == stored


@pytest.mark.usefixtures("measured")
def test_the_environment_names_a_file_unless_an_argument_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for machines, name in ((3, "environment.json"), (4, "argument.json")):
        Cluster(machines).save(tmp_path / name)
    monkeypatch.setenv("POSEIDON_CLUSTER", str(tmp_path / "environment.json"))
    assert find_cluster(room(), CPU).machines == 3
    assert find_cluster(room(), CPU, str(tmp_path / "argument.json")).machines == 4


@pytest.mark.usefixtures("measured")
def test_rank_0_keeps_the_measurement_where_no_file_was_yet(tmp_path: Path) -> None:
    assert find_cluster(room(rank=1), CPU, tmp_path / "cluster.json") is MEASURED
    assert not (tmp_path / "cluster.json").exists()
    assert find_cluster(room(rank=0), CPU, tmp_path / "cluster.json") is MEASURED
    assert Cluster.load(tmp_path / "cluster.json") == MEASURED


@pytest.mark.usefixtures("measured")
def test_a_bad_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cluster\.json"):
        find_cluster(room(), CPU, tmp_path / "cluster.json")


def test_the_slowest_of_everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(rate: float | None, latency: float, flops: float) -> dict[str, Any]:
        links = [] if rate is None else [{"bits_per_s": rate, "latency_s": latency}]
        return {"between": links, "inside": [], "shared": [], "flops": flops}

    monkeypatch.setattr(calibrate, "_ping", lambda *_: {"bits_per_s": 2e9, "latency_s": 1e-4})
    monkeypatch.setattr(calibrate, "measure_flops", lambda _: 5e9)
    cluster = measure_cluster(room(0, "abc", [says(1e9, 5e-5, 9e9), says(None, 0, 4e9)]), CPU)
    assert cluster == Cluster(3, 1, Link(1e9, 1e-4), Cluster(1).inside, 4e9, "measured")


def test_uneven_machines_count_as_their_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_ping", lambda *_: {"bits_per_s": 2e9, "latency_s": 1e-4})
    monkeypatch.setattr(calibrate, "measure_flops", lambda _: 5e9)
    link = {"bits_per_s": 3e9, "latency_s": 1e-5}
    says = {"between": [], "inside": [link], "shared": [link], "flops": 5e9}
    # Alone on its machine this worker has nobody to share memory with.
    monkeypatch.setattr(calibrate, "_measure_sums", lambda _: [])
    cluster = measure_cluster(room(0, "abb", [says, says]), CPU)
    assert (cluster.machines, cluster.workers_per_machine) == (2, 2)
    assert (cluster.between, cluster.inside) == (Link(2e9, 1e-4), Link(3e9, 1e-5))
    assert cluster.shared == cluster.inside


def test_one_worker_alone_has_no_links_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure_flops", lambda _: 5e9)
    assert measure_cluster(room(0, "a", []), CPU) == Cluster(1, flops=5e9, source="measured")


@pytest.mark.parametrize(
    ("gbit", "expected_mb"),
    [(0.1, 2), (1, 2), (10, 17.875), (25, 32), (100, 32)],
)
def test_a_probe_fills_a_fast_link_for_longer_than_a_burst(gbit: float, expected_mb: float) -> None:
    assert calibrate.probe_bytes(2 * 2**20 * 8 / (gbit * 1e9)) == expected_mb * 2**20


class Shaped:
    """Round trips over a link of 10 Gbit/s that lets 1 MB through at once after a rest, and is slow at first."""

    def __init__(self) -> None:
        self.trips = 0
        self.sent: list[int] = []

    def time(self, size_bytes: int, count: int) -> list[float]:
        self.sent += [size_bytes] * count
        return [self._one(size_bytes) for _ in range(count)]

    def agree(self, value: int) -> int:
        return value

    def _one(self, size_bytes: int) -> float:
        self.trips += 1
        warm = 1e-3 if self.trips in (1, 7) else 0.0
        return 2 * (100e-6 + max(0, size_bytes - 2**20) / 1.25e9) + warm


def test_a_burst_is_not_taken_for_the_links_speed() -> None:
    link = Shaped()
    found = calibrate._ping(cast("Any", link), 1 << 30)
    assert found["latency_s"] == pytest.approx(100e-6)
    assert found["bits_per_s"] == pytest.approx(10e9, rel=0.08)
    assert sum(link.sent) / 1.25e9 * 2 < 0.15, "measuring takes no more time than that"


def test_inside_a_machine_probes_stay_small() -> None:
    link = Shaped()
    calibrate._ping(cast("Any", link), 2 << 20)
    assert max(link.sent) == 2 << 20


def test_the_device_has_a_rate() -> None:
    assert 0 < measure_flops(CPU) < float("inf")


def test_measuring_leaves_the_users_random_numbers_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    measure_flops(CPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_device_agrees_with_itself_whatever_the_seed() -> None:
    torch.manual_seed(1)
    first = arithmetic_digest(CPU)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert arithmetic_digest(CPU) == first
    assert torch.equal(torch.get_rng_state(), state), "a user's random numbers must not depend on being watched"


def test_a_device_that_rounds_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = arithmetic_digest(CPU)
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda one, two: product(one.double(), two.double()).float())
    assert arithmetic_digest(CPU) != first
