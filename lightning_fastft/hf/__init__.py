"""Load, adapt, shard and write models of transformers, PEFT and bitsandbytes.

``families`` lists the supported architectures. ``loading`` builds a model from a name, a folder or a configuration,
``lora`` adds adapters, ``sharding`` splits the model over devices, and ``export`` writes files that stock libraries
read. Read ``families``, then ``loading.model``.
"""
