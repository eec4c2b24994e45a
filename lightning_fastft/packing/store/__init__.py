"""Tokenise a data set once, and keep its tokens in memory or on disk. Read ``cache``, then ``dataset``."""
