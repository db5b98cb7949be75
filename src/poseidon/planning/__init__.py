"""The planner: pure functions from layers, batch and cluster to the cheapest exact route for each layer.

``cluster.py`` says what is known of machines and links, ``costs.py`` holds the formulae, ``planner.py`` compares
them and explains the choice. Nothing here knows tensors, sockets or processes.
"""
