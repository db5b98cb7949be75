"""What holds for every test."""

import signal

_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def pytest_configure():
    hear_ignored_signals()


def hear_ignored_signals():
    """Let processes that tests start react to signals as usual, however this run was started.

    A background job of a script ignores SIGINT and one under nohup SIGHUP, and so would everything it starts. A handler
    is not inherited that way: pytest goes on as before, and what it starts gets the default.
    """
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)


def _do_nothing(*_):
    pass
