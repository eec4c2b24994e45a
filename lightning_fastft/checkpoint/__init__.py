"""Write, verify, sign, find and resume checkpoints.

State enters and files leave: written beside, digested, synced, renamed. ``io`` is the plugin that Lightning calls,
``files`` and ``folders`` the two forms on disk, ``resume`` the callback for bit-exact runs, ``stops`` turns signals
into checkpoints. Read ``io``, then ``files``.
"""
