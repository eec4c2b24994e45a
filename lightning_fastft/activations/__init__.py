"""Keep, offload or recompute activations between forward and backward.

Decoder layers, a budget and the sizes of the first steps enter; layers that follow a plan leave, with a status line.
``OffloadCheckpointing`` (in ``checkpointing``) is the public switch, ``tiles`` runs feed-forward blocks in parts.
``stack`` measures the first steps (``measurement``, ``probe``) and decides when to plan; ``planning`` chooses the plan,
``execution`` applies it, ``segments`` runs one decoder layer under it, and ``recompute`` runs it again in the backward,
with the adapters and dropout of its forward (``switches``). ``values`` finds the segment of a module inside a layer,
``frozen_weights`` finds the weights that can move to the host. ``engine``, ``slots`` and ``streams`` copy activations
to pinned memory and back, ``weights`` copies frozen weights and ``host_parameter`` refuses reads of them, ``budgets``
limits "auto", ``vram_budget`` plans the first steps within it. Read ``checkpointing`` first.
"""
