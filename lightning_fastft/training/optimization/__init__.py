"""Choose an optimizer and its schedule; the parts of ``FusedAdamW``.

A tuner's parameters and options enter; an optimizer and a learning-rate schedule leave. Read ``choice``; the class
``FusedAdamW`` is in ``training/optimizer.py``; its base in ``adamw_held`` has the state, and ``host_moments`` offloads
moments.
"""
