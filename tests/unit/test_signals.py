"""The suite passes wherever it is started: also as a background job, whose children ignore SIGINT."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
START_A_CHILD = f"""
import signal, subprocess, sys
assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
sys.path.insert(0, {str(TESTS)!r})
import conftest
conftest.hear_ignored_signals()
signal.raise_signal(signal.SIGHUP)  # still does nothing to this process
show = "import signal; print(signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGHUP).name)"
subprocess.run([sys.executable, "-c", show], check=True)
"""


def test_what_tests_start_hears_signals_that_the_run_itself_ignores():
    command = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", sys.executable, "-c", START_A_CHILD]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "default_int_handler SIG_DFL\n"
