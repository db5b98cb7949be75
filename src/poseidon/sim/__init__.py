"""The simulator: how long a training step takes on a cluster that need not exist.

It uses the real planner and packing (``planning/``), the real routes' costs and chunks (``routes/``) and the real
clocks (``tables/``), and simulates only time and the network: ``agenda.py`` (the event queue), ``lanes.py`` (a network
card's two directions), ``workload.py`` (a plan as transfers), ``steps.py`` (steps in lockstep), ``relaxed.py`` (bounded
staleness). ``media.py`` holds the efficiency of real transports as named constants. Nothing here imports torch, and the
same input and seed always give the same result.
"""
