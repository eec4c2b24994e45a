"""The inputs of the gated delta rule from a joint projection: a causal convolution inside each document, silu and the
l2 norm of queries and keys, and decay and strength of each head; forward and backward.
"""
