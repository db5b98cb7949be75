"""Addresses of both families: as text, and where a rank listens by default."""

from __future__ import annotations

import pytest

from poseidon.errors import ConfigError, WireError
from poseidon.wire.address import Address, default_place, listening_ip
from poseidon.wire.settings import WireSettings


@pytest.mark.parametrize(
    "text", ["10.0.0.1:4000", "10.0.0.1:4000/tls", "[fd00::1]:4000", "[::1]:4000/tls", "[fe80::1%eth0]:1"]
)
def test_what_is_written_is_read_back(text: str) -> None:
    assert str(Address.parse(text)) == text


def test_one_address_has_one_form() -> None:
    assert Address.parse("[FD00:0:0::1]:7") == Address("fd00::1", 7)
    assert listening_ip(WireSettings(ip="FD00:0::1")) == "fd00::1"


@pytest.mark.parametrize(
    "text", ["", "fd00::1:4000", "[fd00::1]", "10.0.0:1", "[10.0.0.1:2", "host:3", "[fd00::1]:x", "[10.0.0.1]:2"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="is not an address"):
        Address.parse(text)


def test_a_setting_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="ip is 'node7', expected an IPv4 or IPv6 address"):
        listening_ip(WireSettings(ip="node7"))


@pytest.mark.parametrize(("master", "ip"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("no.such.host.", "127.0.0.1")])
def test_a_rank_listens_on_the_way_to_worker_0(master: str, ip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert default_place() == {"ip": ip}
