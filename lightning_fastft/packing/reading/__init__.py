"""Read rows of files, data sets and lists; ``rows`` validates them.

Paths, hub ids and objects enter; rows with their numbers leave. ``folders`` finds files, ``text_files`` and ``arrow``
read them, ``streams`` and ``file_streams`` read what is larger than the disk. Read ``sources`` first.
"""
