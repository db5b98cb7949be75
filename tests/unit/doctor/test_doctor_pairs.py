import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.doctor.blame import blame
from poseidon.doctor.facts import BUSY, OPEN, TIMED_OUT, HostFacts, HostReport, Interface, PairFacts
from poseidon.doctor.pair_checks import broken_links, check_pairs, packet_sizes, sluggish_links
from poseidon.doctor.ports import MOST_PORTS, opening_command, parse_ports, ports_to_try, spread
from poseidon.doctor.rounds import pair_rounds
from poseidon.errors import ConfigError

PACKETS = {1280: True, 1500: True}
PORTS = {29500: OPEN, 40000: OPEN}
GIGABIT = 9.4e8


def host(name, speed_mbit=None):
    address = f"10.0.0.{ord(name) - ord('a') + 1}"
    card = Interface("eth0", address, mtu=1500, speed_mbit=speed_mbit)
    return HostReport(name, HostFacts(name, interfaces=(card,)), address=address)


def cluster(names, changes=None, speed_mbit=None):
    """Return healthy hosts and links, but for the changes of single links."""
    pairs = []
    for link in itertools.permutations(names, 2):
        healthy = PairFacts(*link, PORTS, 1e-4, GIGABIT, GIGABIT, "", PACKETS)
        pairs.append(replace(healthy, **(changes or {}).get(link, {})))
    return [host(name, speed_mbit) for name in names], pairs


def links_of(name, names):
    return [link for link in itertools.permutations(names, 2) if name in link]


def found(hosts, pairs):
    return [(one.severity.value, one.hosts, one.check) for one in check_pairs(hosts, pairs)]


def test_healthy_links_give_no_finding():
    hosts, pairs = cluster("abcd", speed_mbit=1000)
    assert found(hosts, pairs) == []
    assert broken_links(pairs) == sluggish_links(pairs) == set()


@pytest.mark.parametrize("outcome", [TIMED_OUT, "connection refused", "no route to host"])
def test_a_port_that_nobody_reaches_is_blamed_on_its_host(outcome):
    closed = {"ports": {29500: outcome, 40000: OPEN}}
    hosts, pairs = cluster("abc", {("a", "b"): closed, ("c", "b"): closed})
    (finding,) = check_pairs(hosts, pairs)
    assert finding.hosts == ("b",)
    assert f"port 29500 ({outcome})" in finding.seen
    assert "10.0.0.1" in finding.fix
    assert "10.0.0.3" in finding.fix
    assert broken_links(pairs) == {("a", "b"), ("c", "b")}
    assert sluggish_links(pairs) == set()


def test_a_host_that_reaches_nobody_is_blamed_itself():
    closed = {"ports": dict.fromkeys(PORTS, TIMED_OUT)}
    hosts, pairs = cluster("abc", {("b", "a"): closed, ("b", "c"): closed})
    assert found(hosts, pairs) == [("error", ("b",), "ports")]


def test_one_blocked_link_names_both_ends():
    hosts, pairs = cluster("abc", {("a", "b"): {"ports": {29500: TIMED_OUT, 40000: OPEN}}})
    assert found(hosts, pairs) == [("error", ("b", "a"), "ports")]


def test_between_two_hosts_both_are_named():
    hosts, pairs = cluster("ab", {("a", "b"): {"ports": {29500: TIMED_OUT}}})
    assert found(hosts, pairs) == [("error", ("b", "a"), "ports")]


def test_if_nobody_reaches_anybody_it_is_said_once():
    closed = {"ports": {29500: TIMED_OUT, 40000: OPEN}}
    hosts, pairs = cluster("abcd", dict.fromkeys(itertools.permutations("abcd", 2), closed))
    assert found(hosts, pairs) == [("error", ("a", "b", "c", "d"), "ports")]


def test_a_port_in_use_is_no_firewall():
    busy = {"ports": {29500: BUSY, 40000: OPEN}}
    hosts, pairs = cluster("abc", {("a", "b"): busy, ("c", "b"): busy})
    assert found(hosts, pairs) == [("warning", ("b",), "ports")]
    assert broken_links(pairs) == set()


STUCK = {"stream_error": "hardly anything arrived", "one_stream_bits_per_s": None, "many_stream_bits_per_s": None}


@pytest.mark.parametrize(("streams", "severity"), [(STUCK, "error"), ({}, "warning")])
def test_packets_that_vanish_for_their_size(streams, severity):
    lossy = {"packets": {1280: True, 1450: True, 1500: False}, **streams}
    hosts, pairs = cluster("ab", {("a", "b"): lossy})
    (finding,) = check_pairs(hosts, pairs)
    assert finding.severity.value == severity
    assert finding.check == "path-mtu"
    assert finding.hosts == ("a", "b")
    assert "above 1450 bytes" in finding.seen
    assert "eth0 mtu 1450" in finding.fix


def test_where_no_datagram_passes_the_size_is_not_to_blame():
    hosts, pairs = cluster("ab", {("a", "b"): {"packets": dict.fromkeys(PACKETS, False)}})
    assert found(hosts, pairs) == []


def test_data_that_do_not_get_through_are_an_error():
    hosts, pairs = cluster("abc", {("a", "b"): STUCK})
    assert found(hosts, pairs) == [("error", ("a", "b"), "bulk")]
    assert broken_links(pairs) == {("a", "b")}
    # One stream that failed beside another that did not is no proof.
    hosts, pairs = cluster("abc", {("a", "b"): {**STUCK, "one_stream_bits_per_s": GIGABIT}})
    assert found(hosts, pairs) == []


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_one_slow_host_is_found_and_nobody_else_is_blamed(names):
    slow = {"one_stream_bits_per_s": 9.4e7, "many_stream_bits_per_s": 9.4e7}
    hosts, pairs = cluster(names, dict.fromkeys(links_of("b", names), slow))
    (finding,) = check_pairs(hosts, pairs)
    assert finding.hosts == ("b",)
    assert finding.check == "slow-link"
    assert "94 Mbit/s" in finding.seen
    assert "940 Mbit/s" in finding.expected


def test_two_slow_hosts_of_five_are_both_found():
    slow = {"one_stream_bits_per_s": 9.4e7, "many_stream_bits_per_s": 9.4e7}
    bad = [*links_of("b", "abcde"), *links_of("d", "abcde")]
    assert found(*cluster("abcde", dict.fromkeys(bad, slow))) == [
        ("warning", ("b",), "slow-link"),
        ("warning", ("d",), "slow-link"),
    ]


def test_a_host_slow_in_one_direction():
    slow = {"one_stream_bits_per_s": 9.4e7, "many_stream_bits_per_s": 9.4e7}
    hosts, pairs = cluster("abc", {("b", "a"): slow, ("b", "c"): slow})
    (finding,) = check_pairs(hosts, pairs)
    assert finding.hosts == ("b",)
    assert "every link from b" in finding.seen


def test_one_slow_link_names_both_ends():
    slow = {"one_stream_bits_per_s": 9.4e7, "many_stream_bits_per_s": 9.4e7}
    hosts, pairs = cluster("abcd", {("a", "b"): slow})
    assert found(hosts, pairs) == [("warning", ("a", "b"), "slow-link")]


def test_links_slower_than_their_cards():
    slow = {"one_stream_bits_per_s": 9.4e7, "many_stream_bits_per_s": 9.4e7}
    hosts, pairs = cluster("ab", {("a", "b"): slow, ("b", "a"): slow}, speed_mbit=1000)
    assert found(hosts, pairs) == [("warning", ("a",), "slow-link"), ("warning", ("b",), "slow-link")]
    assert found([host("a", 100), host("b", 1000)], pairs) == []


def test_a_link_that_one_stream_cannot_fill():
    hosts, pairs = cluster("ab", {("a", "b"): {"one_stream_bits_per_s": 2e8}})
    assert found(hosts, pairs) == [("warning", ("a", "b"), "one-stream")]
    assert sluggish_links(pairs) == {("a", "b")}
    assert broken_links(pairs) == set()


def test_a_host_far_away():
    far = {"latency_s": 0.02}
    assert found(*cluster("abc", dict.fromkeys(links_of("c", "abc"), far))) == [("warning", ("c",), "latency")]


def test_a_slow_host_is_named_once_whatever_its_card_says():
    slow = {"one_stream_bits_per_s": 9.4e7, "many_stream_bits_per_s": 9.4e7}
    hosts, pairs = cluster("abc", dict.fromkeys(links_of("b", "abc"), slow), speed_mbit=1000)
    assert found(hosts, pairs) == [("warning", ("b",), "slow-link")]


@pytest.mark.parametrize("link", [("a", "b"), ("b", "a")])
def test_a_path_that_is_long_one_way_only(link):
    hosts, pairs = cluster("abcd", {link: {"latency_s": 0.02}})
    assert found(hosts, pairs) == [("warning", link, "latency")]


def test_one_long_path_and_hosts_all_apart():
    far = {"latency_s": 0.02}
    hosts, pairs = cluster("abcd", {("a", "b"): far, ("b", "a"): far})
    assert found(hosts, pairs) == [("warning", ("a", "b"), "latency")]
    hosts, pairs = cluster("ab", {("a", "b"): far, ("b", "a"): far})
    assert found(hosts, pairs) == [("warning", ("a", "b"), "latency")]


def test_the_better_of_two_looks_counts():
    first = PairFacts("a", "b", {1: TIMED_OUT, 2: OPEN}, 5e-4, 1e8, None, "stuck", {1500: False, 1280: True})
    second = PairFacts("a", "b", {1: OPEN, 2: OPEN}, 1e-4, 9e7, 2e8, "", {1500: True, 1280: False})
    expected = PairFacts("a", "b", {1: OPEN, 2: OPEN}, 1e-4, 1e8, 2e8, "", {1500: True, 1280: True})
    assert first.better(second) == expected
    assert second.better(first) == expected


def test_a_second_look_that_finds_less_takes_nothing_away():
    first = PairFacts("a", "b", {1: OPEN}, 1e-4, 1e8, 1e8, "", {1500: True})
    assert first.better(PairFacts("a", "b", {1: TIMED_OUT})) == first
    assert PairFacts("a", "b", {1: TIMED_OUT}).better(first) == first


@given(st.integers(1, 20))
def test_everybody_meets_everybody_once_and_nobody_twice_in_a_round(count):
    rounds = pair_rounds(range(count))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(list, itertools.combinations(range(count), 2)))
    for pairs in rounds:
        busy = [one for pair in pairs for one in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) <= count


def test_no_one_is_blamed_for_everybodys_trouble():
    links = list(itertools.permutations("abc", 2))
    assert blame(links, links) == (set(), set())
    assert blame([], links) == (set(), set())


def test_packet_sizes_are_those_both_promise():
    assert packet_sizes(1500, 9000) == (1280, 1400, 1450, 1492, 1500)
    assert packet_sizes(9000, 65536)[-1] == 9000
    assert packet_sizes(1400, 1400) == (1280, 1400)


def test_ports_people_write():
    assert parse_ports("29500") == (29500,)
    assert parse_ports("29500-29502, 80") == (29500, 29501, 29502, 80)
    many = parse_ports("1000-60000")
    assert len(many) == MOST_PORTS
    assert (many[0], many[-1]) == (1000, 60000)


@pytest.mark.parametrize("text", ["", "x", "5-", "70000", "10-5", "0"])
def test_ports_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="ports"):
        parse_ports(text)


@given(st.lists(st.integers(1, 65535), max_size=200, unique=True), st.integers(2, 20))
def test_a_selection_keeps_both_ends(values, count):
    chosen = spread(values, count)
    assert len(chosen) == min(count, len(values)) == len(set(chosen))
    assert not values or (chosen[0], chosen[-1]) == (values[0], values[-1])


def test_ports_the_system_hands_out_are_tried_as_well():
    ports = ports_to_try((29500,), (32768, 60999))
    assert ports[0] == 29500
    assert all(32768 < port < 60999 for port in ports[1:])
    assert len(ports) == 4


def test_how_each_firewall_is_opened():
    assert opening_command("ufw", ["10.0.0.1", "10.0.0.2"]) == (
        "sudo ufw allow from 10.0.0.1 && sudo ufw allow from 10.0.0.2"
    )
    assert "--add-source=10.0.0.1" in opening_command("firewall-cmd", ["10.0.0.1"])
    assert "{ 10.0.0.1 }" in opening_command("nft", ["10.0.0.1"])
    assert "iptables" in opening_command("", ["10.0.0.1"])
