"""Lightning strategies that install packed training and own the activation policy.

The model of the Trainer is patched during the run. ``mixin`` has the code that all strategies share, ``packed_steps``
installs packed training and checks every step. Read ``mixin`` first.
"""
