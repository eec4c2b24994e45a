"""Make a transformers model support packed batches.

The patches give a model attention that reads the batch context, a head that computes logits for labelled rows only, and
rotary angles per document. The run's patcher records every change. Read ``packed`` first.
"""
