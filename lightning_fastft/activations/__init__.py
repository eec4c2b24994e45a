"""Keep, offload or recompute activations between forward and backward.

Decoder layers and an ``OffloadCheckpointing`` enter; layers that follow a plan leave. ``checkpointing`` is the public
switch. ``stack`` decides the plan, from what ``measurement`` finds in the first steps (with ``probe``); ``execution``
applies it, and ``segments`` runs one decoder layer under it. ``values`` finds the segment of a module inside a layer,
``frozen_weights`` knows which weights can move to the host. ``engine``, ``slots`` and ``streams`` copy activations to
pinned memory and back, ``weights`` copies frozen weights, ``budgets`` limits "auto". Read ``checkpointing`` first.
"""
