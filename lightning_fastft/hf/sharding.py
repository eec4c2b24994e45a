"""Shard a model with FSDP2, one unit per decoder layer, and build it without a whole copy on any device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.status import Status
from lightning_fastft.hf.dtypes import seeded
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.hf.loading import (
    ModelSource,
    auto_class,
    build_model,
    default_dtype,
    largest_magnitude,
    list_names,
    refuse_not_finite,
    weight_files,
)
from lightning_fastft.hf.safe_files import check_headers

if TYPE_CHECKING:
    from peft import LoraConfig
    from safetensors import safe_open
    from torch.distributed.device_mesh import DeviceMesh

STATUS_NAME = "sharding"
# Put by PEFT between the names of the model's own modules.
_PEFT_PARTS = ("base_layer", "original_module")


def open_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Literal["nf4"] | None = None,
    seed: int = 0,
    is_read_early: bool = False,
) -> tuple[PreTrainedModel, Filler | None]:
    """Return a model that will be sharded, and the filler of its weights.

    A random model and one whose files hold its tensors under their own names stand on the meta device and are filled
    unit by unit while they are sharded. NF4 bases are built on the device; files that transformers must convert (merged
    experts, renamed or quantised tensors) are read into host memory, whole on every rank.

    Args:
        source: Where the model comes from.
        device: Device of this rank.
        dtype: Dtype of all floating tensors that are not quantised.
        quantization: "nf4", or None.
        seed: Seed of a random initialisation; the weights equal those of ``build_model`` bit by bit.
        is_read_early: Weights are read before the model is sharded, so it is built at once, in host memory.

    Returns:
        The model in training mode, and its filler; None if nothing is left to fill.

    Raises:
        DataError: As ``build_model``, for a model that is not filled later.

    Cost:
        With a filler no device memory and the heads of the files; without, that of ``build_model``.
    """
    if quantization is not None:
        return build_model(source, device=device, dtype=dtype, quantization=quantization, seed=seed), None
    if is_read_early:
        return build_model(source, device=torch.device("cpu"), dtype=dtype, seed=seed), None
    with torch.device("meta"), default_dtype(torch.float32):
        model = auto_class(source.config).from_config(copy.deepcopy(source.config), dtype=dtype).train()
    if source.init == "random":
        return model, _RandomFiller(seed=seed, device=device)
    places = _find_tensors(model, source)
    if places is None:
        return build_model(source, device=torch.device("cpu"), dtype=dtype), None
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source.model, revision=source.revision or "main")
    return model, _FileFiller(places, device=device, name=source.name)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    filler: Filler | None = None,
    compute_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
) -> Status:
    """Shard every causal language model inside model: each decoder layer is a unit, what stands outside the layers is
    one more.

    Each unit is filled whole on every rank, cut, and only the rank's piece is kept. Objects among the inputs of a layer
    reach it untouched.

    Args:
        model: A transformers model, or a PEFT model or LightningModule around some; on any device.
        mesh: Mesh of the data parallel ranks: one axis, or two (replicate, shard), whose groups hold a copy each.
        filler: Fills a model on the meta device.
        compute_dtype: Dtype in which weights are gathered and multiplied, gradients then reduced in fp32; None leaves
            each in its own. Frozen tensors of a wider dtype, which a model keeps so on purpose, stay whole and as they
            are.
        master_dtype: Dtype in which trained weights are held; None leaves each in its own.

    Returns:
        The number of devices, the units, and how they are held.

    Raises:
        UnsupportedModelError: There is no language model, nothing fills a tensor, or a trained tensor is wider than
            compute_dtype on purpose.
        DataError: Weights of the files are not finite.

    Cost:
        Device memory of the finished shards, one whole unit, and what stands outside the layers. In training the latter
        is gathered from the start of the forward to the end of the backward, a layer while it runs.

    Source:
        Zero redundancy, stage 3: arXiv 1910.02054, through torch's ``fully_shard``.
    """
    found = find_causal_models(model)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no transformers model to shard. Shard it in configure_model with "
            "fully_shard."
        )
    sharder = _Sharder(mesh, filler=filler, compute_dtype=compute_dtype, master_dtype=master_dtype)
    sharder.units = {id(unit) for _, inner in found for unit in (*decoder_layers(inner), inner)}
    sharder.begin(model)
    with ExitStack() as stack:
        if filler is not None:
            stack.enter_context(filler.opened())
        sharder.visit(model, prefix="", owner=None)
    left = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.device.type == "meta"
    ]
    if left:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built in shards: nothing fills {list_names(left)}."
        )
    return Status(STATUS_NAME, "active", sharder.describe(len(sharder.units)))


def reads_base(lora: LoraConfig) -> bool:
    """Return whether PEFT computes the adapters of this configuration from the weights of the base."""
    return lora.use_dora or lora.init_lora_weights not in (True, False, "gaussian", "orthogonal")


def is_sharded(module: nn.Module) -> bool:
    """Return whether any parameter of module is sharded."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def unsharded_trained_names(module: nn.Module) -> list[str]:
    """Return the trained parameters that are held whole, so that nothing would average their gradients over the
    ranks.
    """
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]


def sharded_roots(module: nn.Module) -> list[FSDPModule]:
    """Return the outermost FSDP modules inside module."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in sharded_roots(child)]


def reshard(module: nn.Module) -> None:
    """Let every FSDP module hold pieces again: after an evaluation the root still holds its weights whole.

    Cost:
        Frees memory; no communication.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def gather_state(
    model: nn.Module, *, is_trained_only: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole state of a sharded model in host memory on rank 0, and an empty dictionary elsewhere; every rank
    must call this.

    Args:
        model: The sharded model.
        is_trained_only: Leave frozen parameters out.
        dtype: Dtype of floating tensors in the result; None for the one they are held in.

    Cost:
        One gather per tensor, host memory of the result on rank 0.
    """
    reshard(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_trained_only)
    # torch's annotation has every kind of state; a model's has tensors.
    state = cast("dict[str, torch.Tensor]", get_model_state_dict(model, options=options))
    if is_trained_only:
        # torch leaves the second name of a frozen tied weight in.
        trained = {
            name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad
        }
        state = {name: tensor for name, tensor in state.items() if name in trained}
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


class _Sharder:
    """Walk over a model in the order in which it is initialised, fill what is on the meta device, and cut each unit."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        filler: Filler | None,
        compute_dtype: torch.dtype | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        self.mesh = mesh
        self.filler = filler
        self.compute_dtype = None if compute_dtype is torch.float32 else compute_dtype
        self.master_dtype = master_dtype
        self.units: set[int] = set()
        self._whole: set[nn.Parameter] = set()
        # What parameters became that several modules share, and those that PEFT copied; nothing else may keep a whole
        # tensor alive.
        self._shared: dict[int, nn.Parameter | None] = {}
        self._originals: dict[str, nn.Parameter] = {}

    def begin(self, model: nn.Module) -> None:
        """Find what modules share, and refuse a base that is trained whole and keeps a tensor wider than its unit
        would compute.
        """
        places = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        )
        self._shared = {identity: None for identity, count in places.items() if count > 1}
        for name, parameter in model.named_parameters():
            if self.master_dtype is not None and parameter.requires_grad and self._is_wide(parameter):
                raise UnsupportedModelError(
                    f"{type(model).__name__} keeps {name} in {_short(parameter.dtype)} and computes in "
                    f"{_short(self.compute_dtype)}; under FSDP2 a "
                    "decoder layer computes in one dtype. Use FineTuner(dtype='float32'), or lora, which leaves that "
                    "tensor frozen."
                )

    def visit(self, module: nn.Module, *, prefix: str, owner: PreTrainedModel | None) -> None:
        """Fill and shard the children of module, then module itself."""
        owner = module if isinstance(module, PreTrainedModel) else owner
        for name, child in module.named_children():
            self.visit(child, prefix=f"{prefix}{name}.", owner=owner)
        if self.filler is not None and owner is not None:
            self._fill(module, prefix=prefix, owner=owner, filler=self.filler)
        if hasattr(module, "original_module"):
            self._originals = {}
        if id(module) in self.units:
            self._cut(module)

    def describe(self, num_units: int) -> str:
        """Return in one line how the model is held."""
        held = (
            "weights in their own dtype"
            if self.master_dtype is None
            else f"trained weights in {_short(self.master_dtype)}"
        )
        computed = (
            "" if self.compute_dtype is None else f", computed in {_short(self.compute_dtype)}, reduced in float32"
        )
        copies = f"{self.mesh.size(0)} copies, each over " if self.mesh.ndim == 2 else ""
        return f"FSDP2 over {copies}{self.mesh.size(-1)} devices, {num_units} units; {held}{computed}"

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
                real = self._originals[names[key]].detach().clone()
                module._parameters[key] = nn.Parameter(real, requires_grad=meta.requires_grad)
            elif meta.is_meta:
                open_keys.append(key)
        has_buffers = any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
        if open_keys or has_buffers:
            filler.fill(module, keys=open_keys, prefix=_plain_name(prefix), owner=owner, master_dtype=self.master_dtype)
        for key, meta in metas.items():
            filled = module._parameters[key]
            assert filled is not None
            if id(meta) in self._shared:
                self._shared[id(meta)] = filled
            if "original_module" in prefix:
                self._originals[names[key]] = filled

    def _cut(self, unit: nn.Module) -> None:
        policy = MixedPrecisionPolicy()
        if self.compute_dtype is not None:
            # Adapters cast their factors themselves: gathered as they are held, their gradients are rounded nowhere, as
            # on one device.
            param_dtype = None if _trains_adapters_only(unit) else self.compute_dtype
            policy = MixedPrecisionPolicy(
                param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # A unit computes in one dtype: what is wider on purpose, and frozen, stays out of it.
        own = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
        self._whole |= {parameter for parameter in own if not parameter.requires_grad and self._is_wide(parameter)}
        for parameter in own:
            if self.master_dtype is not None and parameter.requires_grad:
                parameter.data = parameter.data.to(self.master_dtype)
            self._disguise(parameter)
        fully_shard(unit, mesh=self.mesh, mp_policy=policy, ignored_params=self._whole or None)

    def _disguise(self, parameter: nn.Parameter) -> None:
        """Let the bytes of a quantised weight pass as a floating dtype that is never cast: FSDP2 of older torch takes
        no integers.

        bitsandbytes reads bytes whatever dtype they are stored in (its ``quant_storage``).

        Source:
            https://github.com/pytorch/pytorch/issues/185239
        """
        storage_dtype = self.compute_dtype or torch.float32
        if parameter.dtype is torch.uint8 and parameter.numel() % storage_dtype.itemsize == 0:
            parameter.data = parameter.data.flatten().view(storage_dtype).unsqueeze(1)

    def _is_wide(self, parameter: nn.Parameter) -> bool:
        is_narrowed = self.compute_dtype is not None and parameter.is_floating_point()
        return is_narrowed and parameter.dtype.itemsize > self.compute_dtype.itemsize  # type: ignore[union-attr]


def _trains_adapters_only(unit: nn.Module) -> bool:
    """Whether only LoRA factors are trained in a unit."""
    trained = [
        name
        for name, parameter in unit.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    return bool(trained) and all(".lora_A." in name or ".lora_B." in name for name in trained)


class Filler:
    """Give the tensors of a model on the meta device memory and values, module by module."""

    def __init__(self, *, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold resources while the model is filled."""
        # As build_model: Lightning may have set a default device and dtype of its own.
        with torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
            yield

    def fill(
        self,
        module: nn.Module,
        *,
        keys: list[str],
        prefix: str,
        owner: PreTrainedModel,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Fill module's own parameters of these keys and its buffers."""
        raise NotImplementedError

    @contextmanager
    def placeholders(self, model: nn.Module) -> Iterator[None]:
        """Let weights on the meta device look like zeros in host memory for a while, without taking any.

        PEFT moves a new adapter to the device of its base weight, where its values would be lost.
        """
        places = [
            (module._parameters, key, parameter)
            for module in model.modules()
            for key, parameter in module._parameters.items()
        ]
        metas = [(parameters, key, meta) for parameters, key, meta in places if meta is not None and meta.is_meta]
        stand_ins = {
            id(meta): nn.Parameter(torch.zeros((), dtype=meta.dtype, device="cpu").expand(meta.shape))
            for _, _, meta in metas
        }
        for parameters, key, meta in metas:
            parameters[key] = stand_ins[id(meta)]
            stand_ins[id(meta)].requires_grad = meta.requires_grad
        try:
            yield
        finally:
            for parameters, key, meta in metas:
                parameters[key] = meta
                meta.requires_grad = stand_ins[id(meta)].requires_grad


class _RandomFiller(Filler):
    """Draw the weights from the configuration, in the order of ``build_model``."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        super().__init__(device=device)
        self.seed = seed

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Draw from generators of this seed; the global generators do not change."""
        with super().opened(), seeded(self.seed, device=self.device):
            yield

    def fill(
        self,
        module: nn.Module,
        *,
        keys: list[str],
        prefix: str,
        owner: PreTrainedModel,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Give module's own tensors memory and let the model initialise them."""
        for key in keys:
            meta = module._parameters[key]
            assert meta is not None
            module._parameters[key] = nn.Parameter(
                torch.empty_like(meta, device=self.device), requires_grad=meta.requires_grad
            )
        _give_buffers(module, device=self.device)
        owner._init_weights(module)


class _FileFiller(Filler):
    """Read each tensor from the safetensors file that has it."""

    def __init__(self, places: dict[str, str], *, device: torch.device, name: str) -> None:
        super().__init__(device=device)
        self.places = places
        self.name = name
        self._files: dict[str, safe_open] = {}
        self.largest: dict[str, torch.Tensor] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the files open; at the end refuse weights that are not finite, on every rank alike."""
        from safetensors import safe_open

        with super().opened(), ExitStack() as stack:
            for path in sorted(set(self.places.values())):
                self._files[path] = stack.enter_context(safe_open(path, framework="pt", device=str(self.device)))
            yield
            refuse_not_finite(list(self.largest), list(self.largest.values()), name=self.name)
            self._files, self.largest = {}, {}

    def fill(
        self,
        module: nn.Module,
        *,
        keys: list[str],
        prefix: str,
        owner: PreTrainedModel,
        master_dtype: torch.dtype | None,
    ) -> None:
        """Read module's own tensors; what no file holds (tables of rotary frequencies) the model computes."""
        for key in keys:
            meta = module._parameters[key]
            assert meta is not None
            # A master takes what the file has, not what is left of it after a narrower dtype.
            dtype = master_dtype if master_dtype is not None and meta.requires_grad else meta.dtype
            real = nn.Parameter(self._read(prefix + key, dtype=dtype), requires_grad=meta.requires_grad)
            # Where transformers looks before it initialises a tensor.
            real._is_hf_initialized = True  # type: ignore[attr-defined]
            module._parameters[key] = real
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and prefix + key in self.places:
                read = self._read(prefix + key, dtype=buffer.dtype)
                read._is_hf_initialized = True  # type: ignore[attr-defined]
                module._buffers[key] = read
        if _give_buffers(module, device=self.device):
            owner._init_weights(module)

    def _read(self, name: str, *, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._files[self.places[name]].get_tensor(name)
        if tensor.is_floating_point() and tensor.numel():
            self.largest[name] = largest_magnitude(tensor)
        return tensor.to(device=self.device, dtype=dtype)


def _give_buffers(module: nn.Module, *, device: torch.device) -> bool:
    """Give module's own buffers that are still on the meta device memory; say whether there were any."""
    metas = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    for key, buffer in metas.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    return bool(metas)


def _find_tensors(model: PreTrainedModel, source: ModelSource) -> dict[str, str] | None:
    """Return the file of each tensor; None where the files do not hold exactly the model's tensors under the
    model's names and in its shapes.
    """
    from safetensors import safe_open

    if getattr(source.config, "quantization_config", None) is not None or getattr(
        model, "_keep_in_fp32_modules_strict", None
    ):
        return None
    tied = set(model.all_tied_weights_keys)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    places: dict[str, str] = {}
    paths = weight_files(source)
    check_headers(paths, name=source.name, is_quantised=False)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in wanted and file.get_slice(name).get_shape() == wanted[name]:
                    places[name] = path
                elif name not in tied:
                    return None
    return places if set(places) == set(wanted) else None


def _plain_name(name: str) -> str:
    """Return the name that a tensor of a PEFT model has in the model alone.

    Example:
        >>> _plain_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    name = name.removeprefix("base_model.model.")
    parts = name.split(".")
    kept: list[str] = []
    for part in parts:
        if kept and kept[-1] == "modules_to_save":
            # The adapter's name comes after it.
            kept.pop()
        elif part not in _PEFT_PARTS:
            kept.append(part)
    return ".".join(kept)


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
