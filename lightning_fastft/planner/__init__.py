"""Decide what happens to activations: arithmetic on measured steps, without torch.

A ``StepCost`` and a ``Machine`` enter, a ``Plan`` leaves. ``step`` holds the data, ``prediction`` runs a step on paper
for any plan, ``search`` looks for the best one, ``picture`` renders it. Read ``plan`` first.
"""
