"""The engine: from "this gradient is ready" to "every worker holds the mean", hidden behind backward.

Read in this order: ``hooks.py`` (1), ``scheduler.py`` (2), then a route under ``poseidon/routes`` (3).
``engine.py`` holds the steps together; ``poseidon/team`` knows the other workers.
"""
