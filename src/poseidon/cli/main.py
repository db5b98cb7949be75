"""The ``poseidon`` command line: finds the subcommand, runs it, turns errors into one line and a status.

A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; it is imported only when it is
called, so that ``poseidon plan`` does not wait for the imports of ``poseidon lab``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from poseidon.cli.parser import CommandParser
from poseidon.errors import PoseidonError, missing_package, unknown_name
from poseidon.job import closing

COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("poseidon.cli.bench", "compare Poseidon with its peers on an emulated cluster"),
    "completion": ("poseidon.cli.completion", "print what a shell needs to complete commands and options"),
    "compute-image-mean": ("poseidon.caffe.commands.compute_image_mean", "compute the mean image of a Caffe database"),
    "convert-cifar-data": ("poseidon.caffe.commands.convert_cifar_data", "write CIFAR-10 to Caffe databases"),
    "convert-imageset": ("poseidon.caffe.commands.convert_imageset", "write the images of a list to a Caffe database"),
    "convert-mnist-data": ("poseidon.caffe.commands.convert_mnist_data", "write MNIST to a Caffe database"),
    "device-query": ("poseidon.caffe.commands.device_query", "show the GPUs of this machine"),
    "doctor": ("poseidon.doctor.command", "check hosts and links before a long job"),
    "extract-features": ("poseidon.caffe.commands.extract_features", "write a Caffe net's blobs to databases"),
    "lab": ("poseidon.cli.lab", "turn this machine into a cluster of emulated machines"),
    "page": ("poseidon.cli.page", "show a run, running or finished, in a browser"),
    "partition-data": (
        "poseidon.caffe.commands.partition_data",
        "split a Caffe database or list, one part per worker",
    ),
    "plan": ("poseidon.cli.plan", "show which route each layer would take, and what speed to expect"),
    "quickstart": (
        "poseidon.cli.quickstart",
        "train LeNet on digits with 4 workers; then DDP beside Poseidon on emulated machines",
    ),
    "run": ("poseidon.launch.run", "run a script on this machine's workers, or on many machines over ssh"),
    "simulate": ("poseidon.cli.simulate", "predict speedups over machines, links, batches and systems"),
    "status": ("poseidon.cli.status", "say how a run is doing, or how it ended"),
    "test": ("poseidon.caffe.commands.test", "score a Caffe net"),
    "time": ("poseidon.caffe.commands.time", "time the layers of a Caffe net"),
    "trace": ("poseidon.cli.trace", "find the trace of a run's steps, for ui.perfetto.dev"),
    "train": ("poseidon.caffe.commands.train", "train a Caffe solver's net, on one worker or many"),
    "upgrade-net": ("poseidon.caffe.commands.upgrade_net", "rewrite an old Caffe net or solver in the current form"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _overview_parser()
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        parser.parse_args(arguments[:1])
    name = arguments[0]
    if name not in COMMANDS:
        print(f"poseidon: {unknown_name('command', name, list(COMMANDS))}", file=sys.stderr)
        return 2
    module_name, summary = COMMANDS[name]
    try:
        command = importlib.import_module(module_name)
        subparser = CommandParser(prog=f"poseidon {name}", description=summary)
        command.add_arguments(subparser)
        status = int(command.run(subparser.parse_args(arguments[1:])))
        sys.stdout.flush()
        return status
    except PoseidonError as error:
        if os.environ.get("POSEIDON_TRACEBACK"):
            traceback.print_exc()
        print(f"poseidon {name}: {error}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        known = missing_package(error)
        if known is None:
            raise
        print(f"poseidon {name}: {known}", file=sys.stderr)
        return known.exit_status
    except BrokenPipeError:
        # The reader has seen enough (`| head`).
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        # An error about a file that cannot be opened names it; what is written to has no name.
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output()
        print(f"poseidon {name}: cannot write its output, or a file: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"poseidon {name}: interrupted", file=sys.stderr)
        return 130


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _drop_output() -> None:
    """Let what is still buffered go nowhere at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command() -> NoReturn:
    """Be the process of the ``poseidon`` command."""
    _open_closed_streams()
    status = main()
    closing.end_after_hooks(status)
    sys.exit(status)


def _open_closed_streams() -> None:
    """Give a process that was started without input or output (``>&-``) the null device in its place.

    The next file or socket would get that number, and what is printed would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Processes that are started inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))


def _overview_parser() -> argparse.ArgumentParser:
    from poseidon.version import __version__

    lines = [f"  {name:<20} {summary}" for name, (_, summary) in sorted(COMMANDS.items())]
    parser = argparse.ArgumentParser(
        prog="poseidon",
        usage="poseidon COMMAND [options]",
        description="Train on a few ordinary machines, close to linear speed, with the same result.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`poseidon COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"poseidon {__version__}")
    return parser
