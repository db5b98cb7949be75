"""One job of ``poseidon run``: a launcher here, one agent on each machine, and what they tell each other.

Follow a job: :mod:`launcher` starts an :mod:`agent` on each machine through a :mod:`link`, agents start workers and
relay their :mod:`output`; when one ends, :mod:`cause` finds who failed first.
"""
