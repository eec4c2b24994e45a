"""Operations on tensors, one folder per operation; no operation depends on a model.

Tensors of packed rows enter, tensors leave. Each folder has ``reference`` (the formula in plain PyTorch), ``triton``
(the kernels) and ``op`` (checks, choice of the implementation, autograd). Read ``reference`` first, then ``backends``.

Every operation raises ShapeError for a shape, dtype, device or layout that its kernel would read wrongly;
its kernel runs for the dtypes that it supports on CUDA, else the reference. An operation without a source is our own,
and a gradient is the chain rule.
"""
