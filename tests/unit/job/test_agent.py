"""Workers that torchrun starts again agree on a name that no dead worker knows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.errors import WorkerLostError
from poseidon.job.agent import agree_on_name, has_agent


class MemoryStore:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.kept[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.kept, 20)
            return self.kept[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def _start(store: MemoryStore, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as threads:
        return set(threads.map(lambda rank: agree_on_name(store, rank, size, 20.0), range(size)))


def test_each_start_has_one_name_of_its_own() -> None:
    store = MemoryStore()
    names = [_start(store, 3) for _ in range(5)]
    assert [len(found) for found in names] == [1] * 5
    assert len(set.union(*names)) == 5


def test_one_that_died_before_it_heard_the_name_holds_nobody_up() -> None:
    store = MemoryStore()
    store.set("poseidon/here/1", "dead")
    store.set("poseidon/name/dead", "of a dead first")
    store.set("poseidon/heard/dead/of a dead first", "")
    assert len(_start(store, 3)) == 1


def test_a_first_worker_that_waits_in_vain_names_the_others() -> None:
    with pytest.raises(WorkerLostError, match=r"ranks \[1, 2\] did not come to torchrun's store in 0\.05 s"):
        agree_on_name(MemoryStore(), 0, 3, 0.05)


def test_only_torchruns_agent_counts() -> None:
    assert has_agent({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not has_agent({"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not has_agent({})
