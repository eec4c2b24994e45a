"""Make a transformers model take packed batches.

A model enters; the same model leaves, with attention that reads the batch's context, a head that forms logits for
labelled rows only, and rotary angles of each document. Every change is recorded in the run's patcher. Read ``packed``
first.
"""
