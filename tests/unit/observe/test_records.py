"""What a worker adds up, packs and sends, and what the launcher keeps of it."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.launch import observing
from poseidon.launch.observing import JobObserver, find_slowest
from poseidon.launch.places import Place
from poseidon.observe.folder import SUMMARY, RunFolder, read_events, read_json
from poseidon.observe.history import MOST_POINTS, History
from poseidon.observe.links import LinkMeter, LinkUse, parse_info
from poseidon.observe.looking import place_of, stack_of
from poseidon.observe.metrics import format_metrics
from poseidon.observe.profiles import merge_profiles
from poseidon.observe.recorder import Recorder
from poseidon.observe.records import Record, shorten
from poseidon.observe.spans import StepSpan, read_spans, trace_events
from poseidon.observe.steps import BACKWARD, BETWEEN, ENDING, FORWARD, MOST_SPANS, StepClock, between
from poseidon.observe.traffic import TrafficMeter
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

    def tell(**facts: object) -> bool:
        told.append(facts)
        has_told.set()
        return True

    recorder = Recorder(tell)
    stepped(recorder.clock, recorder.clock.since, 3)
    assert has_told.wait(20)
    recorder.close()
    records = [Record.unpack(facts["record"]) for facts in told if "record" in facts]
    assert sum(record.steps for record in records if record is not None) == 3


def test_a_meter_forgets_who_is_gone_but_not_what_it_sent() -> None:
    class Sender:
        sent = 0

        def totals(self) -> dict[str, int]:
            return {"sharded": self.sent}

        def left(self) -> tuple[int, int]:
            return 2, 500

    meter, one, other = TrafficMeter(), Sender(), Sender()
    meter.add(one.totals, one.left)
    meter.add(other.totals)
    one.sent, other.sent = 10, 5
    assert meter.look() == ({"sharded": 15}, 2, 500)
    assert meter.look() == ({}, 2, 500)
    one.sent += 7
    assert meter.look().sent_bytes == {"sharded": 7}
    del one
    other.sent += 1
    assert meter.look() == ({"sharded": 1}, 0, 0)


def test_routes_are_added_up_over_workers() -> None:
    observer = JobObserver([Place(rank, rank, 0, 1, f"node{rank}") for rank in range(2)], "train.py", None)
    for tick in range(4):
        for rank in range(2):
            record = Record(
                at_s=tick, span_s=0.5, steps=2, doing=BETWEEN, routes={"sharded": 100, "rows": rank}, queued=tick
            )
            observer.read_report(rank, {"record": record.pack()}, 100.0 + tick)
        observer.look(100.0 + tick)
    state = observer.state(104.0)
    assert state["routes"] == [
        {"route": "sharded", "bytes": 800, "step_bytes": 100},
        {"route": "rows", "bytes": 4, "step_bytes": 0},
    ]
    assert [worker["queued"] for worker in state["workers"]] == [3, 3]


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


def profile_of(rank: int | None, at_s: float) -> dict[str, Any]:
    """A profile as torch.profiler exports it: an operation at this time of day, and one long before."""
    base_s = 1_000_000
    found: dict[str, Any] = {"baseTimeNanoseconds": base_s * 10**9}
    if rank is not None:
        found["distributedInfo"] = {"rank": rank}
    times = {"aten::linear": at_s, "aten::early": at_s - 500}
    found["traceEvents"] = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 77, "tid": 77, "ts": (when - base_s) * 1e6, "dur": 50.0}
        for name, when in times.items()
    ]
    kernel = {"cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    return {**found, "traceEvents": [*found["traceEvents"], {**found["traceEvents"][0], **kernel}, {"ph": "M"}, 3]}


def test_profiles_lie_beside_the_trace_on_its_clock(tmp_path: Path) -> None:
    # Worker 1's clock shows 1000 s more than the launcher's, and its time of day is another 2,000,000 s on.
    observer = JobObserver([Place(rank, rank, 0, 1, f"node{rank}") for rank in range(2)], "train.py", None)
    for rank, ahead_s in enumerate((0.0, 1000.0)):
        observer.read_report(rank, {"record": Record(at_s=50.0 + ahead_s, span_s=0.5).pack()}, 50.0)
        spans = [["phase", "1", 51.0 + rank + ahead_s, 52.0 + rank + ahead_s]]
        facts = {"spans": spans, "spans_of": "trace", "spans_step": 3, "wall_s": 2_000_000.0}
        observer.read_report(rank, facts, 53.0)
    trace = trace_events(observer._traced, ["worker 0", "worker 1"], observer._times_of_day)
    profiles = {0: profile_of(0, 2_000_051.25), 1: profile_of(1, 2_001_052.25)}
    merged = json.loads(json.dumps(merge_profiles(json.loads(json.dumps(trace)), profiles)))["traceEvents"]
    starts = {(event["pid"], event["name"]): event["ts"] for event in merged if event["ph"] == "X"}
    assert starts == {
        (1, "in forward"): 0.0, (1, "aten::linear"): 250_000.0, (1, "gemm"): 250_000.0,
        (2, "in forward"): 1_000_000.0, (2, "aten::linear"): 1_250_000.0, (2, "gemm"): 1_250_000.0,
    }  # fmt: skip
    rows = {event["args"]["name"] for event in merged if event["name"] == "thread_name" and event["tid"] >= 1000}
    assert rows == {"torch.profiler, thread 77", "torch.profiler, GPU 0 stream 7"}
    with pytest.raises(ConfigError, match="nothing in the traced steps"):
        merge_profiles(trace, {0: profile_of(0, 3_000_000.0)})
    with pytest.raises(ConfigError, match="no steps of worker 5"):
        merge_profiles(trace, {5: profile_of(5, 2_000_051.25)})


def test_the_command_adds_profiles_of_named_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").touch()
    trace = trace_events({0: [StepSpan("phase", "in forward", 1.0, 2.0)]}, ["worker 0"], {0: 2_000_000.0})
    (run / "trace.json").write_text(json.dumps(trace))
    told, silent, out = tmp_path / "told.json", tmp_path / "silent.json.gz", tmp_path / "both.json"
    told.write_text(json.dumps(profile_of(0, 2_000_001.5)))
    silent.write_bytes(gzip.compress(json.dumps(profile_of(None, 2_000_001.5)).encode()))
    for words in ([str(told)], [f"0={silent}"]):
        assert main(["trace", str(run), "--profile", *words, "-o", str(out)]) == 0
        assert "aten::linear" in out.read_text()
    assert main(["trace", str(run), "--profile", str(silent), "-o", str(out)]) == 1
    assert "write --profile RANK=" in capsys.readouterr().err
    assert main(["trace", str(run), "--profile", str(told)]) == 1
    told.write_text("[]")
    assert main(["trace", str(run), "--profile", f"0={told}", "-o", str(out)]) == 1
    assert "is not a Chrome trace" in capsys.readouterr().err


class SlowFeed:
    """Takes as long as it is told, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes_s = 0.0
        self.fed_at: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def feed(self, state: Mapping[str, Any], now: float) -> None:
        self.fed_at.append(now)
        self.now += self.takes_s


def test_one_state_that_takes_long_does_not_delay_the_next_and_slow_ones_come_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = SlowFeed()
    monkeypatch.setattr(observing, "time", types.SimpleNamespace(monotonic=feed.monotonic, time=time.time))
    observer = JobObserver([Place(0, 0, 0, 1, "node0")], "train.py", None, [feed])  # type: ignore[list-item]

    def wait_for_state() -> float:
        since, count = feed.now, len(feed.fed_at)
        while len(feed.fed_at) == count:
            feed.now += 0.25
            observer.look(feed.now)
        return feed.fed_at[-1] - since

    wait_for_state()
    feed.takes_s = 0.25
    wait_for_state()
    assert wait_for_state() == 1.0
    assert wait_for_state() == 7.5


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
    broken = [{"record": 3}, {"spans": 3}, {"plan": [3, ["a", "b", "c", "d"]]}, {"stack": [{}]}, {"loss": "low"}]
    for nonsense in (*broken, {"record": {"memory_bytes": float("inf")}}, {"record": {"links": {"a": [1e999] * 6}}}):
        observer.read_report(0, nonsense, 104.5)


def test_a_worker_that_has_ended_is_not_said_to_be_silent() -> None:
    observer = JobObserver([Place(rank, rank, 0, 1, f"node{rank}") for rank in range(2)], "train.py", None)
    for tick in range(80):
        for rank in range(2 if tick < 8 else 1):
            record = Record(at_s=tick * 0.5, span_s=0.5, steps=5, doing=BETWEEN, forward_s=0.5)
            observer.read_report(rank, {"record": record.pack()}, 100.0 + tick * 0.5)
        if tick == 8:
            observer.end_worker(1, 0)
        observer.look(100.0 + tick * 0.5)
        assert "said nothing" not in observer.verdict.text
        assert observer.news() is None
    assert [worker["rank"] for worker in observer.state(140.0)["workers"]] == [0, 1]


def test_a_loss_that_is_no_number_is_said_and_leaves_the_state_readable(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    observer = JobObserver([Place(0, 0, 0, 1, "node0")], "train.py", folder)
    for at, loss in enumerate((1.0, float("nan"), float("nan"), float("inf"), 2.0, float("inf"))):
        observer.read_loss(loss, 100.0 + at)
    state = json.loads(json.dumps(observer.state(110.0), allow_nan=False))
    assert state["loss"] == "inf"
    assert [loss for loss in state["history"]["loss"] if loss is not None][-1] == 2.0
    assert "poseidon_loss inf" in format_metrics(state, {})
    observer.end(0, "", False, 110.0)
    folder.close()
    assert read_json(tmp_path / "run" / SUMMARY)["loss"] == "inf"
    assert [event["text"] for event in read_events(tmp_path / "run") if event["event"] == "loss"] == [
        "the loss is nan",
        "the loss is inf",
    ]


def test_names_in_any_script_fit_into_one_write() -> None:
    waits = {f"{number}層の名前🙂" * 30: 1.0 for number in range(9)}
    line = json.dumps({"record": Record(waits_s=waits, waits_for="é" * 500, where="層" * 500).pack()})
    assert len(line) < 4000
    assert shorten("fc6") == "fc6"
    assert shorten("é" * 50, 60) == "é" * 10


def test_a_trace_and_a_plan_arrive_whole_through_a_pipe_that_is_often_full() -> None:
    told: list[dict[str, Any]] = []
    calls = itertools.count()

    def tell(**facts: Any) -> bool:
        if next(calls) % 3:
            return False
        told.append(facts)
        return True

    recorder = Recorder(tell)
    recorder.trace(2, 40)
    recorder.tell_plan("a plan", 1, [("sharded", f"layer {number}", 8.0, 0.1) for number in range(100)], 0.0)
    stepped(recorder.clock, recorder.clock.since, 60)
    recorder.close()
    spans = [span for facts in told if facts.get("spans_of") == "trace" for span in facts["spans"]]
    forwards = [span for span in spans if span[:2] == ["phase", str(FORWARD)]]
    assert len(forwards) == 38
    assert len({tuple(span) for span in spans}) == len(spans)
    assert [row[1] for facts in told if "plan" in facts for row in facts["plan"]] == [f"layer {n}" for n in range(100)]


def test_a_trace_of_ever_so_many_steps_ends_at_a_bound() -> None:
    clock = StepClock(0.0)
    clock.traced = range(1, 10**9)
    stepped(clock, 0.0, MOST_SPANS // 4)
    assert clock.spans is None
    assert clock.recorded is not None
    assert MOST_SPANS <= len(clock.recorded[1]) < MOST_SPANS + 10
    assert clock.traced.stop < MOST_SPANS // 4


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
