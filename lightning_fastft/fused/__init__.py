"""Run decoder layers as a few autograd Functions.

The decoder layers of a model enter; fused layers that share their parameters take their place. ``layer_forms`` lists
the supported layers, ``layer_parts`` what a layer computes itself, ``install`` swaps layers, and ``decoder`` is their
forward. ``functions`` holds the Functions, ``delta_mixers`` the gated delta rule between them, and ``linears`` the
products with their adapters. ``dense_weights``, ``low_precision_adapters`` and ``fp8_weights`` hold the weights that
these products read, ``active_adapters`` reads the adapter of a layer, ``row_factors`` and ``column_scales`` are DoRA,
``fp8_obstacles`` says which do not compute in fp8, ``fp8_base`` makes the layers of a model do so,
and ``layer_check`` compares the fused form of a family with its own. Read ``decoder``, then ``functions``.
"""
