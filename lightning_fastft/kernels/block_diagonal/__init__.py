"""Blocks on a diagonal, zeros elsewhere."""
