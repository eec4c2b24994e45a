"""Shard a model with FSDP2, and build it without a whole copy on any device.

A model, or where it comes from, and a device mesh enter; a model of sharded parameters leaves. ``fillers`` opens a
model on the meta device and fills it, ``reads`` says from which tensors of files, ``units`` shards it, ``state``
answers questions about a sharded model, ``stand_ins`` gathers other values in place of weights, ``wide_tensors`` shards
tensors in fp32, and ``class_names`` keeps the names of models' classes. Read ``units`` first.
"""
