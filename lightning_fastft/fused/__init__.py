"""Run decoder layers as a few autograd Functions.

The decoder layers of a model are swapped for fused layers that share their parameters. ``layer_forms`` lists the
supported layers, ``layer_parts`` what a layer computes itself, ``install`` swaps layers, and ``decoder`` is their
forward. ``functions`` holds the Functions, ``delta_mixers`` the gated delta rule between them, and ``linears`` the
products with their adapters. ``dense_weights``, ``low_precision_adapters`` and ``fp8_base`` hold the weights that
these products read. Read ``decoder``, then ``functions``.
"""
