"""Dequantisation of NF4 weights of linear layers in one launch."""
