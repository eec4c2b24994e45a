"""The classes that FSDP2 makes for modules, and their names."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel


def unsharded_class(module: nn.Module) -> type:
    """Return the class of a module before FSDP2 replaced it by one that is made in torch."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def name_class(model: PreTrainedModel) -> None:
    """Give the class that FSDP2 made for a model the name and module of the model's own class.

    transformers looks up by them what a model records, and under which names its files hold tensors.
    """
    own = unsharded_class(model)
    made = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__deepcopy__": type(model).__deepcopy__,  # type: ignore[attr-defined]
    }
    model.__class__ = type(own.__name__, (FSDPModule, own), made)
