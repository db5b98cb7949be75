"""``--auto``: an unmodified script for one device, run by all workers as one training job.

Read ``session.py`` first: it lists what is put in place before the script starts. ``docs/auto.md`` says what users see.
"""
