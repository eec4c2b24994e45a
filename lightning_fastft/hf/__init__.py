"""Load, adapt, shard and write models of transformers, PEFT and bitsandbytes.

A name, a folder or a configuration enters; a model that is ready for the rooms above leaves, and files that its own
libraries read. ``families`` says what is known of each architecture. Read ``families``, then ``loading``.
"""
