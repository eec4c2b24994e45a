"""Load a model: from a name, a folder or a configuration to weights on a device.

A ``ModelSource`` enters; a verified ``PreTrainedModel`` leaves. ``source`` names the model, ``hub_ids`` tells paths
from hub ids, ``safe_files`` checks files before a library acts on them, ``model`` reads the weights,
``quantised_files`` dequantises files in fp8 and MXFP4, ``initialisation`` draws weights, ``finite_weights`` checks
them, and ``litgpt`` converts checkpoints of LitGPT. Read ``model`` first.
"""
