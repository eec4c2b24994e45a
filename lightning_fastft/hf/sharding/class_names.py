"""The names of the classes that FSDP2 makes for models."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lightning_fastft.hf.families import own_class


def name_class(model: PreTrainedModel) -> None:
    """Give the class that FSDP2 made for a model the name and module of the model's own class.

    transformers looks up by them what a model records, and under which names its files hold tensors.
    """
    own = own_class(model)
    made = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__deepcopy__": type(model).__deepcopy__,  # type: ignore[attr-defined]
    }
    model.__class__ = type(own.__name__, (FSDPModule, own), made)
