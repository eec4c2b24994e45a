"""Plan which activations to keep, offload or recompute, from measured costs and without torch.

A ``StepCost`` and a ``Machine`` enter, a ``Plan`` leaves. ``step`` holds the data, ``prediction`` simulates a step,
``search`` finds the best plan, ``picture`` renders it. Read ``plan`` first.
"""
