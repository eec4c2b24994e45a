"""Callbacks for ``Trainer(callbacks=[...])`` that change or guard a run; one class per file.

A Trainer enters. ``fused_kernels``, ``bincount_router`` and ``packed_training`` patch its model; ``finite_guard``,
``gradient_health`` and ``watchdog`` end or repair a run that goes wrong. Read ``fused_kernels`` first.
"""
