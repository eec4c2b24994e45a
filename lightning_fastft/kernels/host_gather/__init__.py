"""Rows of a table in pinned host memory, read by the device over the bus."""
