"""``poseidon doctor``: would a job run on these hosts, how fast, and what is to be mended first.

A probe (``probe.py``) runs on every host and answers questions with facts (``facts.py``): of its machine
(``machine.py``) and of its links (``listening.py``, ``reaching.py``). The conductor
(``conduct.py``) asks all hosts through conversations (``asking.py``), about their links pair by pair in rounds
(``rounds.py``). What the facts mean is decided by pure functions in ``*_checks.py``, which return findings;
``writing.py`` writes them down and ``command.py`` is the command.
"""
