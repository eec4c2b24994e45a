"""Norm and rotary embedding of query and key heads on a fused q, k, v projection, forward and backward."""
