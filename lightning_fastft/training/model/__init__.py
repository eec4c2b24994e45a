"""Build, call and save the model of a tuner.

A tuner's options and the Trainer's strategy enter; a loaded, adapted and sharded model leaves, and later its files.
``causal_lm`` has the LightningModule that holds the model, the base of ``Tuner``; the other files are plain functions.
Read ``causal_lm``, then ``construction`` and ``forward``.
"""
