"""Checkpoints: everything a job needs to go on, written whole by one worker, and handed to all by one that has it."""
