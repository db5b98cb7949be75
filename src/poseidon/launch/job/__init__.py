"""One job of ``poseidon run``: a launcher here, one agent on each machine, and what they tell each other.

Follow a job: :mod:`launcher` has a :mod:`fleet` start an :mod:`agent` on each machine through a :mod:`link`; agents
start workers and relay what they write, which :mod:`output` shows; :mod:`watching` knows how all are, and when one
fails, :mod:`cause` finds who was first.
"""
