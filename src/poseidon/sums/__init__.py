"""Sums of whole gradients, step 5 of the journey: the parameter server behind the route ``sharded``.

Every rank owns some chunks of every slot. A worker sends its part of a chunk to the owner (``PART``); the owner adds
the parts in rank order and sends the sum to everybody (``SUM``).

Pure: ``chunks`` and ``slots`` say who owns what, ``encodings``, ``compact`` and ``halves`` how values lie in a message,
``packed`` how chunks lie in memory, ``messages`` what a PART and a SUM must look like, ``touched`` how rows of a table
follow its part, ``turns`` whose part may come,
``ledger`` which sums are missing.
``server`` ties them to a transport. How values are added is up to an ``Adder`` (``arithmetic``): NumPy's in ``host``,
a CUDA device's in ``device``.
"""
