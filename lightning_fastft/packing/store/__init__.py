"""Tokenise a data set once, and keep its tokens in memory or on disk.

Sources and options enter; a ``TokenizedDataset`` leaves, and a report of what was read. ``cache`` looks for an entry on
disk, ``ingest`` writes a new one, ``dataset`` reads it. Read ``cache`` first.
"""
