"""Compute on tensors: one folder per operation, which knows no model.

Tensors enter and leave. Each folder has ``reference`` (the formula in plain PyTorch), ``triton`` (the kernels) and
``op`` (checks, choice of implementation, autograd). Read a ``reference`` first.
"""
