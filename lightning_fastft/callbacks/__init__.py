"""Callbacks for ``Trainer(callbacks=[...])`` that change or guard a run; one class per file.

Hooks of a Trainer enter; a patched model, a skipped step or an error leaves, and statuses for the first log lines.
``fused_kernels``, ``bincount_router`` and ``packed_training`` patch the model of the Trainer (``model_swaps`` is their
base). ``finite_guard`` skips bad steps; ``gradient_health`` and ``watchdog`` stop a run that does not train or hangs.
Read ``fused_kernels`` first.
"""
