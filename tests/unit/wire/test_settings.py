import pytest

from poseidon.errors import ConfigError, WireError
from poseidon.wire.address import Address, listening_ip
from poseidon.wire.secret import JobSecret
from poseidon.wire.settings import SMALLEST_BUFFER_BYTES, WireSettings, suited_to
from poseidon.wire.tcp import TcpTransport


def test_environment_goes_over_defaults():
    environment = {
        "POSEIDON_WIRE_CAP_MBIT": "200",
        "POSEIDON_WIRE_ENCRYPT": "yes",
        "POSEIDON_WIRE_STREAMS_PER_PEER": "3",
        "HOME": "/",
    }
    settings = WireSettings.from_environment(environment, interface="eth0", streams_per_peer=2)
    assert settings == WireSettings(cap_mbit=200.0, encrypt=True, streams_per_peer=3, interface="eth0")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"POSEIDON_WIRE_CAP": "1"},
            "'POSEIDON_WIRE_CAP'; did you mean 'POSEIDON_WIRE_CAP_MBIT'.* known: .*POSEIDON_WIRE_CAP_MBIT",
        ),
        ({"POSEIDON_WIRE_CAP_MBIT": "fast"}, "POSEIDON_WIRE_CAP_MBIT is 'fast', expected a number"),
        ({"POSEIDON_WIRE_ENCRYPT": "maybe"}, "'maybe', expected 1 or 0"),
        ({"POSEIDON_WIRE_STREAMS_PER_PEER": "0"}, "streams_per_peer is 0, expected at least 1"),
        ({"POSEIDON_WIRE_IP": "0.0.0.0"}, "name the one address to listen on"),
    ],
)
def test_wrong_settings_are_refused(environment, says):
    with pytest.raises(ConfigError, match=says):
        WireSettings.from_environment(environment)


def test_addresses_survive_being_told():
    for address in (Address("10.77.0.2", 4000), Address("10.77.0.2", 4000, is_encrypted=True)):
        assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "10.0.0.1", "host:5", "10.0.0.1:x", "10.0.0.1:5/ssl", "10.0.0.1:5/tls/tls"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(WireError, match="is not an address"):
        Address.parse(text)


def test_the_listening_address_is_one():
    assert listening_ip(WireSettings()) == "127.0.0.1"
    assert listening_ip(WireSettings(ip="10.1.2.3", interface="lo")) == "10.1.2.3"
    assert listening_ip(WireSettings(interface="lo")) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'nosuch0' has no address here; this machine has .*lo"):
        listening_ip(WireSettings(interface="nosuch0"))


def test_what_is_derived_holds_for_one_purpose_and_one_pair():
    secret, other = JobSecret(b"s" * 32), JobSecret(b"t" * 32)
    derived = {
        secret.proof("claim", b"a", b"b", 0, 1),
        secret.proof("claim", b"a", b"b", 1, 0),
        secret.proof("claim", b"b", b"a", 0, 1),
        secret.proof("answer", b"a", b"b", 0, 1),
        other.proof("claim", b"a", b"b", 0, 1),
        secret.derive("tls key"),
        other.derive("tls key"),
    }
    assert len(derived) == 7
    assert secret.derive("tls key") == JobSecret(b"s" * 32).derive("tls key")
    assert "sss" not in repr(secret)


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match="has 5 bytes; at least 16"):
        TcpTransport(0, 1, b"short")


@pytest.mark.parametrize(("bytes_per_s", "peers"), [(125e6, 3), (250e6, 7), (1.25e9, 7), (3e9, 15)])
def test_what_lies_in_the_kernel_delays_an_urgent_message_by_less_than_a_millisecond(bytes_per_s: float, peers: int):
    assert peers * suited_to(bytes_per_s, peers)["send_buffer_bytes"] / bytes_per_s <= 0.76e-3


def test_a_slow_link_has_buffers_that_a_thread_can_keep_up_with():
    assert suited_to(1e5, peers=3)["send_buffer_bytes"] == SMALLEST_BUFFER_BYTES


def test_only_slow_links_are_balanced():
    assert suited_to(31.25e6, peers=7)["balance"]
    assert not suited_to(1.25e9, peers=7)["balance"]
