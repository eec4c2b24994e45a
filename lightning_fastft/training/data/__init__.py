"""Parts of ``PackedDataModule``, as plain functions.

Its options and the Trainer enter; checked options, subsets of the data and a position in the plan leave.
``training/datamodule.py`` calls these functions and holds the state. Read ``subsets``, then ``position``.
"""
