"""``--auto``: an unmodified script for one device, run by all workers as one training job.

Read ``session.py`` first: it installs everything before the script starts. ``docs/auto.md`` is the user's guide.
"""
