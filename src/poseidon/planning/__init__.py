"""The planner: from layers, batch and cluster to the cheapest exact route for each layer, and to what it will cost.

Pure: ``cluster.py`` says what is known of machines and links, ``costs.py`` holds the formulae, ``planner.py`` compares
them and explains the choice, ``packing.py`` fills buckets, ``profile.py`` holds how long a model computes. These know
neither tensors nor sockets nor processes. ``sampling.py``, ``profiling.py``, ``prototxt.py`` and ``source.py`` look at
real models and import torch when they are called.
"""
