"""The page of a run: a small server over the run's folder, for a browser; needs nothing but the standard library."""
