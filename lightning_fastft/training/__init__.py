"""Train: the LightningModule, the DataModule, the optimizer, schedules and metrics.

Options of the user enter; what Lightning's Trainer runs leaves. Read ``fine_tuner``, then ``datamodule``.
"""
