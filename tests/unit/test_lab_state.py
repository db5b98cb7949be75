import os

import pytest

from poseidon.errors import ConfigError
from poseidon.lab import state
from poseidon.lab.spec import make_spec


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "labs"))
    return tmp_path / "labs"


def make_state(name, warden=None, owner=None):
    me = state.ProcessId.of(os.getpid())
    place = state.Namespace(3, 4, 5)
    return state.LabState(name, make_spec(2, slow=["1:2x"]), warden or me, owner, place, (place, place), cut=(1,))


def test_a_state_reads_back_as_it_was_saved(folder):
    saved = make_state("a", owner=state.ProcessId(1, 2))
    state.save(saved)
    assert state.load("a") == saved
    assert [path.name for path in folder.iterdir()] == ["a.json"], "no half-written file may stay behind"
    state.forget("a")
    state.forget("a")
    assert state.load("a") is None


def test_the_only_lab_needs_no_name():
    assert state.choose(None, [make_state("a")]).name == "a"
    assert state.choose("b", [make_state("a"), make_state("b")]).name == "b"
    with pytest.raises(ConfigError, match=r"several labs are running.*a, b"):
        state.choose(None, [make_state("a"), make_state("b")])
    with pytest.raises(ConfigError, match="no lab is running"):
        state.choose(None, [])
    with pytest.raises(ConfigError, match="no lab named 'c'; running: a"):
        state.choose("c", [make_state("a")])


def test_a_lab_is_abandoned_when_its_owner_or_warden_is_gone():
    me = state.ProcessId.of(os.getpid())
    reused = state.ProcessId(me.pid, me.start - 1)
    assert not make_state("a").is_abandoned
    assert not make_state("a", owner=me).is_abandoned
    assert make_state("a", owner=reused).is_abandoned
    assert make_state("a", warden=reused).is_abandoned
