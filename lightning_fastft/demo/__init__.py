"""The generated data set of the demo.

A seed enters; rows (``generator``) and the files of a tiny model (``files``) leave. Read ``generator`` first.
"""
