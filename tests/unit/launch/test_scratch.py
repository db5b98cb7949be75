from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.launch import scratch


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_its_owners_alone_and_its_name_is_new(place: Path) -> None:
    first, second = scratch.create(place, {}), scratch.create(place, {})
    assert first.folder.parent == place
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert len(first.folder.name) == len(scratch.PREFIX) + 16
    assert first.folder != second.folder
    for one in (first, second):
        os.close(one.lock)
        scratch.remove(one.folder)
    assert not list(place.iterdir())


def test_only_folders_of_ended_workers_are_swept(place: Path) -> None:
    alive, ended = scratch.create(place, {}), scratch.create(place, {})
    closed = ended.folder / "closed" / "inner"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    (ended.folder / "link").symlink_to("/")
    closed.chmod(0)
    closed.parent.chmod(0o500)
    other = place / "something else"
    other.mkdir()
    os.close(ended.lock)
    scratch.sweep(place)
    assert sorted(place.iterdir()) == sorted([alive.folder, other])
    os.close(alive.lock)
    scratch.sweep(place)
    assert list(place.iterdir()) == [other]


def test_scratch_files_are_on_the_disk_of_the_working_directory_and_not_in_memory(tmp_path: Path) -> None:
    here = tmp_path.stat().st_dev
    assert scratch.choose_place(tmp_path, [Path("/proc"), tmp_path], {}) == tmp_path
    elsewhere = Path("/proc").stat().st_dev
    assert elsewhere != here
    assert scratch.choose_place(Path("/sys"), [Path("/proc"), tmp_path], {elsewhere: "tmpfs", here: "ext4"}) == tmp_path
    with pytest.raises(OSError, match="no folder for scratch files"):
        scratch.choose_place(tmp_path, [], {})


def test_a_folder_that_vanishes_meanwhile_does_not_save_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [scratch.create(place, {}) for _ in range(2)]
    for one in made:
        os.close(one.lock)
    is_left, seen = scratch._is_left, []

    def vanish(folder: Path) -> bool:
        if not seen:
            scratch.remove(folder)
        seen.append(folder)
        return is_left(folder)

    monkeypatch.setattr(scratch, "_is_left", vanish)
    scratch.sweep(place)
    assert len(seen) == 2
    assert not list(place.iterdir())
