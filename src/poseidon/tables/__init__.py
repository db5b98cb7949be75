"""Tables with bounded staleness: ``get``, ``inc`` and ``clock`` for programs of any kind (``poseidon.ps``).

What decides is pure: ``clocks`` bounds how far workers drift apart, ``tables`` holds rows under that bound, ``rows``
says who holds which. ``node`` is one rank of a job, as a worker, as a server, or both.
"""
