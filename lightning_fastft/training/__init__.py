"""Train: the LightningModules, the DataModules, losses, metrics and the optimizer.

The user's options enter; a LightningModule and a DataModule for the Trainer leave. Each tuner is a file; ``tuner`` is
their base. Plain functions are in ``model`` (build, call and save), ``optimization`` (optimizer, schedules) and
``data`` (parts of ``datamodule``). Read ``fine_tuner``, then ``tuner`` and ``datamodule``.
"""
