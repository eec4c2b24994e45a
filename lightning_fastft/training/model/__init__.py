"""Build, call and save the model of a tuner.

A tuner's options and the Trainer's strategy enter; a loaded, adapted and sharded model leaves, and later its files.
``causal_lm`` has the LightningModule that holds the model. ``texts`` adds the tokenizer and chat template of the data,
``saved`` checkpoints and exports; together they are the base of ``Tuner``. The other files are plain functions. Read
``causal_lm``, then ``construction`` and ``forward``.
"""
