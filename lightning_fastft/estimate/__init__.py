"""Estimate steps on GPUs of other machines; only ``fastft plan`` uses it.

``model_costs`` takes a configuration and a GPU and returns a ``StepCost`` for the planner. ``machines`` lists published
rates, ``metering`` counts the work of a model on the meta device. Read ``costs`` first.
"""
