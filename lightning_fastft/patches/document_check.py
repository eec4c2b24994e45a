"""Compare two short documents in a pack with each of them alone, once at the start of a run, on the training model.

Axes: T tokens of a document, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lightning_fastft.core.errors import FastFTError, UnsupportedModelError
from lightning_fastft.core.status import Status
from lightning_fastft.hf.families import ADVICE, FAMILIES, decoder_layers
from lightning_fastft.hf.sharding.state import reshard, sharded_roots
from lightning_fastft.packing.collate import Document, collate
from lightning_fastft.patches.guards import ReadGuard

STATUS_NAME = "check of documents"
# The second document is about as short as a convolution's window, so a leak affects most of its tokens.
LENGTHS = (19, 5)
# A layer has about sixteen results (products, norms, sums) that another kernel or shape may round differently and
# independently. The measurement has one largest rounding error per layer, so the factor is the square root of 16.
ROUNDINGS = 4.0
_EXPERTS = re.compile(r"Experts|Router|Gating")
# Errors of a model that cannot run on text only.
_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError)


def check_documents(
    model: PreTrainedModel, guard: ReadGuard, *, root: nn.Module, attention_backend: str = "auto"
) -> Status | None:
    """Raise if packed documents differ from the same documents alone by more than rounding explains.

    Tests compare the families in FAMILIES, so these return at once. For another family the two documents run alone,
    alone with the input of each layer perturbed by one rounding error of its dtype, and packed. The perturbed run
    measures the effect of rounding on this model, including changes of chosen experts. The guard counts the reads of
    the model's context; this function sets how many the family makes per forward. The root may be sharded.

    Returns:
        Status "check of documents"; None for a tested family.

    Raises:
        UnsupportedModelError: The difference exceeds rounding; the message has both numbers.

    Cost:
        Five forwards of at most 24 tokens without gradients, and a few host syncs, once per run. Under FSDP2 every rank
        runs them with the same tokens.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type in FAMILIES:
        return None
    name = f"{type(model).__name__} ({config.model_type})"
    weight: Any = model.get_input_embeddings().weight
    if weight.ndim != 2 or not weight.numel():
        reason = f"{config.model_type} is not a tested family, and its weights are sharded"
        return Status(STATUS_NAME, "inactive", reason, "run one step under strategy='fastft' before you rely on it")
    # FSDP2 gathers weights in the forward of its outermost module.
    sharded: list[Any] = list(sharded_roots(root))
    outer: Any = next((found for found in sharded if any(part is model for part in found.modules())), model)
    try:
        with _undisturbed(model, weight.device), guard.counting() as counted:
            difference, allowed, silent = _compare(model, outer, attention_backend=attention_backend)
    except FastFTError:
        raise
    except _REFUSALS as error:
        reason = f"{config.model_type} is not a tested family and failed on two short texts: {error!s:.120}"
        return Status(STATUS_NAME, "inactive", reason, "compare a packed batch with its documents yourself")
    finally:
        reshard(root)
    if silent:
        raise UnsupportedModelError(
            f"Decoder layers {list(silent)} of {name} do not read the batch context, so documents of a "
            f"pack would attend to each other. {ADVICE}"
        )
    # NaN must raise too, hence "not <=".
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{name} gives other logits for two short documents in a pack than for each alone: the relative difference "
            f"is {difference:.1e}, and rounding explains {allowed:.1e}. Documents may attend to each other "
            f"or get wrong positions. {ADVICE}"
        )
    guard.expect(counted[0])
    return Status(
        STATUS_NAME,
        "active",
        f"{config.model_type}: two packed documents differ from the same documents alone by {difference:.1e}; "
        f"rounding explains {allowed:.1e}",
    )


def _compare(
    model: PreTrainedModel, outer: Callable[..., Any], *, attention_backend: str
) -> tuple[float, float, tuple[int, ...]]:
    """Compare the logits of packed documents with those of the same documents alone.

    Distances are relative to the logits of a token, and the maximum over all tokens. In a mixture of experts rounding
    may change the expert of single tokens, so they are the median of each document.

    Returns:
        difference: Distance of packed from separate documents.
        allowed: ROUNDINGS times the distance after a perturbation of one rounding error per layer.
        silent: Indices of decoder layers that did not read the context.
    """
    documents = _draw_documents(model)
    device = model.get_input_embeddings().weight.device
    layers = decoder_layers(model)
    rows = [torch.from_numpy(document.input_ids)[None].to(device) for document in documents]
    alone = [outer(input_ids=row, use_cache=False).logits[0].float() for row in rows]
    with _disturbing(layers, dtypes=(model.dtype, model.get_input_embeddings().weight.dtype)):
        disturbed = [outer(input_ids=row, use_cache=False).logits[0].float() for row in rows]
    batch = collate(documents).to(device)
    batch.context.attention_backend = attention_backend
    batch.context.output_logits = True
    reads = [0] * len(layers)
    with _counting(layers, batch.context, reads):
        packed = outer(**batch).logits[0].float().split(batch.context.lengths)
    silent = tuple(number for number, count in enumerate(reads) if not count and _mixes_tokens(layers[number]))
    is_mixture = any(_EXPERTS.search(type(module).__name__) for module in model.modules())
    reduce = torch.median if is_mixture else torch.max
    rounding = max(torch.finfo(torch.float32).eps, _distance(disturbed, alone, reduce=reduce))
    return _distance(packed, alone, reduce=reduce), ROUNDINGS * rounding, silent if any(reads) else ()


def _draw_documents(model: PreTrainedModel) -> list[Document]:
    """Return two documents of ordinary tokens, the same on every rank."""
    config = model.config.get_text_config(decoder=True)
    special = {
        number
        for part in (model.config.to_dict(), config.to_dict())
        for key, value in part.items()
        if "token" in key
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int)
    }
    ordinary = [number for number in range(min(config.vocab_size, 4096)) if number not in special]
    draws = np.random.default_rng(0)
    return [Document(ids, ids) for ids in (draws.choice(ordinary, length).astype(np.int64) for length in LENGTHS)]


def _distance(found: Any, truth: list[torch.Tensor], *, reduce: Callable[..., torch.Tensor]) -> float:
    """Return the relative distance of the tokens, reduced per document; the larger of both documents."""
    values = [
        float(reduce(torch.linalg.vector_norm(one - other, dim=-1) / torch.linalg.vector_norm(other, dim=-1)))
        for one, other in zip(found, truth)
    ]
    return max(values) if all(map(math.isfinite, values)) else math.nan


def _mixes_tokens(layer: nn.Module) -> bool:
    """Return whether a layer has attention or a convolution, judged by the names of its submodules."""
    return any("Attention" in type(part).__name__ or isinstance(part, nn.Conv1d) for part in layer.modules())


@contextlib.contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run in evaluation mode without gradients; restore modes, buffers and random states afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(content)


@contextlib.contextmanager
def _hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of a block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _disturbing(layers: list[nn.Module], *, dtypes: tuple[torch.dtype, ...]) -> AbstractContextManager[None]:
    """Multiply the input of each layer by 1 plus or minus the largest rounding error."""
    draws = torch.Generator().manual_seed(0)

    def disturb(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        sign = torch.randint(2, hidden.shape, generator=draws).to(hidden.device) * 2 - 1
        hidden = (hidden.double() * (1 + sign * _rounding(hidden, dtypes))).to(hidden.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    return _hooked([layer.register_forward_pre_hook(disturb, with_kwargs=True) for layer in layers])


def _rounding(hidden: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> float:
    """Return the largest relative rounding error of the coarsest dtype that a layer computes in."""
    units = [torch.finfo(dtype).eps for dtype in (hidden.dtype, *dtypes) if dtype.is_floating_point]
    if hidden.is_cuda and torch.get_float32_matmul_precision() != "highest":
        # TF32 has ten mantissa bits.
        units.append(2.0**-10)
    return max(units) / 2


def _counting(layers: list[nn.Module], context: Any, reads: list[int]) -> AbstractContextManager[None]:
    """Count the reads of a context in each layer."""

    def count(number: int, sign: int, *_: Any) -> None:
        reads[number] += sign * context.num_reads

    handles = [layer.register_forward_pre_hook(partial(count, number, -1)) for number, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(partial(count, number, 1)) for number, layer in enumerate(layers)]
    return _hooked(handles)
