"""The autograd Functions of a fused decoder layer. Attention and, in mixture models, the experts run between them.

The backward recomputes norms and activations. A plan can hold the output of a large GEMM (``Session.value``). Read
``rows``, ``projections``, ``heads`` and ``feed_forward`` in this order, which is also the order of a layer.
"""
