"""Run the recurrent mixers of hybrid models (short convolutions, delta rules, state spaces) on packed documents.

A model enters; its mixers leave patched, and read the documents of a pack from the batch context. ``install`` patches a
model of a family in ``hf.mixers``, so that no state and no convolution window of its mixers crosses the start of a
document. The run's patcher records every change. A mixer keeps transformers' forward; ``kernels`` chooses the functions
that it calls, from ``fla_functions`` or plain PyTorch. ``mamba2`` replaces its scan, and ``gated_delta`` is the delta
rule of fused layers, from one fused projection (``delta_rule`` on a GPU). Read ``install`` first.
"""
