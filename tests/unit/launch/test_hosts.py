from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.launch.hosts import Host, parse_cluster, parse_hostfile, parse_hosts, read_cluster_file, read_hostfile
from poseidon.launch.link import AgentLink
from poseidon.launch.ssh import SshSettings


def test_names_on_the_command_line_may_carry_workers_and_users() -> None:
    assert parse_hosts("a, b:2,me@c:3,[fe80::1]:4") == (
        Host("a"),
        Host("b", slots=2),
        Host("c", slots=3, user="me"),
        Host("fe80::1", slots=4),
    )


def test_the_originals_nodes_may_have_addresses_of_either_family() -> None:
    nodes = ["10.0.0.1:9998", "[fd00::2]:9999", "fd00::3", "[fd00::4]", "[fd00::2]:9999"]
    assert parse_cluster({"worker_nodes": nodes, "master_node": "[fd00::2]:9999"}).hosts == (
        Host("fd00::2", slots=2, service_port=9999),
        Host("10.0.0.1", service_port=9998),
        Host("fd00::3"),
        Host("fd00::4"),
    )


def test_the_address_is_the_name_unless_given() -> None:
    assert Host("node1").address == "node1"
    assert Host("node1", address="10.0.0.1").address == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a,,b", "empty place between its commas"),
        ("a:two", "'two' after the colon is not a number of workers"),
        ("a:", "'' after the colon"),
        ("a:0", "host a: slots is 0, expected 1 to 1024"),
        ("a,b,a", "names a twice.*a:2"),
        ("-oProxyCommand=evil", "not the name of a host"),
        ("a b", "not the name of a host"),
        ("a;reboot", "not the name of a host"),
        ("-x@a", "not the name of a host or user"),
        ("a:1:2", "'1:2' after the colon"),
        ("a,me@fd00::2", r"write an IPv6 address in brackets, \[fd00::2\] or \[fd00::2\]:WORKERS"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_hosts(text)


@given(st.text())
def test_any_text_gives_hosts_or_a_config_error(text: str) -> None:
    for parse in (parse_hosts, parse_hostfile):
        try:
            hosts = parse(text)
        except ConfigError:
            continue
        assert all(host.slots >= 1 and host.name and not host.name.startswith("-") for host in hosts)


def test_a_file_of_hosts_with_slots() -> None:
    text = """
    # the small cluster
    node1 slots=2
    ann@node2 slots=4 port=2222 identity=~/.ssh/key python=/opt/py/bin/python directory=/data/run  # fast one
    node3 address=10.0.0.3 interface=eth1
    """
    assert parse_hostfile(text) == (
        Host("node1", slots=2),
        Host(
            "node2",
            slots=4,
            user="ann",
            port=2222,
            identity="~/.ssh/key",
            python="/opt/py/bin/python",
            directory="/data/run",
        ),
        Host("node3", address="10.0.0.3", interface="eth1"),
    )


def test_the_originals_file_is_ordered_by_its_ids() -> None:
    assert parse_hostfile("1 10.0.0.2 9999\n0 10.0.0.1 9998\n") == (
        Host("10.0.0.1", service_port=9998),
        Host("10.0.0.2", service_port=9999),
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("\n# nobody\n", "hosts names no host"),
        ("node1 slot=2", "hosts:1: 'slot=2' is not understood.*slots="),
        ("node1\nnode2 slots=x", "hosts:2: 'slots=x': slots must be a whole number"),
        ("node1 port=70000", "port is 70000; ports are 1 to 65535"),
        ("0 10.0.0.1 9999\n0 10.0.0.2 9999", "hosts:2: id 0 is already that of 10.0.0.1"),
        ("0 10.0.0.1 9999\nnode2", "hosts:1: '0 10.0.0.1 9999' is `id ip port`, but other lines are not"),
        ("node1\nnode1", "names node1 twice"),
    ],
)
def test_bad_lines_are_named_with_their_number(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_hostfile(text, "hosts")


def test_the_originals_json_is_read() -> None:
    found = parse_cluster(
        {
            "worker_nodes": ["10.0.0.2", "10.0.0.1:2222"],
            "server_nodes": ["10.0.0.1"],
            "master_node": "10.0.0.1",
            "virtualenv": "/home/ann/venv",
            "username": "ann",
        }
    )
    python = "/home/ann/venv/bin/python"
    assert found.hosts == (
        Host("10.0.0.1", user="ann", python=python, service_port=2222),
        Host("10.0.0.2", user="ann", python=python),
    )
    assert found.settings == {}


def test_a_cluster_file_may_say_things_once_for_all_hosts() -> None:
    found = parse_cluster(
        {
            "user": "ann",
            "slots": 2,
            "env": {"A": "1", "B": "1"},
            "restarts": 3,
            "hosts": ["n1", "bob@n2:4", {"name": "n3", "port": 2222, "env": {"B": "2"}}],
        }
    )
    one, two, three = found.hosts
    assert (one.user, one.slots, dict(one.env)) == ("ann", 2, {"A": "1", "B": "1"})
    assert (two.user, two.slots) == ("bob", 4)
    assert (three.user, three.port, dict(three.env)) == ("ann", 2222, {"A": "1", "B": "2"})
    assert found.settings == {"restarts": 3}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], "has no `hosts`"),
        ({"nodes": []}, "has no `hosts`"),
        ({"hosts": []}, "it must be a list that names at least one"),
        ({"hosts": "a"}, "it must be a list"),
        ({"hosts": [7]}, "neither a string nor a table with a name"),
        ({"hosts": [{"name": "a", "slot": 2}]}, "host a: unknown slot; known: .*slots"),
        ({"hosts": [{"name": "a", "slots": "2"}]}, "slots is '2'; it must be of type int"),
        ({"hosts": [{"name": "a", "slots": True}]}, "slots is True"),
        ({"hosts": ["a"], "env": "X=1"}, "env is 'X=1'; it must be of type dict"),
        ({"worker_nodes": "a"}, "must be a list of addresses"),
        ({"worker_nodes": ["a:b"]}, "neither an address nor address:port"),
    ],
)
def test_cluster_files_that_make_no_sense_are_refused(data: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_cluster(data)


def test_the_kind_of_file_is_found_from_its_name_or_content(tmp_path: Path) -> None:
    data = {"hosts": ["a", "b:2"]}
    expected = parse_hosts("a,b:2")
    for name, text in (("c.json", json.dumps(data)), ("hosts", json.dumps(data)), ("plain", "a\nb slots=2\n")):
        (tmp_path / name).write_text(text)
        assert read_hostfile(tmp_path / name) == expected


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_toml_is_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('user = "ann"\nrestarts = 1\n[[hosts]]\nname = "a"\n[[hosts]]\nname = "b"\nslots = 2\n')
    found = read_cluster_file(file)
    assert found.hosts == (Host("a", user="ann"), Host("b", slots=2, user="ann"))
    assert found.settings == {"restarts": 1}
    file.write_text("hosts = [")
    with pytest.raises(ConfigError, match=r"c\.toml is not TOML"):
        read_cluster_file(file)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read host file .*none: No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "x.json").write_text("{hosts")
    with pytest.raises(ConfigError, match=r"x\.json is not JSON"):
        read_hostfile(tmp_path / "x.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"env": {"A\0": "1"}}, r"the name of a variable is 'A\\x00', expected a text without zero bytes"),
        ({"env": {"A=B": "1"}}, "'A=B' is not the name of a variable"),
        ({"env": {"": "1"}}, "'' is not the name of a variable"),
        ({"env": {"A": "x\0"}}, r"env: A is 'x\\x00', expected a text"),
        ({"env": {"A": "\ud800"}}, "broken characters"),
        ({"directory": "/tmp\0"}, "directory is '/tmp"),
        ({"slots": 20_000_000}, "slots is 20000000, expected 1 to 1024"),
        ({"slots": -1}, "slots is -1"),
    ],
)
def test_hosts_that_no_process_could_be_started_on_are_refused(entry, match) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_cluster({"hosts": [{"name": "a", **entry}]})


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"a: the interpreter '/no/python' cannot be started \(No such file.*--python"
    ):
        AgentLink(0, Host("a", python="/no/python"), True, "/", SshSettings())
