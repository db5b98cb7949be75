import pytest

from poseidon import failpoints, files
from poseidon.errors import ConfigError
from poseidon.failpoints import FailpointError, hit


@pytest.fixture(autouse=True)
def _disarmed(monkeypatch):
    monkeypatch.setattr(failpoints, "ARMED", {})
    monkeypatch.setattr(failpoints, "_ASKED", [])


def test_it_happens_at_the_named_time_only():
    failpoints.arm(["wire.send=raise@3"], 0)
    assert not hit("wire.send")
    assert not hit("wire.receive")
    assert not hit("wire.send")
    with pytest.raises(FailpointError, match=r"failpoint wire\.send, time 3"):
        hit("wire.send")
    assert not hit("wire.send")


def test_it_happens_on_the_named_rank_only():
    failpoints.arm(["wire.send=raise#1", "wire.handle=delay:0.001"], 0)
    assert list(failpoints.ARMED) == ["wire.handle"]


def test_a_dropped_connection_and_damaged_bytes_are_the_callers_to_make():
    dropped = []
    failpoints.arm(["wire.send=drop", "wire.send=damage@2"], 0)
    assert not hit("wire.send", lambda: dropped.append(1))
    assert dropped == [1]
    assert hit("wire.send")
    data = bytes(range(10))
    assert sum(one != other for one, other in zip(data, failpoints.damaged(data), strict=True)) == 1


def test_a_disk_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "old", "note")
    failpoints.arm(["disk.write=raise"], 0)
    with pytest.raises(ConfigError, match=r"cannot write note .*failpoint disk\.write.*; check the disk"):
        files.write_text(path, "new", "note")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["wire.send=raise"], "its first word must be 'unsafe'"),
        (["unsafe", "wire.send"], "expected PLACE=ACTION"),
        (["unsafe", "wire.send=delay"], "expected PLACE=ACTION"),
        (["unsafe", "wire.send=raise:1"], "expected PLACE=ACTION"),
        (["unsafe", "wire.send=raise@0"], "expected PLACE=ACTION"),
        (["unsafe", "wire.sned=raise"], "unknown failpoint 'wire.sned'; did you mean 'wire.send'? known: disk.write, "),
        (["unsafe", "disk.write=drop"], "unknown action of failpoint disk.write 'drop'; known: delay, exit, raise"),
    ],
)
def test_what_is_not_understood_is_refused_and_nothing_armed(words, expected):
    with pytest.raises(ConfigError) as caught:
        failpoints.arm_as_asked(words, 0)
    assert expected in str(caught.value)
    assert not failpoints.ARMED


def test_the_environment_arms_once():
    for _ in range(2):
        failpoints.arm_as_asked(["unsafe", "wire.send=raise"], 0)
    assert len(failpoints.ARMED["wire.send"]) == 1
    failpoints.disarm()
    assert not hit("wire.send")
