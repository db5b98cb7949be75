"""``python -m poseidon.caffe.as_caffe script.py its arguments``: run a script written for Caffe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from poseidon.caffe.as_caffe import run_script

_USAGE = "usage: python -m poseidon.caffe.as_caffe script.py [arguments of the script]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script named first with the arguments that follow."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr)
        return 0 if arguments else 2
    run_script(arguments[0], arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
