"""Shard a model with FSDP2: each decoder layer is a unit, and the tensors outside of the layers are one more."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError, list_names
from lightning_fastft.core.shards import local_values
from lightning_fastft.core.status import Status
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4
from lightning_fastft.hf.families import decoder_layers, find_causal_models, is_on_interface
from lightning_fastft.hf.lora import adapters_off
from lightning_fastft.hf.sharding.class_names import name_class
from lightning_fastft.hf.sharding.fillers import Filler
from lightning_fastft.hf.sharding.towers import give_tower_gradients
from lightning_fastft.hf.sharding.wide_tensors import Place, find_wide, is_wider, shard_wide, short_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STATUS_NAME = "sharding"

AdapterPlacement = Literal["auto", "replicate", "shard"]

# PEFT puts these between the names of the model's own modules.
_PEFT_PARTS = ("base_layer", "original_module")


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    filler: Filler | None = None,
    compute_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
    adapters: AdapterPlacement = "shard",
    owns_experts: bool = False,
) -> Status:
    """Shard every causal language model inside model: each decoder layer is a unit, and the tensors outside of the
    layers are one more.

    Each unit is filled whole on every rank and sharded, and only the rank's shard is kept. Inputs of a layer that are
    not tensors are passed on unchanged.

    Args:
        model: A transformers model, or a PEFT model or LightningModule around some; on any device.
        mesh: Mesh of the data parallel ranks: one axis, or two (replicate, shard), each group of which holds a copy.
        filler: Fills a model on the meta device.
        compute_dtype: Dtype in which weights are gathered and multiplied, gradients then reduced in fp32; None keeps
            each weight's own. Tensors that a model keeps in a wider dtype on purpose are not cast: frozen ones are not
            sharded, and trained ones are one more unit.
        master_dtype: Dtype in which trained weights are held; None keeps each weight's own.
        adapters: "replicate" keeps trained LoRA factors whole on every rank if nothing else is trained;
            ``ReplicatedParameters`` averages their gradients. Units of frozen weights then have one dtype and reduce
            nothing. "shard" shards them with their unit. "auto" replicates them unless stacks of experts have some.
        owns_experts: Whether stacks of experts are shards that are never gathered (expert parallelism): each rank of
            the last axis of the mesh owns E / n of the E experts of a layer. They are not part of an FSDP unit, and
            nothing reduces their gradients.

    Returns:
        The number of devices, the units, and the dtypes.

    Raises:
        UnsupportedModelError: There is no language model, nothing fills a tensor, a model keeps a trained head wider
            than compute_dtype on purpose, experts are in NF4, ranks cannot own them in equal shares, or the head is
            tied to an embedding with trained rows.
        DataError: Weights of the files are not finite.

    Cost:
        Device memory of the finished shards, one whole unit, and the tensors that are wider or outside of the layers.
        In training those tensors are gathered from the start of the forward to the end of the backward, a layer while
        it runs.

    Source:
        Zero redundancy, stage 3: arXiv 1910.02054, through torch's ``fully_shard``.
    """
    found = find_causal_models(model)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no transformers model to shard. Shard it in configure_model with "
            "fully_shard."
        )
    for _, inner in found:
        _refuse_tied_tokens(inner)
    sharder = _Sharder(
        mesh, filler=filler, compute_dtype=compute_dtype, master_dtype=master_dtype, owns_experts=owns_experts
    )
    # torch's clipping and optimizers do not accept sharded and whole tensors together.
    sharder.replicates_adapters = places_whole(model, adapters)
    sharder.units = {id(unit) for _, inner in found for unit in (*decoder_layers(inner), inner)}
    sharder.begin(model)
    with ExitStack() as stack:
        if filler is not None:
            stack.enter_context(filler.opened())
        sharder.visit(model, prefix="", owner=None)
    for _, inner in found:
        give_tower_gradients(inner)
    left = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.device.type == "meta"
    ]
    if filler is not None and filler.draws:
        left += [name for name, parameter in model.named_parameters() if _is_undrawn(parameter)]
    if left:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built in shards: nothing fills {list_names(left)}."
        )
    return Status(STATUS_NAME, "active", sharder.describe())


def _is_undrawn(parameter: nn.Parameter) -> bool:
    """Return whether a tensor of a random model still holds the NaN that it was allocated with; one host sync."""
    local = local_values(parameter)
    return local.is_floating_point() and bool(local.isnan().any())


def _refuse_tied_tokens(model: PreTrainedModel) -> None:
    """Refuse trained rows of an embedding whose weight the head reads too: it would read the shard, not the whole.

    Raises:
        UnsupportedModelError: The model has such rows.
    """
    # Some vision-language models say it in the whole configuration only.
    configs = (model.config, model.config.get_text_config(decoder=True))
    is_tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    if is_tied and isinstance(model.get_output_embeddings(), TrainableTokensWrapper):
        raise UnsupportedModelError(
            f"{type(model).__name__} ties its head to the embedding, whose trained rows (lora.trainable_token_indices) "
            "cannot be sharded. Use strategy='fastft_ddp', or train the whole embedding: "
            "modules_to_save=['embed_tokens']."
        )


class _Sharder:
    """Walk over a model in the order of its initialisation, fill tensors on the meta device, and shard each unit."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        filler: Filler | None,
        compute_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
        owns_experts: bool,
    ) -> None:
        self.mesh = mesh
        self.owns_experts = owns_experts
        self.filler = filler
        self.compute_dtype = None if compute_dtype is torch.float32 else compute_dtype
        self.master_dtype = master_dtype
        if filler is not None:
            filler.master_dtype = master_dtype
        self.units: set[int] = set()
        self.replicates_adapters = False
        self.num_replicated = 0
        # Trained tensors in a wider dtype, by the model whose unit they form.
        self._wide: dict[PreTrainedModel, list[Place]] = {}
        # Tensors outside of the FSDP units.
        self._whole: set[nn.Parameter] = set()
        self._owned: set[nn.Parameter] = set()
        # Filled parameters that several modules share, by the id of the old one, and those that PEFT copied, by name.
        # Nothing else may keep a whole tensor alive.
        self._shared: dict[int, nn.Parameter | None] = {}
        self._originals: dict[str, nn.Parameter] = {}

    def begin(self, model: nn.Module) -> None:
        """Find the parameters that modules share, and trained tensors wider than the layers compute in. Refuse experts
        that cannot be sharded as asked.
        """
        check_experts(model, num_owners=self.mesh.size(-1) if self.owns_experts else 1)
        places = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        )
        self._shared = {identity: None for identity, count in places.items() if count > 1}
        # Adapters on a base in another dtype cast their factors themselves.
        if self.master_dtype is not None or self.compute_dtype is None:
            found = {inner: find_wide(inner, self.compute_dtype) for _, inner in find_causal_models(model)}
            self._wide = {inner: places for inner, places in found.items() if places}

    def visit(self, module: nn.Module, *, prefix: str, owner: PreTrainedModel | None) -> None:
        """Fill and shard the children of module, then module itself."""
        owner = module if isinstance(module, PreTrainedModel) else owner
        has_open_buffers = any(buffer.is_meta for child in module.children() for buffer in child.buffers())
        for name, child in module.named_children():
            self.visit(child, prefix=f"{prefix}{name}.", owner=owner)
        if self.filler is not None and owner is not None:
            self._fill(module, prefix=prefix, owner=owner, filler=self.filler)
            # Some modules have no tensors and draw those of their children (the routers of Qwen3-Next).
            is_container = not module._parameters and not module._buffers
            if has_open_buffers or (is_container and self.filler.draws):
                # Some models compute buffers of their layers (Falcon-H1). Weights of files have a mark and stay.
                owner._init_weights(module)
                if any(hasattr(each, "original_module") for each in module.modules()):
                    # A wrapper of modules_to_save showed its trained copy; without adapters it shows the original.
                    with adapters_off(module):
                        owner._init_weights(module)
        if self.owns_experts and is_on_interface(module):
            self._own(module)
        if hasattr(module, "original_module"):
            self._originals = {}
        if id(module) in self.units:
            self._cut(module)

    def describe(self) -> str:
        """Return one line about the shards and their dtypes."""
        held = (
            "weights in their own dtype"
            if self.master_dtype is None
            else f"trained weights in {short_name(self.master_dtype)}"
        )
        computed = (
            "" if self.compute_dtype is None else f", computed in {short_name(self.compute_dtype)}, reduced in float32"
        )
        copies = f"{self.mesh.size(0)} copies, each over " if self.mesh.ndim == 2 else ""
        whole = f"; {self.num_replicated:,} adapter weights whole on every device" if self.num_replicated else ""
        num_wide = sum(map(len, self._wide.values()))
        wide = f"; {num_wide} weights in a wider dtype of their own are one more unit" if num_wide else ""
        experts = f"; each device owns 1/{self.mesh.size(-1)} of all experts" if self.owns_experts else ""
        return (
            f"FSDP2 over {copies}{self.mesh.size(-1)} devices, {len(self.units)} units; {held}{computed}{whole}{wide}"
            f"{experts}"
        )

    def _fill(self, module: nn.Module, *, prefix: str, owner: PreTrainedModel, filler: Filler) -> None:
        is_copy = "modules_to_save." in prefix
        metas = {
            key: parameter
            for key, parameter in module._parameters.items()
            if parameter is not None and (parameter.is_meta or is_copy)
        }
        names = {key: _plain_name(prefix + key) for key in metas}
        open_keys = []
        for key, meta in metas.items():
            shared = self._shared.get(id(meta))
            if shared is not None:
                module._parameters[key] = shared
            elif names[key] in self._originals:
                real = nn.Parameter(self._originals[names[key]].detach().clone(), requires_grad=meta.requires_grad)
                # transformers initialises the module for its buffers, and skips what has this mark.
                real._is_hf_initialized = True  # type: ignore[attr-defined]
                module._parameters[key] = real
            elif meta.is_meta:
                open_keys.append(key)
        has_buffers = any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
        if open_keys or has_buffers:
            filler.fill(module, keys=open_keys, prefix=_plain_name(prefix), owner=owner)
        for key, meta in metas.items():
            filled = module._parameters[key]
            assert filled is not None
            if id(meta) in self._shared:
                self._shared[id(meta)] = filled
            if "original_module" in prefix:
                self._originals[names[key]] = filled

    def _own(self, experts: nn.Module) -> None:
        """Keep this rank's experts of every stack, in the form in which FSDP2 would shard it."""
        places = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        for name, whole in experts.named_parameters(recurse=False):
            share = whole.detach().chunk(self.mesh.size(-1))[self.mesh.get_local_rank(self.mesh.ndim - 1)]
            dtype = self.master_dtype if self.master_dtype is not None and whole.requires_grad else whole.dtype
            # A copy, so that the stack is freed.
            share = share.to(self.mesh.device_type, dtype, copy=True)
            tensor = DTensor.from_local(share, self.mesh, places, run_check=False)
            owned = nn.Parameter(tensor, requires_grad=whole.requires_grad)
            experts.register_parameter(name, owned)
            self._owned.add(owned)

    def _cut(self, unit: nn.Module) -> None:
        policy = MixedPrecisionPolicy()
        if self.compute_dtype is not None:
            # Adapters cast their factors themselves. They are gathered in their own dtype, and so their gradients are
            # not rounded, as on one device.
            param_dtype = None if _trains_adapters_only(unit) else self.compute_dtype
            policy = MixedPrecisionPolicy(
                param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # A unit computes in one dtype, so frozen tensors that are wider on purpose are not part of it.
        wide = {place.parameter for places in self._wide.values() for place in places}
        own = [each for each in unit.parameters() if not isinstance(each, DTensor) and each not in wide]
        self._whole |= {
            parameter for parameter in own if not parameter.requires_grad and is_wider(parameter, self.compute_dtype)
        }
        if self.replicates_adapters:
            adapters = {each for name, each in unit.named_parameters() if _is_trained_factor(name, each)} - self._whole
            self.num_replicated += sum(each.numel() for each in adapters)
            self._whole |= adapters
        for parameter in own:
            if self.master_dtype is not None and parameter.requires_grad:
                parameter.data = parameter.data.to(self.master_dtype)
            self._disguise(parameter)
        fully_shard(unit, mesh=self.mesh, mp_policy=policy, ignored_params=self._whole | self._owned | wide or None)
        if isinstance(unit, PreTrainedModel):
            name_class(unit)
            if unit in self._wide:
                shard_wide(unit, self._wide[unit], self.mesh)
                name_class(unit.base_model)

    def _disguise(self, parameter: nn.Parameter) -> None:
        """View the bytes of a quantised weight as a floating dtype that is never cast, because FSDP2 of older torch
        takes no integers.

        bitsandbytes reads the bytes in any storage dtype (its ``quant_storage``).

        Source:
            https://github.com/pytorch/pytorch/issues/185239
        """
        storage_dtype = self.compute_dtype or torch.float32
        if parameter.dtype is torch.uint8 and parameter.numel() % storage_dtype.itemsize == 0:
            parameter.data = parameter.data.flatten().view(storage_dtype).unsqueeze(1)


def check_experts(model: nn.Module, *, num_owners: int) -> None:
    """Refuse experts in NF4; with several owners, also models whose experts cannot be split.

    Raises:
        UnsupportedModelError: The message has the line to change.
    """
    if any(isinstance(parameter, ExpertsNF4) for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts in NF4, which cannot be sharded. Use strategy='fastft_ddp', or remove "
            "quantization."
        )
    if num_owners == 1:
        return
    found = [module for module in model.modules() if is_on_interface(module)]
    counts = sorted({int(module.num_experts) for module in found})  # type: ignore[arg-type]
    has_norm = any(getattr(module, "has_post_expert_norm", False) for module in found)
    if not found or has_norm or any(count % num_owners for count in counts):
        reason = "has no MoE layers on transformers' ExpertsInterface"
        if found:
            reason = f"has {', '.join(map(str, counts))} experts, which {num_owners} does not divide"
        if has_norm:
            reason = "has a norm behind each expert"
        raise UnsupportedModelError(
            f"{type(model).__name__} {reason}, so {num_owners} devices cannot own them in equal shares. Set "
            "expert_parallel=1, or a divisor of the number of experts."
        )


def _trains_adapters_only(unit: nn.Module) -> bool:
    """Return whether only LoRA factors are trained in a unit, or a model."""
    trained = [
        name
        for name, parameter in unit.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    return bool(trained) and all(map(_is_factor, trained))


def places_whole(model: nn.Module, adapters: AdapterPlacement) -> bool:
    """Return whether every rank holds the trained LoRA factors of a model whole.

    Each expert of a stack has factors of its own, so "auto" shards the factors of a model with adapters on experts.
    """
    if adapters == "auto":
        has_experts = any(isinstance(module, ParamWrapper) and module.num_experts > 1 for module in model.modules())
        adapters = "shard" if has_experts else "replicate"
    return adapters == "replicate" and _trains_adapters_only(model)


def _is_trained_factor(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of a unit is a trained, unsharded LoRA factor."""
    return parameter.requires_grad and _is_factor(name) and not isinstance(parameter, DTensor)


def _is_factor(name: str) -> bool:
    return any(part in name for part in (".lora_A.", ".lora_B.", ".lora_magnitude_vector."))


def _plain_name(name: str) -> str:
    """Return the name of a tensor of a PEFT model in the model without PEFT.

    Example:
        >>> _plain_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    name = name.removeprefix("base_model.model.")
    parts = name.split(".")
    kept: list[str] = []
    for part in parts:
        if kept and kept[-1] == "modules_to_save":
            # The adapter's name follows it; drop both.
            kept.pop()
        elif part not in _PEFT_PARTS:
            kept.append(part)
    return ".".join(kept)
