"""Gradients of queries, keys and decays in chunked linear attention."""
