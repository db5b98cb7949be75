"""Where a job's secret comes from, and which files are not believed."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.errors import ConfigError
from poseidon.job.secret import find_secret

LONG = "sixteen bytes or more"


def test_the_environment_goes_before_a_file_and_that_before_the_users_own(tmp_path):
    file = tmp_path / "file"
    file.write_text(f"{LONG} of a file\n")
    file.chmod(0o600)
    home = {"HOME": str(tmp_path)}
    assert find_secret({"POSEIDON_SECRET": LONG, "POSEIDON_SECRET_FILE": str(file), **home}) == LONG.encode()
    assert find_secret({"POSEIDON_SECRET_FILE": str(file), **home}) == f"{LONG} of a file".encode()
    own = find_secret(home)
    assert len(own) == 64
    assert find_secret(home) == own
    assert find_secret({**home, "XDG_CONFIG_HOME": str(tmp_path / "other")}) != own


def test_workers_that_start_together_find_the_same_secret(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: find_secret({"HOME": str(tmp_path)}), range(32)))
    assert len(found) == 1
    (folder,) = (tmp_path / ".config").iterdir()
    assert [(path.name, path.stat().st_mode & 0o777) for path in folder.iterdir()] == [("secret", 0o600)]
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_open_is_refused(tmp_path, mode):
    file = tmp_path / "file"
    file.write_text(LONG)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600 {file}"):
        find_secret({"POSEIDON_SECRET_FILE": str(file)})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text(LONG)
    file.chmod(0o600)
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="must be a file of user 0, but belongs to user 12345"):
        find_secret({"POSEIDON_SECRET_FILE": str(file)})


def test_what_is_too_short_or_missing_is_refused(tmp_path):
    file = tmp_path / "file"
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        find_secret({"POSEIDON_SECRET_FILE": str(file)})
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="has 5 bytes; at least 16"):
        find_secret({"POSEIDON_SECRET_FILE": str(file)})
    with pytest.raises(ConfigError, match=r"\(POSEIDON_SECRET\) has 5 bytes; at least 16"):
        find_secret({"POSEIDON_SECRET": "short"})


def test_a_folder_of_another_user_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("os.getuid", lambda: 4711)
    with pytest.raises(ConfigError, match=r"none can be kept for its user .*set POSEIDON_SECRET"):
        find_secret({"HOME": str(tmp_path)})
