"""Conversations with a probe that is only a pair of pipes."""

import json
import os
import subprocess
import threading
import time

import pytest

from poseidon.doctor.asking import Conversation, LostProbeError, NoProbeError
from poseidon.launch.hosts import Host

HOST = Host("node1")


class Remote:
    """Stands for the process of a probe; a test writes what it says."""

    def __init__(self, stderr=b""):
        questions, self.stdin = self._pipe()
        self.stdout, self._says = self._pipe()
        self.stderr, complaints = self._pipe()
        self._questions = questions
        complaints.write(stderr)
        complaints.close()
        self.status = None

    def _pipe(self):
        reading, writing = os.pipe()
        return os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0)

    def say(self, *lines):
        for line in lines:
            self._says.write((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n")

    def hear(self):
        return json.loads(self._questions.readline())

    def end(self, status):
        self.status = status
        self._says.close()

    def poll(self):
        return self.status

    def wait(self, timeout=None):
        if self.status is None:
            raise subprocess.TimeoutExpired("probe", timeout)
        return self.status

    def kill(self):
        self.end(-9)

    def close(self):
        self._questions.close()
        self._says.close()


@pytest.fixture
def remote():
    one = Remote(stderr=b"a warning\nConnection refused\n")
    yield one
    one.close()


@pytest.fixture
def conversation(remote):
    with Conversation(HOST, remote, is_local=False) as one:
        yield one
        if remote.status is None:
            remote.end(0)


def test_what_a_login_shell_prints_is_passed_over(remote, conversation):
    remote.say("Welcome to node1!", "42", {"poseidon": "0.1.0"})
    assert conversation.greet(10) == "0.1.0"


def test_a_question_gets_its_answer(remote, conversation):
    remote.say({"answer": [1, 2]})
    assert conversation.ask("facts", 10, slots=3) == [1, 2]
    assert remote.hear() == {"ask": "facts", "slots": 3}


def test_a_probe_that_never_starts_tells_status_and_complaint(remote, conversation):
    remote.end(255)
    with pytest.raises(NoProbeError) as caught:
        conversation.greet(10)
    assert caught.value.status == 255
    assert caught.value.stderr == "a warning\nConnection refused"
    assert caught.value.host is HOST


def test_a_probe_that_does_not_greet_in_time_is_ended(remote, conversation):
    with pytest.raises(NoProbeError) as caught:
        conversation.greet(0.01)
    assert remote.status == -9
    assert "no answer within 0.01 s" in caught.value.stderr


def test_a_probe_that_ends_is_lost_for_good(remote, conversation):
    remote.end(137)
    with pytest.raises(LostProbeError, match="node1 did not answer 'clock' but ended with status 137"):
        conversation.ask("clock", 10)
    with pytest.raises(LostProbeError, match="was lost before"):
        conversation.ask("clock", 10)


def test_a_late_answer_is_not_taken_for_another(remote, conversation):
    with pytest.raises(LostProbeError, match=r"within 0\.01 s"):
        conversation.ask("facts", 0.01)
    remote.say({"answer": "facts, late"})
    with pytest.raises(LostProbeError):
        conversation.ask("clock", 10)


def test_a_question_that_fails_is_told_and_the_next_may_be_asked(remote, conversation):
    remote.say({"error": "OSError: no"}, {"answer": 1})
    with pytest.raises(LostProbeError, match="could not answer 'listen': OSError: no"):
        conversation.ask("listen", 10)
    assert conversation.ask("clock", 10) == 1


def test_clocks_are_compared(remote, conversation):
    def answer():
        for _ in range(7):
            remote.hear()
            remote.say({"answer": time.time() + 100})

    answering = threading.Thread(target=answer)
    answering.start()
    clock = conversation.read_clock(10)
    answering.join()
    assert abs(clock.ahead_s - 100) <= clock.uncertainty_s + 0.01
