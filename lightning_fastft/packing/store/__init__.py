"""Tokenise a data set once, and keep its tokens in memory or on disk.

``cache`` looks for an entry on disk, ``ingest`` writes a new one, ``dataset`` reads it. Read ``cache`` first.
"""
