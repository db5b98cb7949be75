"""The thin part of the watch: what it sends, hears, and raises."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from poseidon.errors import WorkerLostError
from poseidon.observe.steps import StepClock
from poseidon.team import life, watch
from poseidon.team import team as team_module
from poseidon.team.life import Beat
from poseidon.team.membership import Member, Membership, PeerLostError
from poseidon.team.pulse import BUSY_BYTES, Pulse, uncaught, waiting_call
from poseidon.team.team import Team
from poseidon.team.watch import Watch
from poseidon.wire.mesh import Heard, MeshError

TEAM = Membership(0, tuple(Member(rank, host, host) for rank, host in enumerate(["ape", "bee", "cat"])))


class Signals:
    """A mesh in which the other workers' signals are what a test says."""

    def __init__(self, others: dict[int, Beat]) -> None:
        self.others = others
        self.ended: set[int] = set()
        self.sent: list[Beat] = []
        self.has_parted = False
        self.has_beaten = threading.Event()

    def signal(self, data: bytes) -> None:
        self.sent.append(Beat.unpack(data))
        self.has_beaten.set()

    def hear(self) -> dict[int, Heard]:
        now = watch.time.monotonic()
        return {
            rank: Heard(now, beat.pack(), "its connection ended" if rank in self.ended else "")
            for rank, beat in self.others.items()
        }

    def part(self) -> None:
        self.has_parted = True


Open = Callable[..., tuple[Watch, Signals]]


@pytest.fixture
def open_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    for module in (watch, life):
        monkeypatch.setattr(module, "BEAT_S", 0.002)
    monkeypatch.setattr(team_module, "BEAT_S", 0.05)  # one that waits looks seldom enough for others to have worked
    opened: list[Watch] = []

    def make(others: dict[int, Beat] | None = None, **options: Any) -> tuple[Watch, Signals]:
        mesh = Signals(others or {1: Beat(), 2: Beat()})
        opened.append(Watch(mesh, 0, TEAM, **{"timeout_s": 60.0, **options}))  # type: ignore[arg-type]
        return opened[-1], mesh

    yield make
    for one in opened:
        one.close()
        assert not one._thread.is_alive()


def _await_beats(mesh: Signals, count: int) -> None:
    for _ in range(count):
        mesh.has_beaten.clear()
        assert mesh.has_beaten.wait(30)


def test_the_heartbeat_says_what_this_worker_does(open_watch: Open) -> None:
    one, mesh = open_watch()
    for step, doing in ((0, "starting"), (7, "in backward")):
        one.note(step, doing)
        _await_beats(mesh, 2)
        assert (mesh.sent[-1].step, mesh.sent[-1].doing, mesh.sent[-1].left) == (step, doing, "")


def test_the_heartbeat_says_what_this_worker_waits_for(open_watch: Open) -> None:
    one, mesh = open_watch()
    with one.waiting("fc6"):
        _await_beats(mesh, 2)
        first = mesh.sent[-1]
    _await_beats(mesh, 2)
    between = mesh.sent[-1]
    with one.waiting("fc6"):
        _await_beats(mesh, 2)
    assert (first.waits_for, between.waits_for, mesh.sent[-1].waits_for) == ("fc6", "", "fc6")
    assert first.wait != mesh.sent[-1].wait


def test_a_wait_in_another_team_counts_where_all_its_workers_are_seen(open_watch: Open) -> None:
    _, mesh = open_watch()
    other, _ = open_watch()
    with other.waiting("the others to end the script"):
        _await_beats(mesh, 2)
        assert mesh.sent[-1].waits_for == "the others to end the script"
    other.membership = Membership(0, (*TEAM.members, Member(3, "dog", "dog")))
    with other.waiting("all four"):
        _await_beats(mesh, 2)
        assert mesh.sent[-1].waits_for == ""  # for the fourth, of whom this team knows nothing


def test_waits_of_poseidons_own_threads_do_not_count(open_watch: Open) -> None:
    one, mesh = open_watch()

    def wait() -> None:
        with one.waiting("fc6"):
            _await_beats(mesh, 2)

    thread = threading.Thread(target=wait, name="poseidon-levels")
    thread.start()
    thread.join()
    assert not any(beat.waits_for for beat in mesh.sent)


@pytest.mark.parametrize("error", [None, ValueError("loss is nan\nand more")])
def test_the_last_beat_says_how_the_worker_leaves(open_watch: Open, error: Exception | None) -> None:
    one, mesh = open_watch()
    one.note(12, "finished backward")
    one.close(watch.FINISHED, error)
    one.close()
    last = mesh.sent[-1]
    assert (last.step, last.left, last.why) == (
        (12, "finished", "") if error is None else (12, "failed", "ValueError: loss is nan")
    )
    assert mesh.has_parted
    assert [beat.left for beat in mesh.sent].count("") == len(mesh.sent) - 1


def test_a_wait_without_hope_ends_with_the_culprit(open_watch: Open) -> None:
    one, _ = open_watch({1: Beat(4, "finished backward", left="finished"), 2: Beat(5, "in forward")})
    one.note(5, "at the end of backward")
    team = Team.__new__(Team)
    team.watch = one
    with pytest.raises(WorkerLostError) as caught:
        team.result(Future(), "fc1")
    text = str(caught.value)
    assert text.startswith("rank 0 (ape) gave up waiting at step 5 for fc1: rank 1 (bee) finished at step 4")
    assert "The wait ended with: HopelessError: no answer within" in text


class LateWork:
    """An operation that ends, well or not, at the very moment at which the first wait for it gives up."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._waits = 0

    def wait(self, limit: timedelta) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("timed out")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def test_an_operation_that_ends_as_its_wait_gives_up_has_ended_well(open_watch: Open) -> None:
    one, _ = open_watch({1: Beat(5, "in forward"), 2: Beat(5, "in forward")})
    team = Team.__new__(Team)
    team.watch = one
    team.wait(LateWork(), "fc1")
    with pytest.raises(WorkerLostError, match="Connection closed by peer"):
        team.wait(LateWork("Connection closed by peer"), "fc1")


def test_a_wait_for_one_that_works_outside_goes_on_and_says_so(
    open_watch: Open, caplog: pytest.LogCaptureFixture
) -> None:
    one, mesh = open_watch({1: Beat(4, "in forward"), 2: Beat(5, waits_for="fc1")}, timeout_s=0.05)
    one.note(5, "in backward")
    team = Team.__new__(Team)
    team.watch = one
    future: Future[int] = Future()
    ends = threading.Event()

    def work() -> None:
        for count in range(10**6):
            mesh.others[1] = Beat(4, "in forward", work=count)
            if ends.wait(0.001):
                break
        future.set_result(7)

    thread = threading.Thread(target=work)
    thread.start()
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.append(team.result(future, "fc1")))
    waiter.start()
    while not caplog.records:
        ends.wait(0.001)
    ends.set()
    thread.join()
    waiter.join()
    assert found == [7]
    (record,) = caplog.records
    assert "rank 1 (bee) is alive, at step 4, in forward" in record.getMessage()
    assert "cat" not in record.getMessage()


def test_a_broken_connection_waits_for_others_to_show_who_is_dead(open_watch: Open) -> None:
    one, mesh = open_watch({1: Beat(5), 2: Beat(5)})
    mesh.ended.add(1)
    error = one.lost("fc1", 2, PeerLostError(2, "reset"))
    assert "rank 2 (cat) is alive, at step 5, starting, but its connection with rank 0 broke" in str(error)


def test_whoever_listens_hears_of_a_connection_that_ends_without_a_farewell(open_watch: Open) -> None:
    one, mesh = open_watch({1: Beat(5), 2: Beat(5, left="finished")})
    first: list[tuple[int, str]] = []
    has_heard = threading.Event()

    def fail(_rank: int, _why: str) -> None:
        raise KeyError("cannot handle it")

    def note(rank: int, why: str) -> None:
        first.append((rank, why))
        has_heard.set()

    one.listen_lost(fail)
    one.listen_lost(note)
    mesh.ended |= {1, 2}
    assert has_heard.wait(30)
    _await_beats(mesh, 3)
    assert first == [(1, "the connection of its heartbeats broke: its connection ended")], "once, and not who has left"
    late: list[tuple[int, str]] = []
    one.listen_lost(lambda rank, why: late.append((rank, why)))
    assert late == first
    one.lose(2, "reset")
    assert late == first == [*first[:1], (2, "reset")]


def test_a_look_tells_of_losses_without_a_beat(open_watch: Open) -> None:
    one, mesh = open_watch()
    one.close()
    lost: list[int] = []
    one.listen_lost(lambda rank, _: lost.append(rank))
    mesh.ended.add(2)
    one.look()
    assert lost == [2]


def test_who_gives_up_says_so_before_it_leaves(open_watch: Open) -> None:
    one, mesh = open_watch()
    error = one.lost("fc1", 1, watch.HopelessError(60.0))
    one.lost("fc2", 2, watch.HopelessError(60.0))
    assert one._thread.is_alive()
    assert {(beat.left, beat.why) for beat in mesh.sent if beat.left} == {("failed", watch.first_line(error))}
    one.close(error=ValueError("a consequence"))
    assert (mesh.sent[-1].left, mesh.sent[-1].why) == ("failed", watch.first_line(error))


def test_whoever_sent_a_damaged_message_is_named_whoever_is_dead(open_watch: Open) -> None:
    watcher, mesh = open_watch()
    mesh.ended.add(1)
    error = watcher.lost("the roll call", 2, MeshError(2, "message 7 is damaged", is_damaged=True))
    assert "rank 2 (cat) sent a damaged message. The wait ended with: MeshError" in str(error)
    assert "rank 1" not in str(error)


def test_an_error_without_words_is_named_by_its_class(open_watch: Open) -> None:
    one, _ = open_watch()
    assert str(one.lost("fc1", None, KeyboardInterrupt())).endswith("The wait ended with: KeyboardInterrupt")


def test_only_the_team_that_was_noted_last_tells_the_launcher(
    open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(watch.report, "tell", lambda step, doing: told.append((step, doing)))
    one, mesh = open_watch()
    two, other = open_watch()
    one.note(1, "in forward")
    two.note(7, "in backward")
    _await_beats(mesh, 3)
    _await_beats(other, 3)
    told.clear()
    _await_beats(mesh, 3)
    _await_beats(other, 3)
    assert set(told) == {(7, "in backward")}, "or the launcher would take two workers' states in turn for progress"


def test_the_launcher_hears_how_far_a_worker_came(open_watch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(watch.report, "tell", lambda step, doing: told.append((step, doing)))
    monkeypatch.setattr(watch, "BEAT_S", 60.0)  # it ends before the second beat
    one, _ = open_watch()
    one.note(21, "finished backward")
    one.close()
    assert told[-1] == (21, "finished backward")


def test_where_workers_meet_again_the_launcher_goes_on_counting_steps(
    open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(watch.report, "tell", lambda step, doing: told.append(step))  # noqa: ARG005
    monkeypatch.setattr(watch, "_BEFORE", [0])
    watch.number_steps_from(56)
    one, mesh = open_watch()
    one.clock = StepClock(0.0)
    one.note(1, "in forward")
    _await_beats(mesh, 3)
    assert (told[-1], one.clock.step) == (57, 57)
    assert mesh.sent[-1].step == 1, "among themselves workers count as their engines do"


def test_a_script_that_ended_with_an_error_has_failed_while_its_process_waits_for_threads(
    open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mesh = open_watch()
    _await_beats(mesh, 2)
    assert not mesh.sent[-1].left
    monkeypatch.setattr(watch, "uncaught", lambda: ValueError("the reason of it all"))
    _await_beats(mesh, 2)
    assert (mesh.sent[-1].left, mesh.sent[-1].why) == ("failed", "ValueError: the reason of it all")


def test_in_an_elastic_job_a_script_that_ended_with_an_error_resigns(
    open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_resigned = threading.Event()
    monkeypatch.setattr(watch, "this_job", lambda: SimpleNamespace(resign=has_resigned.set))
    _, mesh = open_watch()
    _await_beats(mesh, 3)
    assert not has_resigned.is_set()
    monkeypatch.setattr(watch, "uncaught", ValueError)
    assert has_resigned.wait(30), "the others would wait for it to leave its step"


LEFT_BEHIND = """
import threading, time
from poseidon.team.pulse import uncaught

def stay():
    while uncaught() is None:
        time.sleep(0.01)
    print("seen:", uncaught())

threading.Thread(target=stay).start()
raise ValueError("the reason of it all")
"""


def test_an_error_is_seen_while_the_process_waits_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "seen: the reason of it all\n")
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert uncaught() is None, "at a prompt the program goes on"


class Work:
    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done
        self.is_asked = threading.Event()

    def is_completed(self) -> bool:
        self.is_asked.set()
        return self.is_done


class Ending:
    """Stands for the end of the process: keeps the error."""

    def __init__(self) -> None:
        self.errors: list[WorkerLostError] = []
        self.has_come = threading.Event()

    def __call__(self, error: WorkerLostError) -> None:
        self.errors.append(error)
        self.has_come.set()


STUCK = {rank: Beat(3, "in backward", "fc6", 9) for rank in (1, 2)}


def test_a_guarded_operation_that_never_ends_ends_the_process(open_watch: Open) -> None:
    ending = Ending()
    one, _ = open_watch(dict(STUCK), timeout_s=0.0, give_up=ending)
    one.note(3, "in backward")
    one.guard(Work(is_done=True), "conv1")
    one.guard(Work(is_done=True), "conv2")
    one.guard(Work(is_done=False), "fc6 ... fc8")
    assert ending.has_come.wait(30)
    one.close()
    (error,) = ending.errors
    assert "at step 3 for fc6 ... fc8: nobody is dead" in str(error)


def test_guarded_operations_have_their_time(open_watch: Open) -> None:
    ending = Ending()
    one, _ = open_watch(dict(STUCK), timeout_s=3600.0, give_up=ending)
    works = [Work(is_done=False), Work(is_done=True)]
    for number, work in enumerate(works):
        one.guard(work, f"bucket {number}")
    assert works[0].is_asked.wait(30)
    works[0].is_done = True
    # Operations end in the order in which they were started, so the second is looked at once the first is done.
    assert works[1].is_asked.wait(30)
    one.close()
    assert not ending.errors


def test_without_a_callback_the_process_says_why_and_ends(
    open_watch: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    has_ended = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        has_ended.set()

    monkeypatch.setattr("poseidon.team.watch.os._exit", end)
    one, _ = open_watch(dict(STUCK), timeout_s=0.0)
    one.guard(Work(is_done=False), "fc8")
    assert has_ended.wait(30)
    one.close()
    assert statuses == [WorkerLostError.exit_status] == [75]
    assert "poseidon: rank 0 (ape) gave up waiting at step 0 for fc8: nobody is dead" in capsys.readouterr().err


def test_a_closed_watch_is_not_kept_alive(open_watch: Open) -> None:
    one = Watch(Signals({1: Beat()}), 0, TEAM, timeout_s=60.0)  # type: ignore[arg-type]
    is_there = weakref.ref(one)
    one.close()
    one.close()
    del one
    gc.collect()
    assert is_there() is None


def test_a_process_that_computes_or_writes_is_found_working(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, used, moved = [100.0], [5.0], [0]
    monkeypatch.setattr("poseidon.team.pulse.time.monotonic", lambda: now[0])
    monkeypatch.setattr("poseidon.team.pulse.time.process_time", lambda: used[0])
    monkeypatch.setattr("poseidon.team.pulse.moved_bytes", lambda: moved[0])
    pulse = Pulse()
    for seconds, cpu_s, size, is_working in (
        (1.0, 0.001, 200, False),
        (1.0, 0.5, 0, True),
        (1.0, 0.0, BUSY_BYTES, True),
        (60.0, 0.05, 900, False),
    ):
        before = pulse.work
        now[0], used[0], moved[0] = now[0] + seconds, used[0] + cpu_s, moved[0] + size
        pulse.look()
        assert (pulse.work > before) == is_working


def test_a_thread_in_a_collective_of_the_scripts_own_is_seen_to_wait() -> None:
    store = dist.HashStore()

    def meet() -> None:
        # With this torch starts a group.
        dist.distributed_c10d._store_based_barrier(0, store, "g", 2, timedelta(seconds=30))

    thread = threading.Thread(target=meet, daemon=True)
    assert waiting_call(threading.get_ident()) == ("", 0)
    thread.start()
    assert thread.ident is not None
    while waiting_call(thread.ident)[0] != "_store_based_barrier() of torch.distributed":
        assert thread.is_alive()
    assert waiting_call(thread.ident) == waiting_call(thread.ident)
    meet()
    thread.join()
    assert waiting_call(thread.ident) == ("", 0)
