"""Gated heads, with an optional norm, whose gates are columns of a fused projection; one pass forward, one backward."""
