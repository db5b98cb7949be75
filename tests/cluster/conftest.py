from pathlib import Path

import pytest

from poseidon.errors import ConfigError
from poseidon.job import members
from poseidon.lab import Lab, state


@pytest.fixture(scope="session")
def _namespaces(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(state.FOLDER_VARIABLE, str(tmp_path_factory.mktemp("probe")))
        try:
            with Lab(machines=1):
                pass
        except ConfigError as error:
            return str(error)
    return ""


def host_links():
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


@pytest.fixture(autouse=True)
def nothing_left(_namespaces, tmp_path, monkeypatch):
    """Give the test a state folder of its own, and see that nothing of its labs outlives it.

    The folder's name travels in the environment of all that a lab starts, so every process of the test is found.
    """
    if _namespaces:
        pytest.skip(f"no lab can be made here: {_namespaces}")
    folder = tmp_path / "labs"
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(folder))
    links = host_links()
    yield
    assert state.load_all() == []
    assert list(folder.glob("*")) == []
    assert members.pids_marked(state.FOLDER_VARIABLE, str(folder)) == []
    assert host_links() == links
