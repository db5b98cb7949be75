"""The simulator: how long a training step takes on a cluster that need not exist.

It drives the real planner (``planning``), the real packing of buckets, the real chunks and clocks (``server``); its own
are only time and the network: ``agenda.py`` (what happens when), ``lanes.py`` (a card's two directions),
``exchanges.py`` (a plan as things to move), ``steps.py`` (steps in lockstep), ``relaxed.py`` (bounded staleness).
``transport.py`` holds the efficiency of real transports as named constants. Nothing here imports torch, and every
answer is the same for the same input and seed.
"""
