"""Plan which activations to keep, offload or recompute, from measured costs and without torch.

``make_plan`` takes a ``StepCost`` and a ``Machine`` and returns a ``Plan``. ``step`` defines these types,
``prediction`` simulates a step, ``search`` finds the best plan, ``picture`` renders it. Read ``plan`` first.
"""
