"""Parts of the data modules.

The input is their options and the Trainer; the output is checked options, subsets of the data, a position in the plan,
and rollouts as documents. All are plain functions, except ``splits``, the base of ``training/datamodule.py``, and
``streams``, which yields the batches of streamed data. ``training/datamodule.py`` and ``training/rollouts.py`` hold the
state of a run. Read ``splits``, then ``position``; for rollouts ``rounds``, then ``sampled``; ``describe`` prints data.
"""
