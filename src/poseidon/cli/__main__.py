"""``python -m poseidon.cli COMMAND``: the ``poseidon`` command without its script."""

from poseidon.cli.main import command

command()
