"""Gather of token rows in expert order, and the weighted sum back per token."""
