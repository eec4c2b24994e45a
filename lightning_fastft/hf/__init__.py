"""Load, adapt, shard and write models of transformers, PEFT and bitsandbytes.

A name, a folder, a configuration or a loaded model enters; a model with adapters on its device or devices leaves, and
later its files. ``families`` lists the supported architectures. ``loading`` builds a model from a name, a folder or a
configuration, ``lora`` adds adapters, ``sharding`` splits the model over devices, and ``export`` writes files that
stock libraries read. Read ``families``, then ``loading.model``.
"""
