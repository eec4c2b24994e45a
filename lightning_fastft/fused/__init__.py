"""Run decoder layers as a few autograd Functions.

A model enters and leaves with fused layers that share the parameters of its own. ``decoder`` says which layers are
served and swaps them, ``functions`` holds the Functions, ``linears`` the products with their adapters,
``dense_weights``, ``low_precision_adapters`` and ``fp8_base`` what these products read. Read ``functions``, then
``decoder``.
"""
