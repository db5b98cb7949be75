from __future__ import annotations

import pytest

from poseidon.launch.cause import (
    Death,
    DeathKind,
    accused,
    describe_status,
    explain,
    first_cause,
    last_traceback,
    resolve,
)

LOST = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "poseidon.errors.WorkerLostError: rank 0 (ape) gave up waiting at step 4 for the gradients: nobody is dead, but "
    "rank 2 (cat) is alive, at step 3, in forward, waiting for new_group() of torch.distributed (waited 60 s; "
    "timeout_s= changes that). The wait ended with: x",
)


def ended(rank: int, status: int, *tail: str) -> Death:
    return Death(rank, f"host{rank}", DeathKind.EXIT, status, tail)


@pytest.mark.parametrize(
    "death",
    [
        ended(0, 75),
        ended(0, 1, *LOST),
        ended(0, 1, "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6166."),
        ended(0, 1, "RuntimeError: Connection reset by peer"),
        ended(
            0, 1, "torch.distributed.DistNetworkError: Connection was likely closed. Did the remote server shutdown?"
        ),
        ended(0, 1, "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"),
    ],
)
def test_who_only_says_that_another_is_lost_is_a_symptom(death: Death) -> None:
    assert death.is_symptom


@pytest.mark.parametrize(
    "death",
    [
        ended(0, 1, "ValueError: x"),
        ended(0, 7),
        ended(0, -9, *LOST),
        Death(0, "ape", DeathKind.MACHINE, 0, LOST),
        Death(0, "ape", DeathKind.HANG, 0, LOST),
    ],
)
def test_who_fails_by_itself_is_a_cause(death: Death) -> None:
    assert not death.is_symptom


def test_the_first_cause_counts_more_than_earlier_symptoms_and_later_causes() -> None:
    symptom, cause, later = ended(0, 1, *LOST), ended(2, -9), ended(1, 3)
    assert first_cause([symptom, cause, later]) == cause
    assert first_cause([later, cause]) == later
    assert first_cause([symptom]) == symptom
    assert first_cause([]) is None


@pytest.mark.parametrize(
    ("death", "status"),
    [
        (ended(0, 7), 7),
        (ended(0, -9), 137),
        (ended(0, -11), 139),
        (ended(0, 75), 75),
        (Death(0, "ape", DeathKind.HANG), 124),
        (Death(0, "ape", DeathKind.MACHINE), 75),
    ],
)
def test_the_jobs_status_is_the_workers_as_a_shell_would_say(death: Death, status: int) -> None:
    assert death.exit_status == status


def test_a_worker_that_the_others_wait_for_hangs() -> None:
    deaths = [ended(0, 1, *LOST), ended(1, 1, *LOST)]
    assert accused(deaths) == (2, "is alive, at step 3, in forward, waiting for new_group() of torch.distributed")
    cause = resolve(deaths, {2: "cat"}, [])
    assert cause is not None
    assert (cause.rank, cause.host, cause.kind) == (2, "cat", DeathKind.HANG)
    assert "at step 3, in forward" in cause.how


def test_a_worker_that_failed_and_does_not_end_is_the_cause() -> None:
    said = "WorkerLostError: rank 0 (ape) gave up waiting: rank {} (host) failed at step 20, finished backward: {}"
    why = "WorkerLostError: rank 1 (host) failed at step 20, finished backward: ValueError: x. The wait ended with: EOF"
    deaths = [
        ended(0, 1, said.format(1, "ValueError: x. The wait ended with: TimeoutError: no answer")),
        ended(2, 1, said.format(0, why)),
    ]
    assert accused(deaths) == (1, "failed at step 20, finished backward: ValueError: x")
    cause = resolve(deaths, {1: "bee"}, [])
    assert cause is not None
    assert (cause.rank, cause.kind) == (1, DeathKind.HANG)


def test_whoever_accuses_in_many_lines_has_one_vote() -> None:
    refused = "rank 0 refused LOST of rank 2: worker 2 was given up by the others and cannot continue"
    deaths = [
        ended(2, 1, "poseidon.errors.WorkerLostError: worker 0 is lost after clock 381 (reported by rank 1)"),
        ended(1, 1, "poseidon.errors.WorkerLostError: worker 0 is lost after clock 381 (bad record mac)"),
        ended(0, 1, refused, refused, "poseidon.errors.WorkerLostError: worker 2 is lost after clock 382 (EOF)"),
    ]
    assert accused(deaths) == (0, "is lost after clock 381")
    cause = resolve(deaths, {}, [])
    assert cause is not None
    assert cause.rank == 0


def test_the_last_that_runs_hangs_if_the_one_that_all_miss_waited_for_it() -> None:
    said = "poseidon.errors.WorkerLostError: rank {} gave up waiting: rank {} (host) is dead or cut off"
    deaths = [ended(rank, 1, said.format(rank, lost)) for rank, lost in ((1, 3), (2, 3), (3, 0))]
    found = resolve(deaths, {0: "ape"}, [])
    assert found is not None
    assert (found.rank, found.kind) == (0, DeathKind.HANG)
    # While others run too, or if it has ended as well, nobody knows better than most.
    for running in ({0: "ape", 4: "bee"}, {}):
        found = resolve(deaths, running, [])
        assert found is not None
        assert found.rank == 3


def test_a_worker_that_left_early_is_pointed_at() -> None:
    cause = resolve([ended(0, 1, "Connection closed by peer")], {}, [1])
    assert cause is not None
    assert cause.rank == 0
    assert "worker 1 had already ended with status 0" in explain(cause, {})


def test_without_a_better_one_a_symptom_is_the_cause() -> None:
    death = ended(0, 75)
    assert resolve([death], {1: "bee"}, []) == death
    assert resolve([], {1: "bee"}, []) is None


def test_statuses_in_words() -> None:
    assert describe_status(3) == "it ended with status 3"
    assert describe_status(-11) == "it was killed by SIGSEGV"
    assert "memory" in describe_status(-9)
    assert describe_status(-77) == "it was killed by signal 77"


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: x"]


def test_the_last_traceback_is_found_behind_torchs_marks() -> None:
    lines = ["noise", *TRACE, "more noise", *(f"[rank1]: {line}" for line in TRACE)]
    assert last_traceback(lines) == TRACE


def test_what_an_aborted_python_shows_is_a_traceback() -> None:
    stack = [
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x01 (most recent call first):",
        '  File "a.py", line 2',
    ]
    assert last_traceback(["step 1", *stack, "Extension modules: numpy, torch._C (total: 2)"]) == stack


def test_a_syntax_error_begins_with_its_place() -> None:
    lines = ["noise", '  File "a.py", line 1', "    def x(:", "          ^", "SyntaxError: invalid syntax"]
    assert last_traceback(lines) == lines[1:]


def test_without_a_traceback_a_few_lines_must_do_and_long_ones_are_cut() -> None:
    assert last_traceback([str(n) for n in range(9)]) == ["4", "5", "6", "7", "8"]
    long = last_traceback([TRACE[0], *("  line" for _ in range(100)), TRACE[2]], limit=10)
    assert len(long) == 11
    assert (long[0], long[-1]) == (TRACE[0], TRACE[2])


def test_the_report_names_cause_last_words_and_the_others() -> None:
    text = explain(ended(2, 1, *TRACE), {1: "on bee: running", 0: "on ape: at step 3"})
    lines = text.splitlines()
    assert lines[0] == "worker 2 on host2 failed first: it ended with status 1"
    assert "    ValueError: x" in lines
    assert lines[-2:] == ["    worker 0 on ape: at step 3", "    worker 1 on bee: running"]
