"""Run decoder layers as a few autograd Functions.

A model enters and leaves with fused layers that share the parameters of its own. ``layer_forms`` says which layers are
served, ``decoder`` swaps them, ``functions`` holds the Functions, ``delta_mixers`` the gated delta rule between them,
``linears`` the products with their adapters, ``dense_weights``, ``low_precision_adapters`` and ``fp8_base`` what these
products read. Read ``functions``, then ``decoder``.
"""
