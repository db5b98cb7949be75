"""The engine: from "this gradient is ready" to "every worker holds the mean", hidden behind backward.

Read in this order: ``hooks.py`` and ``layers.py`` (1), ``backward.py`` (2), then a route under ``poseidon/routes`` (3).
``engine.py`` runs one step after another; ``poseidon/team`` connects the workers.
"""
