"""Load a model: from a name, a folder or a configuration to weights on a device.

A ``ModelSource`` enters; a verified ``PreTrainedModel`` leaves. ``source`` names the model, ``safe_files`` checks files
before a library acts on them, ``model`` reads the weights, ``initialisation`` draws them, ``finite_weights`` checks
them, and ``litgpt`` converts checkpoints of LitGPT. Read ``model`` first.
"""
