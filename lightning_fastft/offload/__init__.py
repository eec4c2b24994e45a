"""Activation checkpointing: what is kept between forward and backward, and where.

Read in this order:

1. ``checkpointing``: OffloadCheckpointing, the switch that users turn; ``budgets``: what "auto" may take.
2. ``stack``: the decoder layers of one model, from measured steps (``probe``) to a plan and the engine that follows it.
3. ``segments``: one decoder layer under a plan, its forward and its second run.
4. ``engine``: tensors to the host and back, over ``lanes`` (copy streams) and ``slots`` (pinned slab, staging slots);
   ``weights``: frozen weights the same way.
5. The planner, plain Python on plain data: ``step`` (what a step costs), ``prediction`` (a step on paper), ``search`` (the best plan), ``plan``
   (its entrance), ``picture`` (a plan as text), ``machines`` (published rates of GPUs that are not here).
"""
