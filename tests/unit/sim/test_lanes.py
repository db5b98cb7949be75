from poseidon.sim.agenda import Agenda
from poseidon.sim.lanes import Freight, Lane


def carry(*freights, piece=10.0, later=()):
    """Submit freights (name, stream, bytes, priority), some of them later; return when each ended, at 1 s per byte."""
    agenda, ends = Agenda(), {}
    lane = Lane(agenda, piece)

    def submit(name, stream, size, priority):
        lane.submit(Freight(stream, size, 1.0, lambda: ends.__setitem__(name, agenda.now), priority))

    for freight in freights:
        submit(*freight)
    for at, freight in later:
        agenda.after(at, lambda freight=freight: submit(*freight))
    agenda.run()
    return ends, lane


def test_one_stream_keeps_its_order():
    ends, lane = carry(("a", "x", 30, 0), ("b", "x", 5, 0))
    assert ends == {"a": 30, "b": 35}
    assert (lane.sent_bytes, lane.busy_s) == (35, 35)


def test_streams_share_the_lane_piece_by_piece():
    ends, _ = carry(("a", "x", 30, 0), ("b", "y", 30, 0))
    assert ends == {"a": 50, "b": 60}


def test_an_urgent_parcel_waits_for_one_piece_only():
    ends, _ = carry(("bulk", "x", 100, 9), later=[(12, ("urgent", "x", 5, 1))])
    assert ends == {"urgent": 25, "bulk": 105}
    ends, _ = carry(("bulk", "x", 100, 9), piece=50.0, later=[(12, ("urgent", "y", 5, 1))])
    assert ends == {"urgent": 55, "bulk": 105}


def test_events_of_one_moment_run_in_the_order_they_were_added():
    agenda, seen = Agenda(), []
    for name in "abc":
        agenda.after(1.0, lambda name=name: seen.append(name))
    agenda.after(0.5, lambda: agenda.after(0.5, lambda: seen.append("late")))
    agenda.run()
    assert seen == ["a", "b", "c", "late"]
    assert agenda.now == 1.0
