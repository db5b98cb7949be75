"""What it takes to follow a script that knows nothing of workers, in any framework.

Replaced functions (``patches``), options, names for what a script makes, random streams, and what the user is told.
``auto`` follows PyTorch scripts with it, ``tensorflow`` those of TensorFlow.
"""
