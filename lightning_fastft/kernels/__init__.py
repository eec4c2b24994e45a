"""Operations on tensors, one folder per operation; no operation depends on a model.

Each folder has ``reference`` (the formula in plain PyTorch), ``triton`` (the kernels) and ``op`` (checks, choice of
implementation, autograd). Read ``reference`` first.
"""
