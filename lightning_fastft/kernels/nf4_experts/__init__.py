"""Dequantisation of stacks of NF4 expert weights in one pass."""
