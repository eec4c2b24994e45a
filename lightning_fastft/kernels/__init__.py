"""Operations on tensors, one folder per operation; no operation depends on a model.

Tensors of packed rows enter, tensors leave. Each folder has ``reference`` (the formula in plain PyTorch), ``triton``
(the kernels) and ``op`` (checks, choice of the implementation, autograd). Read ``reference`` first, then ``backends``.

On CUDA an operation runs its kernel for the dtypes that the kernel supports; elsewhere it runs its reference. It raises
ShapeError for a shape, dtype, device or layout that the kernel would read wrongly. An operation without a source is our
own, and a gradient is the chain rule.
"""
