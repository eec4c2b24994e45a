"""Train: the LightningModule, the DataModule, the optimizer, schedules and metrics.

The user's options enter; a LightningModule and a DataModule for the Trainer leave. Read ``fine_tuner``, then
``datamodule``.
"""
