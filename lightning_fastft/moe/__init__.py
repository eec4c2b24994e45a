"""Compute mixture-of-experts layers by one stable sort, one count and grouped GEMMs.

Token states, chosen experts and routing weights enter; the weighted sum of the experts' outputs leaves. ``install``
replaces the experts function of the layers of a model; their own routers choose the experts. ``routing`` has the
computation, ``interface`` the function that transformers calls, and ``expert_linears`` one linear of all experts with
its gradients. ``adapters`` has LoRA on experts, ``low_precision_copy`` the copies that its products read,
``fp8_experts`` frozen weights in fp8, ``llama4`` the layers of Llama 4, and ``expert_axis`` the exchange of tokens
between ranks that own experts. Read ``routing``, then ``install``.
"""
