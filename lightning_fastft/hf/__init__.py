"""Load, adapt, shard and write models of transformers, PEFT and bitsandbytes.

``loading`` builds a model from a name, a folder or a configuration. ``export`` writes files that stock libraries read.
``families`` lists the supported architectures. Read ``families``, then ``loading``.
"""
