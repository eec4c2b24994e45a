"""The autograd Functions of a fused decoder layer. Attention and, in mixture models, the experts run between them.

The backward recomputes norms and activations. A plan can hold the output of a large GEMM (``Session.value``). In
the order of a layer: ``projections`` and ``heads`` before attention, ``projections`` after it, then ``feed_forward``.
Norms, which all of them begin with, are in ``rows``: read it first.
"""
