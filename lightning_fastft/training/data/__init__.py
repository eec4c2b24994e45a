"""Parts of the data modules, as plain functions.

The input is their options and the Trainer; the output is checked options, subsets of the data, a position in the plan,
and rollouts as documents. ``training/datamodule.py`` and ``training/rollouts.py`` call these functions and hold the
state. Read ``subsets``, then ``position``.
"""
