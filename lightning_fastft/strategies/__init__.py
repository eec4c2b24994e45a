"""Lightning strategies that install packed training and own the activation policy.

The Trainer's module enters; the module on its device or devices leaves, patched during the run. ``mixin`` has the code
that all strategies share, ``packed_steps`` installs packed training and checks every step. Read ``mixin`` first.
"""
