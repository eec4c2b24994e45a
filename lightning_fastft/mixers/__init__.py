"""Run the recurrent mixers of hybrid models (short convolutions, delta rules, state spaces) on packed documents.

A model of a family in ``hf.mixers`` enters; the same model leaves, and no state and no convolution window of its mixers
crosses the start of a document. Every change is recorded in the run's patcher. Read ``install``;
``gated_delta`` is the delta rule of fused layers, from one joint projection.
"""
