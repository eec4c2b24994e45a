"""Load, adapt, shard and write models of transformers, PEFT and bitsandbytes.

A name, a folder, a configuration or a loaded model enters; a model with adapters on its device or devices leaves, and
later its files. ``families`` lists the supported architectures. ``loading`` builds a model from a name, a folder or a
configuration, ``lora`` adds adapters (``lora_targets``, ``lora_init``, ``lora_folders`` and ``lora_refusals`` are its
parts), ``sharding`` splits the model over devices, and ``export`` writes files that stock libraries read, with
``merge``, ``read_back``, ``added_tokens`` and ``companions``. ``expert_nf4`` holds experts in NF4: their tensor is in
``expert_nf4_tensor``, their checkpoints in ``expert_nf4_reading``. Read ``families``, then ``loading.model``.
"""
