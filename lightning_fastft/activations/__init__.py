"""Keep, offload or recompute activations between forward and backward.

``OffloadCheckpointing`` (in ``checkpointing``) is the public switch; it makes decoder layers follow a plan. ``stack``
decides the plan from the measurements of the first steps (``measurement``, ``probe``); ``execution`` applies it, and
``segments`` runs one decoder layer under it. ``values`` finds the segment of a module inside a layer,
``frozen_weights`` finds the weights that can move to the host. ``engine``, ``slots`` and ``streams`` copy activations
to pinned memory and back, ``weights`` copies frozen weights, ``budgets`` limits "auto", ``vram_budget`` plans the first
steps within it. Read ``checkpointing`` first.
"""
