"""Frozen linear layers in fp8: rows and weights quantised in one pass each, and the product of both."""
