"""Install packed training on every transformers model inside a module: packed attention and the lazy head."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.activations.checkpointing import STATUS_NAME as ACTIVATIONS_STATUS
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.frozen_weights import FrozenWeights, StreamedWeights
from lightning_fastft.activations.slots import PinnedSlab
from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.activations.tiles import install_tiles
from lightning_fastft.activations.vram_budget import HeadSizes
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.core.status import Status
from lightning_fastft.hf.families import (
    check_servable,
    decoder_layers,
    find_causal_models,
    find_compiled,
    find_other_models,
)
from lightning_fastft.hf.loading.quantised_files import refuse_forward_only
from lightning_fastft.hf.lora_refusals import refuse_invoked_adapters
from lightning_fastft.hf.sharding.gathered import gathered_weights
from lightning_fastft.mixers.install import install_mixers
from lightning_fastft.packing.context import ONE_BY_ONE
from lightning_fastft.patches.attention import NAME, install_attention
from lightning_fastft.patches.carriers import install_carriers
from lightning_fastft.patches.document_check import check_documents
from lightning_fastft.patches.guards import install_guards, refuse_packed_batches, refuse_soft_prompts
from lightning_fastft.patches.head import STATUS_NAME as HEAD_STATUS
from lightning_fastft.patches.head import install_head
from lightning_fastft.patches.host_ends import install_host_embedding, install_host_head, movable_bytes
from lightning_fastft.patches.one_by_one import install_one_by_one, runs_one_by_one
from lightning_fastft.patches.rotary import install_document_rotary
from lightning_fastft.patches.value_points import install_value_points
from lightning_fastft.patches.weight_streaming import install_weight_streaming
from lightning_fastft.planner.step import EndBytes


class PackedInstallation(NamedTuple):
    """Result of install_packed_training: one status per part and model, the decoder layers, and per model a function
    that compares documents after the model is on its device (``check_documents``).
    """

    statuses: list[Status]
    layers: list[nn.Module]
    checks: tuple[Callable[[], Status | None], ...] = ()


def install_packed_training(
    root: nn.Module,
    patcher: ModelPatcher,
    *,
    checkpointing: OffloadCheckpointing | None = None,
    environment: RunEnvironment | None = None,
    attention: str = "auto",
) -> PackedInstallation:
    """Install packed attention, the lazy head and the activation policy on every causal language model inside root.

    Only instances change. Parameters and state-dict keys do not change, and undoing the patcher restores everything.

    Args:
        root: Any module: a model, a PEFT model, a LightningModule around them.
        patcher: Records every change and undoes it.
        checkpointing: Treatment of activations; None leaves the models' own checkpointing unchanged.
        environment: Environment of the run; None for a single process without a strategy.
        attention: "one_by_one" runs the documents of a pack one at a time; any other value installs packed attention.

    Returns:
        The statuses, also for a module without a transformers model, and the decoder layers.

    Raises:
        UnsupportedModelError: A family or an adapter cannot be packed exactly, or a model's weights are in a format
            without a backward.
        OptionError: The models recompute activations already, and the policy is "keep"; or torch.compile compiles a
            whole model, and the policy offloads. After either error, undoing the patcher restores everything.

    Cost:
        Host work once per run; no device work.
    """
    models = find_causal_models(root)
    refuse_invoked_adapters(root)
    refuse_soft_prompts(root, patcher)
    for _, model in models:
        refuse_forward_only(model)
    _keep_nf4_layout(root, patcher)
    if attention == ONE_BY_ONE:
        return _install_one_by_one(models, patcher, checkpointing=checkpointing)
    for _, model in models:
        check_servable(model)
    for other in find_other_models(root):
        refuse_packed_batches(other, patcher)
    if not models:
        reason = f"{type(root).__name__} holds no transformers model"
        names = ["packed attention", HEAD_STATUS, *([ACTIVATIONS_STATUS] if checkpointing is not None else [])]
        return PackedInstallation([Status(name, "inactive", reason) for name in names], [])

    if checkpointing is not None:
        _refuse_compiled(root, checkpointing)
    statuses: list[Status] = []
    all_layers: list[nn.Module] = []
    checks: list[Callable[[], Status | None]] = []
    for name, model in models:
        layers = decoder_layers(model)
        guard = install_guards(model, patcher)
        checks.append(functools.partial(check_documents, model, guard, root=root, attention_backend=attention))
        found = [
            install_attention(model, patcher),
            *install_carriers(model, patcher),
            *install_document_rotary(model, patcher),
            *install_mixers(model, patcher),
            install_head(model, patcher),
        ]
        # If root contains several models, each status names its model.
        suffix = f" ({name})" if len(models) > 1 else ""
        statuses += [status._replace(name=f"{status.name}{suffix}") for status in found]
        if checkpointing is not None:
            status_name = f"{ACTIVATIONS_STATUS}{suffix}"
            statuses.append(_attach(checkpointing, model, layers, patcher, environment, root=root, name=status_name))
        all_layers += layers
    return PackedInstallation(statuses, all_layers, tuple(checks))


def _keep_nf4_layout(root: nn.Module, patcher: ModelPatcher) -> None:
    """Keep bitsandbytes from repacking NF4 weights in an evaluation on some CPUs: a repacked one has no backward."""
    for layer in root.modules():
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            patcher.set_attribute(layer, "support_avx512bf16_for_cpu", False)


def _refuse_compiled(root: nn.Module, checkpointing: OffloadCheckpointing) -> None:
    """Refuse to offload inside a compiled model: its recompute may save other tensors than its forward did."""
    # On a CPU "auto" keeps everything.
    offloads = checkpointing.policy == "offload" or (checkpointing.policy == "auto" and torch.cuda.is_available())
    compiled = find_compiled(root) if offloads else ""
    if compiled:
        raise OptionError(
            f"torch.compile compiles {compiled} as a whole, and activations={checkpointing!r} offloads inside it. "
            "Remove torch.compile, compile only parts of your own, or use "
            'activations=OffloadCheckpointing("recompute").'
        )


def _install_one_by_one(
    models: list[tuple[str, PreTrainedModel]], patcher: ModelPatcher, *, checkpointing: OffloadCheckpointing | None
) -> PackedInstallation:
    """Make every model run the documents of a pack one at a time; the model's own checkpointing does not change."""
    statuses = [install_one_by_one(model, patcher) for _, model in models]
    if checkpointing is not None:
        reason = f"not with attention={ONE_BY_ONE!r}"
        statuses.append(Status(ACTIVATIONS_STATUS, "inactive", reason, "call model.gradient_checkpointing_enable()"))
    return PackedInstallation(statuses, [])


def _head_sizes(model: PreTrainedModel, layers: list[nn.Module]) -> HeadSizes:
    """Return the sizes of a model outside of its decoder layers.

    The gradient of an embedding that is not tied is made last, when the memory of the layers is free again.
    """
    output = getattr(model.get_output_embeddings(), "weight", None)
    left_out = {parameter for layer in layers for parameter in layer.parameters()}
    left_out.update(item for item in model.get_input_embeddings().parameters() if item is not output)
    sum_bytes = output.numel() * torch.float32.itemsize if output is not None and output.requires_grad else 0
    return HeadSizes(
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        trained=tuple(item for item in model.parameters() if item.requires_grad and item not in left_out),
        sum_bytes=sum_bytes,
    )


def _attach(
    checkpointing: OffloadCheckpointing,
    model: PreTrainedModel,
    layers: list[nn.Module],
    patcher: ModelPatcher,
    environment: RunEnvironment | None,
    *,
    root: nn.Module,
    name: str,
) -> Status:
    """Apply the activation policy to the layers of one model inside root, whose status has this name."""
    averaging = "" if environment is None else environment.averaging
    if averaging and checkpointing.options.weights == "stream":
        raise OptionError(
            f"{averaging} reads and writes every weight of the model, and weights='stream' keeps frozen ones on the "
            f"host. Remove {averaging}, or use OffloadCheckpointing(weights='resident')."
        )
    weights = FrozenWeights(
        layers,
        move=None if averaging else functools.partial(_stream_weights, root, model, patcher),
        resident_ends=functools.partial(movable_bytes, model, root),
    )
    gathered = gathered_weights(model, layers, patcher)
    status = checkpointing.attach(
        layers,
        patcher,
        containers=_containers(model, layers),
        environment=environment,
        weights=weights,
        gathered=gathered,
        head=_head_sizes(model, layers),
        name=name,
    )
    segments = checkpointing.last_segments()
    install_value_points(model, layers, segments, patcher)
    if segments and checkpointing.mlp_tiles > 1:
        install_tiles(layers, segments, patcher, num_tiles=checkpointing.mlp_tiles)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # A teacher, a reference.
        return Status(name, "inactive", "frozen: a forward without gradients keeps no activations")
    return status


def describe_models(root: nn.Module) -> list[str]:
    """Return one line per transformers model inside root: its name, its class, and its attention implementation."""
    return [
        f"{name or '(root)'}: {type(model).__name__}, attention {model.config._attn_implementation!r}"
        for name, model in find_causal_models(root)
    ]


def describe_unprepared(root: nn.Module) -> str:
    """Return the transformers models inside root if none of them takes packed documents apart, else an empty text."""
    for _, model in find_causal_models(root):
        if runs_one_by_one(model) or model.config.get_text_config(decoder=True)._attn_implementation == NAME:
            return ""
    return "; ".join(describe_models(root))


def _stream_weights(
    root: nn.Module, model: PreTrainedModel, patcher: ModelPatcher, streams: CopyStreams
) -> StreamedWeights:
    """Move the frozen weights of the decoder layers, the input embedding and the output layer to pinned memory, until
    the patcher is undone.
    """
    own = ModelPatcher()
    slabs: dict[int, PinnedSlab] = {}

    def allocate(num_bytes: int) -> torch.Tensor:
        slab = PinnedSlab(num_bytes, device=streams.device)
        own.add_undo(slab.close)
        region = slab.reserve(num_bytes)
        assert region is not None
        slabs[region.tensor.data_ptr()] = slab
        return region.tensor

    def free(memory: torch.Tensor) -> None:
        slabs.pop(memory.data_ptr()).close()

    movable = movable_bytes(model, root)
    with contextlib.ExitStack() as half_done:
        half_done.callback(own.undo)
        weights, streamer = install_weight_streaming(
            model, own, streams=streams, allocate_host=allocate, free_host=free
        )
        embedding = install_host_embedding(model, own, streams=streams, allocate_host=allocate, root=root)
        head = install_host_head(model, own, streams=streams, allocate_host=allocate, root=root)
        # All weights are moved; they stay on the host until the patcher is undone.
        half_done.pop_all()
    patcher.add_undo(own.undo)
    # The current forward may already have passed the hooks of its first layer.
    streamer.use(0, direction=1)
    return StreamedWeights(
        num_host_bytes=streamer.num_host_bytes,
        num_slot_bytes=streamer.num_slot_bytes,
        ends=EndBytes(
            movable.embedding if embedding.state == "active" else 0,
            movable.head if head.status.state == "active" else 0,
        ),
        statuses=(weights, embedding, head.status),
        enter_backward=functools.partial(streamer.use, 0, direction=-1),
        prefetch_head=head.prefetch,
        drop_head=head.drop,
    )


def _containers(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the modules around the decoder layers that have the checkpointing flag, which disables the key/value cache
    in training.
    """
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing")
        and module is not layers[0]
        and any(child is layers[0] for child in module.modules())
    ]
