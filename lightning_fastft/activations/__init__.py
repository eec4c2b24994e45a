"""Keep, offload or recompute activations between forward and backward.

Decoder layers and an ``OffloadCheckpointing`` enter; layers that follow a plan leave. ``checkpointing`` is the public
switch. ``stack`` measures steps (``probe``) and follows the plan, ``segments`` runs one decoder layer under it,
``values`` finds the segment of a module inside a layer. ``engine``, ``slots`` and ``streams`` copy activations to
pinned memory and back, ``weights`` copies frozen weights, ``budgets`` limits "auto". Read ``checkpointing`` first.
"""
