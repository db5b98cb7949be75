"""Tools to run a script that knows nothing of workers, in any framework.

Patches, options, names of a script's objects, random streams, and the report to the user. ``auto`` uses them for
PyTorch scripts, ``tensorflow`` for TensorFlow scripts.
"""
