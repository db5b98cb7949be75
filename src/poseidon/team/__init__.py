"""The workers of one job.

Who they are and where (``team.py``, ``topology.py``), whether they live (``watch.py``), whether they hold the same
model (``agree.py``, ``mirror.py``, ``verify.py``), and how fast they and their links are (``calibrate.py``).
"""
