"""``poseidon doctor``: checks whether a job would run on these hosts, how fast, and what to fix first.

A probe (``probe.py``) runs on every host and answers questions with facts (``facts.py``) about its machine
(``machine.py``) and its links (``listening.py``, ``reaching.py``). The conductor (``conduct.py``) asks all hosts
through conversations (``asking.py``), about their links pair by pair in rounds (``rounds.py``). Pure functions in
``*_checks.py`` turn facts into findings; ``writing.py`` formats them and ``command.py`` is the command.
"""
