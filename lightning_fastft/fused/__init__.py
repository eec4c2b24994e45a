"""Run decoder layers as a few autograd Functions.

The decoder layers of a model enter; fused layers that share their parameters take their place. ``layer_forms`` lists
the supported layers, ``layer_parts`` what a layer computes itself, ``install`` swaps layers, and ``decoder`` is their
forward. ``functions`` holds the Functions, ``delta_mixers`` the gated delta rule between them, ``linears`` the products
with their adapters, and ``linear_gradients`` the gradients of these. ``dense_weights``, ``low_precision_adapters`` and
``fp8_weights`` hold the weights that the products read, ``active_adapters`` finds the adapter of a layer, and
``row_factors`` and ``column_scales`` compute DoRA. ``fp8_base`` makes the layers of a model compute in fp8,
``fp8_obstacles`` gives the reasons why some cannot, and ``layer_check`` compares the fused form of a family with its
own. Read ``decoder``, then ``functions``.
"""
