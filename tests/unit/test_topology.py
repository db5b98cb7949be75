from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from poseidon.team.membership import Member, Membership
from poseidon.team.topology import Topology

NAMES = st.lists(st.sampled_from(["ape", "bee", "cat", "dog"]), min_size=1, max_size=12)
"""Machine of each rank: any layout, interleaved and uneven ones too."""
TOPOLOGIES = NAMES.map(Topology.from_names)


@given(NAMES)
def test_workers_with_one_name_share_a_machine(names: list[str]) -> None:
    topology = Topology.from_names(names)
    assert sorted(rank for ranks in topology.machines for rank in ranks) == list(range(len(names)))
    assert topology.workers == len(names)
    for rank, name in enumerate(names):
        assert topology.neighbours(rank) == tuple(other for other, theirs in enumerate(names) if theirs == name)
    firsts = [ranks[0] for ranks in topology.machines]
    assert firsts == sorted(firsts)


@given(TOPOLOGIES)
def test_every_message_reaches_everybody_once(topology: Topology) -> None:
    for origin in range(topology.workers):
        arrivals: Counter[int] = Counter()
        holders = [origin]
        while holders:
            sender = holders.pop()
            for receiver in topology.receivers(origin, sender):
                arrivals[receiver] += 1
                holders.append(receiver)
        assert arrivals == dict.fromkeys(set(range(topology.workers)) - {origin}, 1)


@given(TOPOLOGIES)
def test_every_message_crosses_to_each_other_machine_once(topology: Topology) -> None:
    machine_of = {rank: number for number, ranks in enumerate(topology.machines) for rank in ranks}
    for origin in range(topology.workers):
        crossings = [
            (machine_of[sender], machine_of[receiver])
            for sender in range(topology.workers)
            for receiver in topology.receivers(origin, sender)
            if machine_of[sender] != machine_of[receiver]
        ]
        others = set(range(len(topology.machines))) - {machine_of[origin]}
        assert sorted(crossings) == [(machine_of[origin], other) for other in sorted(others)]


@given(TOPOLOGIES)
def test_senders_and_receivers_tell_the_same_story(topology: Topology) -> None:
    ranks = range(topology.workers)
    for origin in ranks:
        for receiver in ranks:
            if receiver != origin:
                senders = [sender for sender in ranks if receiver in topology.receivers(origin, sender)]
                assert senders == [topology.sender(origin, receiver)]


@given(st.integers(1, 4), st.integers(1, 4))
def test_relaying_is_spread_over_the_workers_of_even_machines(machines: int, workers: int) -> None:
    topology = Topology.from_names([f"machine {rank // workers}" for rank in range(machines * workers)])
    assert topology.is_even
    entries = Counter(
        receiver
        for origin in range(topology.workers)
        for receiver in topology.receivers(origin, origin)
        if receiver not in topology.neighbours(origin)
    )
    assert all(entries[rank] == machines - 1 for rank in range(topology.workers))
    for rank in range(topology.workers):
        assert topology.counterparts(rank) == tuple(m * workers + rank % workers for m in range(machines))


def test_levels_pay_only_with_several_machines_of_several_workers() -> None:
    assert not Topology.from_names(["a"]).has_levels
    assert not Topology.from_names(["a", "a"]).has_levels
    assert not Topology.from_names(["a", "b"]).has_levels
    assert Topology.from_names(["a", "b", "a"]).has_levels


def test_uneven_machines_are_noticed() -> None:
    assert Topology.from_names(["a", "b", "b", "a"]).is_even
    assert not Topology.from_names(["a", "b", "a"]).is_even


@given(NAMES)
def test_everything_about_a_team_follows_from_its_members(names: list[str]) -> None:
    members = tuple(Member(10 + 3 * rank, f"host of {name}", name) for rank, name in enumerate(names))
    team = Membership(0, members)
    assert team.size == len(names)
    assert team.hosts == tuple(f"host of {name}" for name in names)
    assert team.topology == Topology.from_names(names)
    assert [team.rank_of(member.global_rank) for member in members] == list(range(len(names)))
    assert team == Membership(0, members)
    assert team != Membership(1, members)


def test_workers_have_names_before_they_introduce_themselves() -> None:
    team = Membership.unnamed([4, 7])
    assert (team.epoch, team.size, team.rank_of(7)) == (0, 2, 1)
    assert team.hosts == ("host of rank 0", "host of rank 1")
