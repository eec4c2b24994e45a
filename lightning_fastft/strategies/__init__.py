"""Strategies of Lightning that install packed training and own the activation policy.

A Trainer's model enters; it leaves patched for the length of the run. ``mixin`` is what all of them share,
``packed_steps`` installs and judges every step. Read ``mixin`` first.
"""
