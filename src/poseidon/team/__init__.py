"""The workers of one job: who they are and where (``team.py``, ``topology.py``), whether they live (``watch.py``), whether they
hold the same model (``agree.py``) and how fast they and their links are (``calibrate.py``)."""
