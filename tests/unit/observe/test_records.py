"""What a worker adds up, packs and sends, and what the launcher keeps of it."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from poseidon.launch.observing import JobObserver, find_slowest
from poseidon.launch.places import Place
from poseidon.observe.history import MOST_POINTS, History
from poseidon.observe.links import LinkMeter, LinkUse, parse_info
from poseidon.observe.looking import place_of, stack_of
from poseidon.observe.recorder import Recorder
from poseidon.observe.records import Record
from poseidon.observe.spans import StepSpan, read_spans, trace_events
from poseidon.observe.steps import BACKWARD, BETWEEN, ENDING, FORWARD, StepClock, between
from poseidon.observe.windows import Windows


def stepped(clock: StepClock, at: float, steps: int) -> float:
    """Steps of 1 s: 0.3 forward, 0.4 backward, 0.1 waiting at its end, 0.2 between, of which 0.05 waiting."""
    for step in range(steps):
        clock.mark(FORWARD, step, at, samples=8)
        clock.mark(BACKWARD, step, at + 0.3)
        clock.mark(ENDING, step, at + 0.7)
        clock.waited("the others to start backward", at + 0.7, at + 0.8)
        clock.mark(BETWEEN, step, at + 0.8)
        clock.waited("fc6", at + 0.8, at + 0.85)
        at += 1.0
    return at


def test_a_clock_splits_steps_into_own_time_and_waits() -> None:
    clock = StepClock(10.0)
    before = clock.look(10.0)
    end = stepped(clock, 10.0, 4)
    spent = between(before, clock.look(end))
    assert (spent.steps, spent.samples, spent.span_s) == (4, 32, 4.0)
    assert spent.phases_s[FORWARD] == pytest.approx(1.2)
    assert spent.phases_s[BACKWARD] == pytest.approx(1.6)
    assert spent.phases_s[ENDING] == pytest.approx(0.0)
    assert spent.phases_s[BETWEEN] == pytest.approx(0.6)
    assert spent.wait_s == pytest.approx(0.6)
    assert spent.waits_s == pytest.approx({"the others to start backward": 0.4, "fc6": 0.2})


def test_a_wait_under_way_counts_and_is_not_counted_twice() -> None:
    clock = StepClock(0.0)
    clock.mark(FORWARD, 0, 0.0)
    clock.waiting = ("fc6", 1.0)
    first = clock.look(3.0)
    assert first.waits_for == "fc6"
    assert first.waited_s[FORWARD] == 2.0
    clock.waited("fc6", 1.0, 4.0)
    spent = between(first, clock.look(4.0))
    assert spent.wait_s == pytest.approx(1.0)
    assert spent.phases_s[FORWARD] == pytest.approx(0.0)


def test_ever_new_names_of_waits_take_no_memory() -> None:
    clock = StepClock(0.0)
    for number in range(5000):
        clock.waited(f"wait {number}", 0.0, 1.0)
    assert len(clock.waits_s) <= 1000


def test_a_record_survives_the_pipe_and_fits_into_one_write() -> None:
    waits = {f"a layer with a rather long name, number {number}" * 3: float(number) for number in range(50)}
    links = {f"10.77.0.{number}": LinkUse(10**12, 10**12, 1234.5678, 10**9, 0.123, 10**6) for number in range(99)}
    places = {f"some_long_program_name.py:{number} in a_function" * 2: number for number in range(1, 30)}
    record = Record(
        at_s=1e6, span_s=0.5, step=10**6, steps=7, waits_s=waits, links=links, places=places, where="x" * 500
    )
    line = json.dumps({"record": record.pack()}).encode()
    assert len(line) < 4000
    read = Record.unpack(json.loads(line)["record"])
    assert read is not None
    assert (read.step, read.steps, len(read.waits_s)) == (10**6, 7, 6)
    assert read.links["10.77.0.0"].sent_bytes == 10**12


@pytest.mark.parametrize("data", [None, 3, [], {"step": "x"}, {"links": 3, "step": {}}, {"waits_s": [1]}])
def test_what_is_no_record_is_none(data: object) -> None:
    assert Record.unpack(data) is None


def test_the_kernel_s_count_of_a_connection_is_read() -> None:
    assert parse_info(b"\x01" * 20) is None
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        other, _ = door.accept()
        with one, other:
            one.sendall(b"x" * 5000)
            left = 5000
            while left:
                left -= len(other.recv(left))
            use = parse_info(other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
            assert use is not None
            assert use.received_bytes == 5000
            # Between workers of one machine there is no link.
            assert LinkMeter().look() == {}


def test_a_job_of_a_million_steps_keeps_a_bounded_past() -> None:
    history = History(2)
    record = Record(steps=1000, samples=10, forward_s=1.0, wait_s=0.5, memory_bytes=7)
    for second in range(0, 100_000, 100):
        history.add(0, record, float(second))
        history.add(1, record, float(second))
        history.add_loss(1.0 / (second + 1), float(second))
    assert len(history.points) <= MOST_POINTS
    assert sum(point.steps for point in history.points) == 1000 * 1000
    assert sum(point.parts_s[1][0] for point in history.points) == pytest.approx(1000.0)
    assert len(json.dumps(history.pack())) < 100_000


def test_slow_steps_are_looked_at_for_longer() -> None:
    windows = Windows(["a"])
    for second in range(40):
        windows.add(
            0,
            Record(at_s=float(second), span_s=1.0, steps=int(second % 8 == 7), step=second // 8, doing=FORWARD),
            second,
        )
    assert windows.look(40.0)[0].steps >= 3


def test_one_that_takes_a_lost_workers_place_is_not_blamed_for_its_silence() -> None:
    windows = Windows(["a", "b"])
    for rank in (0, 1):
        windows.add(rank, Record(at_s=1.0, span_s=1.0, steps=1, doing=FORWARD), 1.0)
    windows.renew(1)
    kept, renewed = windows.look(50.0)
    assert (kept.silent_s, renewed.silent_s, renewed.steps) == (49.0, 0.0, 0)
    assert renewed.host == "b"


def test_the_slowest_is_the_one_that_waited_least_in_all() -> None:
    assert find_slowest([10.0, 2.0, 12.0]) == (1, 9.0)
    assert find_slowest([10.0]) is None


def test_where_a_thread_is_names_the_line_of_the_program() -> None:
    assert place_of(threading.get_ident()).startswith("test_records.py:")
    assert "test_where_a_thread_is" in "\n".join(stack_of(threading.get_ident(), 100))


def test_a_recorder_tells_records_without_being_asked() -> None:
    told: list[dict[str, object]] = []
    has_told = threading.Event()

    def tell(**facts: object) -> None:
        told.append(facts)
        has_told.set()

    recorder = Recorder(tell)
    stepped(recorder.clock, recorder.clock.since, 3)
    assert has_told.wait(20)
    recorder.close()
    records = [Record.unpack(facts["record"]) for facts in told if "record" in facts]
    assert sum(record.steps for record in records if record is not None) == 3


def test_a_trace_has_a_row_for_every_kind_and_lanes_for_items_that_overlap() -> None:
    rows = [["phase", "1", 0.0, 0.3], ["item", "sharded fc6", 0.1, 0.5], ["item", "sharded fc7", 0.2, 0.6], ["bad"], 3]
    spans = read_spans(rows)
    assert [span.name for span in spans] == ["in forward", "sharded fc6", "sharded fc7"]
    events = trace_events({0: spans, 1: [StepSpan("wait", "fc6", 0.4, 0.5)]}, ["worker 0 on a", "worker 1 on b"])[
        "traceEvents"
    ]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in complete if event["cat"] == "sharded"} == {3, 4}
    assert {event["pid"] for event in complete} == {1, 2}
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in complete)


def test_the_observer_s_state_is_plain_data_and_says_who_is_slow() -> None:
    places = [Place(rank, rank, 0, 1, f"node{rank}") for rank in range(3)]
    observer = JobObserver(places, "train.py", None)
    observer.begin(0)
    for tick in range(8):
        for rank in range(3):
            own = 0.45 if rank == 1 else 0.25
            record = Record(
                at_s=tick * 0.5, span_s=0.5, steps=5, step=5 * tick, samples=40, doing=BETWEEN, doing_s=0.01,
                forward_s=0.1, backward_s=own - 0.1, wait_s=0.5 - own, waits_s={"fc6": 0.5 - own}, ip=f"10.0.0.{rank}",
            )  # fmt: skip
            observer.read_report(rank, {"record": record.pack()}, 100.0 + tick * 0.5)
        observer.look(100.0 + tick * 0.5)
    state = json.loads(json.dumps(observer.state(104.0)))
    assert state["verdict"]["host"] == "node1"
    assert state["steps_per_s"] == pytest.approx(10.0)
    assert state["samples_per_s"] == pytest.approx(240.0)
    assert len(state["workers"]) == 3
    for nonsense in ({"record": 3}, {"spans": 3}, {"plan": [3]}, {"stack": [{}]}, {"loss": "low"}):
        observer.read_report(0, nonsense, 104.5)


def test_a_worker_that_keeps_others_waiting_is_told_once_with_its_calls() -> None:
    places = [Place(rank, rank, 0, 1, f"node{rank}") for rank in range(2)]
    observer = JobObserver(places, "train.py", None)
    told = []
    for tick in range(60):
        now = 100.0 + tick * 0.5
        stuck_s = 0.0 if tick < 4 or tick > 56 else (tick - 4) * 0.5
        for rank in range(2):
            record = Record(
                at_s=now,
                span_s=0.5,
                steps=0 if stuck_s else 5,
                doing=FORWARD,
                doing_s=stuck_s,
                forward_s=0.5,
                waits_for="fc6" if stuck_s and rank == 0 else "",
            )
            observer.read_report(rank, {"record": record.pack()}, now)
        if tick == 30:
            observer.read_report(1, {"stack": ["train.py:3 in main", "model.py:12 in forward"]}, now)
        observer.look(now)
        told += [text for text in [observer.news()] if text]
    assert len(told) == 1
    assert "worker 1 on node1 has not moved for 2" in told[0]
    assert "    model.py:12 in forward" in told[0]
