"""LevelDB databases, read and written without LevelDB.

A database is a folder. CURRENT names the MANIFEST, a log of edits that say which table files make up which level;
records that are in no table yet are in the write-ahead ``.log`` files. ``reader.py`` merges all of them in key order;
``writer.py`` writes a database that LevelDB can open. Reading takes no lock and changes nothing.
"""

from poseidon.caffe.io.leveldb.reader import LevelDB
from poseidon.caffe.io.leveldb.writer import LevelDBWriter

__all__ = ["LevelDB", "LevelDBWriter"]
