from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from poseidon.errors import ConfigError
from poseidon.job import interfaces
from poseidon.job.interfaces import address_of, interface_with, read_interfaces


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with four interfaces; returns the drivers, which a test may change."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {
        "lo": [(v4, "127.0.0.1"), (v6, "::1")],
        "eth0": [
            (v4, "192.0.2.7"),
            (v4, "192.0.2.8"),
            (v6, "fd00::7"),
            (v6, "fe80::7%eth0"),
            (psutil.AF_LINK, "02:fc"),
        ],
        "eth0:1": [(v4, "192.0.2.9")],
        "eth1": [(v4, "198.51.100.7")],
        "ib0": [(v6, "fd01::7")],
    }
    stats = {
        "lo": ("up,loopback,running", 0, 65536),
        "eth0": ("up,broadcast,running", 10_000, 9000),
        "eth1": ("broadcast", 1000, 1500),
        "ib0": ("up,running", 65535, 2044),
    }
    entries = {
        name: [SimpleNamespace(family=family, address=address) for family, address in pairs]
        for name, pairs in addresses.items()
    }
    figures = {name: SimpleNamespace(flags=flags, speed=speed, mtu=mtu) for name, (flags, speed, mtu) in stats.items()}
    drivers = {"eth0": "ixgbe"}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: figures)
    monkeypatch.setattr(interfaces, "_driver", lambda name: drivers.get(name, ""))
    monkeypatch.setattr(interfaces, "_is_wireless", lambda name: name == "wlan0")
    return drivers


def test_interfaces_that_are_up_are_listed_once_per_address(machine: dict[str, str]) -> None:
    found = [(one.name, one.address, one.mtu, one.speed_mbit, one.is_loopback) for one in read_interfaces()]
    assert found == [
        ("lo", "127.0.0.1", 65536, None, True),
        ("lo", "::1", 65536, None, True),
        ("eth0", "192.0.2.7", 9000, 10_000, False),
        ("eth0", "192.0.2.8", 9000, 10_000, False),
        ("eth0", "fd00::7", 9000, 10_000, False),
        ("eth0", "192.0.2.9", 9000, 10_000, False),
        ("ib0", "fd01::7", 2044, None, False),
    ]


def test_a_virtual_interface_has_no_speed(machine: dict[str, str]) -> None:
    machine["eth0"] = "veth"
    assert {one.speed_mbit for one in read_interfaces()} == {None}


def test_names_and_addresses_find_each_other(machine: dict[str, str]) -> None:
    assert address_of("eth0") == "192.0.2.7"
    assert [interface_with(address) for address in ("192.0.2.8", "192.0.2.9", "fd00:0::7", "::1", "10.9.9.9")] == [
        "eth0",
        "eth0",
        "eth0",
        "lo",
        "",
    ]
    # It has no other.
    assert address_of("ib0") == "fd01::7"
    with pytest.raises(ConfigError, match=r"interface 'nosuch0' has no address here.* eth1 \(198.51.100.7\).*fd01::7"):
        address_of("nosuch0")


def test_the_kernel_answers_about_loopback() -> None:
    loopback = next(one for one in read_interfaces() if one.address == "127.0.0.1")
    assert (loopback.name, loopback.is_loopback, loopback.is_wireless, loopback.speed_mbit) == ("lo", True, False, None)
    assert loopback.mtu > 1000
    assert interfaces._driver("nosuch0") == ""
