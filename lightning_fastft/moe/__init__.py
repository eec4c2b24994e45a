"""Route tokens to experts by one stable sort and one count.

``install`` gives the mixture-of-experts layers of a model our experts function. ``routing`` has the computation,
``interface`` the function that transformers calls, ``adapters`` LoRA on experts. Read ``routing``, then ``install``.
"""
