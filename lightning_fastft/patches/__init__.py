"""Make a transformers model support packed batches.

A model enters; the same model leaves, with ``context=`` as a keyword of its forward. The patches give it attention that
reads the batch context, a head that computes logits for labelled rows only, and rotary angles per document;
``weight_streaming`` keeps frozen layers on the host, ``host_ends`` the embedding and the output layer. The run's
patcher records every change. Read ``packed`` first.
"""
