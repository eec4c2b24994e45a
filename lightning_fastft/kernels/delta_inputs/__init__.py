"""The inputs of the gated delta rule from a fused projection, forward and backward.

They are a causal convolution inside each document, silu, the l2 norm of queries and keys, and decay and strength of
each head.
"""
