"""Tables with bounded staleness: ``get``, ``inc`` and ``clock`` for any program (``poseidon.ps``).

The decisions are pure: ``clocks`` bounds how far workers drift apart, ``tables`` serves rows within that bound,
``cache`` is a worker's copy, ``rows`` stores them. ``node`` is one rank of a job, as a worker, a server, or both.
"""
