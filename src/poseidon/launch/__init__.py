"""The ``poseidon`` command: one file per subcommand, found by :mod:`poseidon.launch.cli`."""
