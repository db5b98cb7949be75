"""``python -m poseidon COMMAND``: the ``poseidon`` command, where its script is not on the path."""

from poseidon.cli.main import command

command()
