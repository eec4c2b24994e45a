"""Mixture of experts from plain PyTorch: routed tokens through grouped products, without a loop over experts and without a host wait.

``experts.run_experts`` is the whole layer behind the router, forward and backward. Its steps are kernels, in this order: ``kernels.expert_sort`` (the
routing: one stable sort, one count), ``expert_rows`` (gather, weighted sum), ``grouped_mm`` (both products, biases and adapters) and ``expert_gate``.
What knows transformers and PEFT is ``models.moe`` (which layers), ``models.experts`` (their weights), ``models.expert_adapters`` and
``models.expert_nf4``; users add ``callbacks.bincount_router``.
"""
