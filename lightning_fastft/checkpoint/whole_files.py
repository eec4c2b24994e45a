"""Load checkpoints of one file, from any strategy, into a sharded model and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import _load_raw_module_state
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_fastft.core.errors import ResumeError


def load_whole(
    path: Path,
    *,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    judge: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Load a verified file into a sharded module and its optimizers, and return the rest of the checkpoint.

    Every rank must call this. ``judge`` is called with the content before a tensor is loaded, and raises if it does not
    fit. Files of other strategies number the parameters of an optimizer in its own order, by groups.

    Raises:
        ResumeError: A group of an optimizer has another number of parameters than the saved one.

    Cost:
        Tensors are read from the file as they are sharded; the optimizer states are sent by rank 0.

    Source:
        Lightning's ModelParallelStrategy.load_checkpoint (2.6.6), which takes the numbers of parameters for those of
        the module, and cannot load an optimizer without state.
    """
    content: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    judge(content)
    _load_raw_module_state(content.pop("state_dict"), module, strict=strict)
    for optimizer, state in zip(optimizers, content.get("optimizer_states", [])):
        own: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
        named = name_parameters(state, [group["params"] for group in own["param_groups"]])
        if not own["state"]:
            # torch finds no device there.
            for group, saved in zip(optimizer.param_groups, named["param_groups"]):
                group.update({name: value for name, value in saved.items() if name != "params"})
            continue
        options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=strict)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=named, options=options)
    return content


def name_parameters(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the state of an optimizer with the names of its parameters in place of their numbers.

    Args:
        state: Of ``Optimizer.state_dict``, or one that has names already.
        names: Names of the parameters of each group.

    Raises:
        ResumeError: A group has another number of parameters.

    Example:
        >>> groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
        >>> name_parameters({"state": {1: {"step": 3}}, "param_groups": groups}, [["b"], ["a"]])
        {'state': {'a': {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': ['b']}, {'lr': 0.2, 'params': ['a']}]}
    """
    places: dict[int | str, str] = {}
    for number, (saved, own) in enumerate(zip(state["param_groups"], names)):
        if len(saved["params"]) != len(own):
            raise ResumeError(
                f"Group {number} of the saved optimizer has {len(saved['params'])} parameters, and that of this run "
                f"has {len(own)}. Resume with the model and the optimizer of that run, or start a new run from its "
                "weights without ckpt_path."
            )
        places |= {key: key if isinstance(key, str) else name for key, name in zip(saved["params"], own)}
    groups = [{**group, "params": [places[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {places[key]: value for key, value in state["state"].items()}, "param_groups": groups}
