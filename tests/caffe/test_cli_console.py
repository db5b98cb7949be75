from __future__ import annotations

import io
import logging

from poseidon.caffe.glog import GlogFormatter, console, progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_glog_form():
    record = logging.LogRecord("x", logging.WARNING, "/a/solver.py", 12, "lr = %g", (0.5,), None)
    record.created, record.process = 0.25, 77
    day, time, process, source, text = GlogFormatter().format(record).split(maxsplit=4)
    assert day[0] == "W"
    assert day[1:].isdigit()
    assert time.endswith(".250000")
    assert (process, source, text) == ("77", "solver.cpp:12]", "lr = 0.5")


def test_progress_line():
    line = progress_line(50, 200, 10.0, 0.12345)
    assert line == "50/200 [######..................]  25%  10.0 iter/s  0:00:15 left  loss 0.1235"


def test_the_bar_makes_room_for_log_lines():
    terminal = Terminal()
    with console(stream=terminal) as bar:
        bar.update(1, 10, 0.5)
        logging.getLogger("poseidon.caffe").info("hello")
    drawn, cleared, rest = terminal.getvalue().partition("\r\x1b[K")
    assert drawn.startswith("\r1/10 [")
    assert cleared
    assert "] hello\n\r1/10 [" in rest
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_is_drawn_outside_a_terminal():
    stream = io.StringIO()
    with console(stream=stream) as bar:
        bar.update(1, 10, 0.5)
    assert stream.getvalue() == ""


def test_only_the_first_worker_shows_information():
    stream = io.StringIO()
    logger = logging.getLogger("poseidon.caffe")
    with console(is_root=False, stream=stream):
        logger.info("not this")
        logger.warning("but this")
    assert "not this" not in stream.getvalue()
    assert "but this" in stream.getvalue()
    assert not logger.handlers
    assert logger.propagate
