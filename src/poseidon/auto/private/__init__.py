"""A worker's private view of the file system: it sees the real files, and what it writes nobody else sees.

``frozen.py`` keeps the working directory as it was at the start, ``outline.py`` decides what is mounted where (pure),
``mounts.py`` makes the system calls, ``view.py`` puts them together before the script's process starts.
"""
