"""Attention over packed documents.

Queries, keys, values and the context of a batch enter; the output leaves. ``op`` chooses the backend of a call:
``tiled`` is our own (kernels in ``triton``), ``flash``, ``cudnn_backend``, ``flex`` and ``sdpa`` call those of torch
and cuDNN, ``reference`` is the formula. Read ``op`` first.
"""
