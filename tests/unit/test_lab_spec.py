import pytest

from poseidon.errors import ConfigError
from poseidon.lab import spec
from poseidon.lab.spec import LabSpec, make_spec


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        ("10gbit", 10_000_000_000),
        ("2.5Gbit", 2_500_000_000),
        ("200mbit", 200_000_000),
        ("64kbit", 64_000),
        (" 1 gbit ", 1_000_000_000),
        ("none", 0),
    ],
)
def test_rates_are_read_in_bits(word, bits):
    assert spec.parse_rate(word) == bits


@pytest.mark.parametrize("word", ["", "10", "gbit", "10gb", "-1gbit", "10 furlongs", "nan"])
def test_other_rates_are_refused_with_an_example(word):
    with pytest.raises(ConfigError, match="10gbit"):
        spec.parse_rate(word)


@pytest.mark.parametrize("bits", [0, 64_000, 1_500_000, 200_000_000, 2_500_000_000, 10_000_000_000])
def test_a_formatted_rate_reads_back(bits):
    assert spec.parse_rate(spec.format_rate(bits)) == bits


@pytest.mark.parametrize("rate", ["1kbit", "100gbit"])
def test_rates_the_kernel_cannot_shape_are_refused(rate):
    with pytest.raises(ConfigError, match="34gbit"):
        make_spec(2, rate)


def test_one_rate_is_for_all_and_several_are_one_each():
    assert make_spec(3, "1gbit").rates_bits == (10**9,) * 3
    assert make_spec(3, "1gbit,none,10mbit").rates_bits == (10**9, 0, 10**7)
    with pytest.raises(ConfigError, match=r"2 rates .* 3 machines"):
        make_spec(3, "1gbit,1gbit")


@pytest.mark.parametrize("machines", [0, -1, 251])
def test_machine_counts_out_of_range_are_refused(machines):
    with pytest.raises(ConfigError, match=f"1 to 250 machines, not {machines}"):
        make_spec(machines)


@pytest.mark.parametrize(("word", "seconds"), [("0.1ms", 1e-4), ("50us", 5e-5), ("2s", 2.0)])
def test_durations(word, seconds):
    assert spec.parse_duration(word) == pytest.approx(seconds)


def test_durations_and_losses_need_their_unit():
    with pytest.raises(ConfigError, match=r"0\.1ms"):
        spec.parse_duration("5")
    with pytest.raises(ConfigError, match=r"0\.01%"):
        spec.parse_fraction("0.1")
    assert spec.parse_fraction("0.01%") == pytest.approx(1e-4)


def test_delays_losses_and_queues_have_limits():
    with pytest.raises(ConfigError, match="delay"):
        make_spec(2, delay="11s")
    with pytest.raises(ConfigError, match="loss"):
        make_spec(2, loss="100%")
    with pytest.raises(ConfigError, match="queue"):
        make_spec(2, queue="1us")


def test_slow_machines_are_checked_against_the_lab():
    assert make_spec(4, slow=["3:2.5x", "0:4"]).slow == {3: 2.5, 0: 4.0}
    with pytest.raises(ConfigError, match="machines 0 to 3"):
        make_spec(4, slow=["4:2x"])
    with pytest.raises(ConfigError, match="factor above 1"):
        make_spec(4, slow=["1:1x"])
    with pytest.raises(ConfigError, match=r"3:2\.5x"):
        make_spec(4, slow=["3x"])


@pytest.mark.parametrize(("word", "numbers"), [("2", [2]), ("0,3", [0, 3]), ("1-3", [1, 2, 3]), ("1-2,2", [1, 2])])
def test_machine_lists(word, numbers):
    assert spec.parse_machines(word, 4) == numbers


@pytest.mark.parametrize("word", ["", "x", "1-", "4", "0-9"])
def test_bad_machine_lists(word):
    with pytest.raises(ConfigError, match=r"machine"):
        spec.parse_machines(word, 4)


def test_shape_keeps_a_segment_and_about_the_asked_queue():
    slow, fast = spec.link_shape(10**7, 0.005), spec.link_shape(10**10, 0.005)
    assert slow.burst_bytes == 1 << 16, "a smaller bucket than one segment would cut packets in software"
    assert fast.burst_bytes == 1 << 20
    assert fast.queue_bytes - fast.burst_bytes == pytest.approx(10**10 / 8 * 0.005)
    assert spec.link_shape(10**9, 0.005).burst_bytes == 250_000
    assert make_spec(1, "none").shape(0) is None


def test_addresses_and_names_differ_between_machines():
    machines = range(spec.MAX_MACHINES)
    assert len({spec.machine_address(machine) for machine in machines}) == spec.MAX_MACHINES
    assert max(int(spec.machine_address(machine).rpartition(".")[2]) for machine in machines) < 255
    assert spec.machine_name(7) == "machine7"


def test_spec_survives_json():
    made = make_spec(3, "1gbit,none,10mbit", delay="1ms", loss="1%", queue="2ms", slow=["2:3x"])
    assert LabSpec.from_json(made.to_json()) == made


def test_description_names_what_is_unusual():
    text = make_spec(2, "1gbit,10mbit", delay="0.1ms", slow=["1:2x"]).describe()
    assert text == "2 machines at 1gbit/10mbit, delay 0.1 ms, machine 1 2x slower"
