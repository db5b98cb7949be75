"""``python -m poseidon.caffe.as_caffe script.py its arguments``: run a script written for Caffe.

``--install`` makes ``import caffe`` import ours in plain Python and in notebooks too, ``--uninstall`` ends that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from poseidon.caffe.as_caffe import place, remove, run_script

_USAGE = """usage: python -m poseidon.caffe.as_caffe script.py [arguments of the script]
       python -m poseidon.caffe.as_caffe --install [FOLDER on Python's path; default: this environment's]
       python -m poseidon.caffe.as_caffe --uninstall [FOLDER]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script named first with the arguments that follow."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in ("--install", "--uninstall"):
        act = place if arguments[0] == "--install" else remove
        print(act(*arguments[1:2]))
        return 0
    run_script(arguments[0], arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
