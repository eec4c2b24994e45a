"""Load, adapt, shard and write models of transformers, PEFT and bitsandbytes.

The input is a name, a folder or a configuration; the output is a model that the higher rooms patch and train, and files
that its own libraries read. ``families`` says what is known of each architecture, ``loading`` builds a model, ``lora``
adds adapters, ``sharding`` splits it over devices, ``export`` writes it. Read ``families``, then ``loading.model``.
"""
