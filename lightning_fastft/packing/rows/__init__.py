"""Validate the rows of a data set and name their format. Read ``formats``, then ``parsing`` and ``rejects``."""
