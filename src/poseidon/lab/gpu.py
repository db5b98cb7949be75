"""Sharing one GPU between the workers of a lab, through NVIDIA's multi-process service (MPS).

Without MPS the workers take turns on the GPU in time slices; with it their kernels run side by side, and each of N
workers gets about 1/N of the GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from poseidon.job.members import LAB_MARK, kill_all, pids_marked

FOLDER_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
CONTROL = "nvidia-cuda-mps-control"
LIMIT_S = 20.0


@contextlib.contextmanager
def sharing(lab: str, wanted: bool = True) -> Iterator[str | None]:
    """Run MPS for the length of a ``with``; yield the folder that its clients need, or None without it.

    If MPS cannot start, a line on stderr says so and the job runs without it. Start a new one after a worker was
    killed: the old one may refuse new workers. The service carries the lab's mark, so removing the lab always ends it.
    """
    if not wanted:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="poseidon-mps-")
    env = {
        **os.environ,
        FOLDER_VARIABLE: folder,
        "CUDA_MPS_LOG_DIRECTORY": folder,
        LAB_MARK: lab,
    }
    try:
        problem = _start(env)
        if problem:
            print(
                f"lab: MPS is not running ({problem}); the workers will take turns on the GPU",
                file=sys.stderr,
            )
            yield None
            return
        try:
            yield folder
        finally:
            _control(env, "quit")
    finally:
        # It does not quit while a killed client's context is stuck, and a failed start may leave parts running.
        kill_all(lambda: pids_marked(FOLDER_VARIABLE, folder))
        shutil.rmtree(folder, ignore_errors=True)


def _start(env: dict[str, str]) -> str:
    """Start the service; return the problem, or an empty string."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    try:
        subprocess.run(
            [CONTROL, "-d"],
            env=env,
            timeout=LIMIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    except subprocess.TimeoutExpired:
        return f"{CONTROL} -d did not return within {LIMIT_S:g} s"
    except subprocess.CalledProcessError as error:
        complaint = error.stderr.decode(errors="replace").strip()
        return f"{CONTROL} -d ended with status {error.returncode}: {complaint}"
    return _control(env, "get_default_active_thread_percentage")


def _control(env: dict[str, str], command: str) -> str:
    """Send the service one command; return the problem, or an empty string."""
    try:
        answer = subprocess.run(
            [CONTROL],
            env=env,
            input=command.encode() + b"\n",
            timeout=LIMIT_S,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer {command!r} within {LIMIT_S:g} s"
    return "" if answer.returncode == 0 else answer.stderr.decode(errors="replace").strip() or "it does not answer"
