"""The planner: from layers, batch and cluster to the cheapest exact route for each layer, and to what it will cost.

Pure: no tensors, no sockets, no processes, no torch. ``cluster.py`` describes machines and links, ``costs.py`` holds
the formulas, ``planner.py`` compares them and explains the choice, ``packing.py`` fills buckets, ``profile.py`` holds a
model's compute times.
"""
