"""Estimate steps of GPUs that are not here; only ``fastft plan`` needs it.

A configuration and the name of a GPU enter; a ``StepCost`` for the planner leaves. ``machines`` lists published rates,
``metering`` counts the work of a model on the meta device. Read ``costs`` first.
"""
