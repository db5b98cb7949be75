"""Routes: the ways a unit's gradient becomes the mean over all workers. ``base.py`` holds the contract."""
