"""The planner: from layers, batch and cluster to the cheapest exact route for each layer, and to what it will cost.

Pure: no tensors, no sockets, no processes, no torch. ``cluster.py`` says what is known of machines and links,
``costs.py`` holds the formulae, ``planner.py`` compares them and explains the choice, ``packing.py`` fills buckets,
``profile.py`` holds how long a model computes.
"""
