"""What holds for every test."""

import gc
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

# As scripts/test does: workers compute on one thread, and what a test computes beside them must have the same bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_STARTUP = str(Path(__file__).with_name("startup"))
sys.path.insert(0, _STARTUP)
import compiler_later  # noqa: E402, F401 - before anything imports torch
import large_imports  # noqa: E402, F401

_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


_LONGEST = (
    "test_keras_jax",
    "test_keras_tensorflow",
    "test_tf_scripts",
    "test_run",
    "test_auto",
    "test_torch_ddp",
    "test_behaviours",
    "test_served",
    "test_served_rounded",
    "test_tf1_exact",
    "test_jax",
    "test_mixed_precision",
    "test_doctor",
    "test_run_ssh",
    "test_ps",
    "test_lab",
    "test_routes",
    "test_distribute",
    "test_keras_torch",
    "test_wheel",
    "test_commands",
    "test_auto_private",
    "test_networks",
    "test_auto_command",
    "test_compact_kernels",
    "test_storm",
    "test_leaving",
    "test_ending",
    "test_tied",
    "test_drop_in",
)
"""Files that take longest, by time on the clock."""


def pytest_configure():
    hear_ignored_signals()
    # For processes that tests start.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))
    # Which plan is fastest depends on the host; tests of the choice itself turn it on.
    os.environ.setdefault("POSEIDON_TRIALS", "0")
    # Without it, workers would share a secret in the home of whoever runs the tests.
    os.environ.setdefault("POSEIDON_SECRET", "the secret of all tests")


def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that processes that test side by side end together."""
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(_LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what is imported and collected out of all looks for garbage, now and later; some tests ask for one each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        pass_on_logs()


def pass_on_logs():
    """Let torch's fifty loggers pass on to the root; or pytest would attach itself to each, six times in every test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


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
