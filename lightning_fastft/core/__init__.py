"""Errors, checks, statuses and the patcher: used by every other folder, without torch.nn and without Lightning.

Nothing enters and nothing leaves: these are definitions. ``errors`` and ``checks`` serve public entries, ``status``
says what is active in a run, ``patcher`` records every change to a model and undoes it, ``optimizer_twin`` steps an
optimizer before there is memory. Read ``patcher`` first.
"""
