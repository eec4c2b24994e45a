"""Run packed training in a user's own Lightning Fabric loop, without a Trainer.

A model, its optimizers and a ``PackedDataModule`` enter ``FastFTFabric``; the wrapped model, the optimizers and a
loader of packed batches leave. ``fabric`` has ``FastFTFabric``, which overrides the methods of Fabric; ``loop_run``
installs packed training on the model, calls the callbacks and undoes every change on ``close``; ``handed`` has the
batches that the loop has not trained yet. Read ``fabric`` first.
"""

from lightning_fastft.fabric.fabric import FastFTFabric

__all__ = ["FastFTFabric"]
