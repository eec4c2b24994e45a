"""Lightning strategies that install packed training and own the activation policy.

The Trainer's module enters; the module on its device or devices leaves, patched during the run. ``mixin`` has the code
that all strategies share, ``packed_steps`` installs packed training and checks every step, ``patching`` owns the
patcher of a run. ``single_device``, ``ddp`` and ``fsdp2`` are the strategies; ``context_parallel`` and
``expert_parallel`` are further axes of the ``mesh``. Before the first step, ``launchers``, ``rendezvous``,
``even_batches`` and ``monitors`` refuse runs that would hang or fail later. ``step_down`` and ``memory_errors`` handle
a device that is full. Read ``mixin`` first.
"""
