"""Callbacks for ``Trainer(callbacks=[...])`` that change or guard a run; one class per file.

``fused_kernels``, ``bincount_router`` and ``packed_training`` patch the model of the Trainer. ``finite_guard`` skips
bad steps; ``gradient_health`` and ``watchdog`` stop a run that does not train or hangs. Read ``fused_kernels`` first.
"""
