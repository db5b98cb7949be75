"""The workers of one job.

Who they are and where they run (``membership.py``, ``team.py``, ``topology.py``), whether they are alive
(``watch.py``), whether they hold the same model (``agree.py``, ``mirror.py``, ``verify.py``), how fast they and their
links are (``calibrate.py``), and the wire between them (``wiring.py``).
"""
