"""Find the Triton kernels of a training step before there is a model: run its layers on the meta device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import KEEP, RECOMPUTE
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.estimate.meta_model import (
    Swaps,
    add_adapters_on_meta,
    build_on_meta,
    first_layers,
    install_as_in_a_run,
    make_batch,
    quantise_on_meta,
)
from lightning_fastft.kernels.launch import Launch, LaunchRecorder

if TYPE_CHECKING:
    from peft import LoraConfig

    from lightning_fastft.hf.loading.source import ModelSource

# Documents of the pack. Kernels take any number of them, and Triton compiles for multiples of 16 and for others.
_NUM_DOCUMENTS = 3


def record_launches(
    source: ModelSource,
    *,
    num_tokens: int,
    quantization: Literal["nf4"] | None,
    lora: LoraConfig | None,
    dtype: torch.dtype,
    swaps: Swaps,
) -> list[Launch]:
    """Return the launches of a training step, one for each code that Triton compiles.

    The first decoder layers, as many as there are kinds, run forward and backward on the meta device, patched as in a
    run: kept, and then recomputed. The same code launches the kernels of the run, so they are found without a list of
    kernels. Kernels of the optimizer, and of operations that choose PyTorch's on the meta device, are not among them.

    Args:
        source: The model; its configuration is read, and no weights.
        num_tokens: Tokens of a pack.
        quantization: As in ``meter_step``.
        lora: As in ``meter_step``.
        dtype: As in ``meter_step``.
        swaps: Callbacks of the run.

    Raises:
        NotImplementedError: Layers do not run on the meta device.

    Cost:
        0.3 s on the host for Qwen3-8B; memory for the objects of its modules.

    Source:
        own
    """
    # Neither the seed of the run nor its adapters depend on the rehearsal.
    with torch.random.fork_rng(devices=[]):
        # transformers writes to the configuration.
        model = build_on_meta(copy.deepcopy(source.config), dtype=dtype)
        patcher, checkpointing = ModelPatcher(), OffloadCheckpointing("recompute", mlp_tiles=swaps.mlp_tiles)
        with first_layers(model):
            if quantization is not None:
                quantise_on_meta(model, dtype=dtype)
            if lora is not None:
                add_adapters_on_meta(model, lora)
            try:
                install_as_in_a_run(model, patcher, checkpointing, swaps=swaps)
                batch = make_batch(num_tokens, document_tokens=num_tokens / _NUM_DOCUMENTS, label_share=1.0)
                with LaunchRecorder() as recorder:
                    for plan in (KEEP, RECOMPUTE):
                        for segment in checkpointing.last_segments():
                            segment.plan = plan
                        model(**batch).loss.backward()
            finally:
                patcher.undo()
    return list(recorder.launches.values())
