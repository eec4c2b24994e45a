"""Route tokens to experts by one stable sort and one count.

A model with mixture-of-experts layers enters and leaves with our experts function. ``routing`` has the computation,
``interface`` the function that transformers calls, ``adapters`` LoRA on experts. Read ``routing``, then ``install``.
"""
