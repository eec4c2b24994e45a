"""Stacks of expert weights held in NF4, brought back to a floating dtype in one pass."""
