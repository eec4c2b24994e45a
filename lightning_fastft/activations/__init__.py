"""Keep, offload or recompute activations between forward and backward.

Decoder layers and an ``OffloadCheckpointing`` enter; layers that follow a plan leave. ``checkpointing`` is the switch
that users turn, ``stack`` measures steps (``probe``) and runs the plan, ``segments`` is one decoder layer under it,
``values`` are outputs inside a layer that a plan holds, ``engine``, ``slots`` and ``streams`` copy to pinned memory and
back, ``weights`` does that for frozen weights, ``budgets`` says what "auto" may take. Read ``checkpointing`` first.
"""
