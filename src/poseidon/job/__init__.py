"""The process in its job: who it is (``world``), how it tells the launcher (``tell``), what belongs to it."""
