"""``python -m poseidon.cli COMMAND``: the ``poseidon`` command without its script."""

import sys

from poseidon.cli.main import main

sys.exit(main())
