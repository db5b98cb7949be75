"""The ``poseidon`` command: ``main.py`` holds the table of commands; those that belong to no other room are here."""
