"""Find the parameters with a row per token: embeddings and the output layer."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def find_token_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all embeddings and output layers in a module, adapters of these included.

    Example:
        >>> find_token_parameters(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4)))[0].shape
        torch.Size([4, 2])
    """
    layers: list[nn.Module] = []
    for each in module.modules():
        if isinstance(each, PreTrainedModel):
            heads = (each.get_output_embeddings(), each.get_input_embeddings())
            layers += [layer for layer in heads if isinstance(layer, nn.Module)]
        elif isinstance(each, nn.Embedding):
            layers.append(each)
    return list(dict.fromkeys(parameter for layer in layers for parameter in layer.parameters()))
