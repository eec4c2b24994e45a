"""Build a model on the meta device, and fill its tensors with values while it is sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lightning_fastft.hf.dtypes import default_dtype, find_wide_names, seeded
from lightning_fastft.hf.loading.finite_weights import largest_magnitude, refuse_not_finite
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.quantised_files import without_quantization
from lightning_fastft.hf.loading.source import ModelSource, auto_class
from lightning_fastft.hf.sharding.reads import Read, Stored, find_reads

if TYPE_CHECKING:
    from peft import LoraConfig
    from safetensors import safe_open


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

    Random models and models in safetensors files are created on the meta device and filled unit by unit while they are
    sharded; transformers' conversions (experts merged, names changed, fp8 and MXFP4 dequantised) run for each tensor.
    NF4 bases are built on the device. Files for which ``find_reads`` returns None are read into host memory, whole on
    every rank. Seeded weights equal those of ``build_model`` bit by bit. With is_read_early the model
    is built at once, in host memory.

    Returns:
        The model in training mode, and its filler; None if nothing is left to fill.

    Raises:
        DataError: As ``build_model``, for a model that is not filled later.

    Cost:
        With a filler: no device memory, and a read of the headers of the files. Without: that of ``build_model``.
    """
    if quantization is not None:
        return build_model(source, device=device, dtype=dtype, quantization=quantization, seed=seed), None
    if is_read_early:
        return build_model(source, device=torch.device("cpu"), dtype=dtype, seed=seed), None
    with torch.device("meta"), default_dtype(torch.float32):
        # A config that says fp8 would be saved with weights that are not.
        model = auto_class(source.config).from_config(without_quantization(source.config), dtype=dtype).train()
    if source.init == "random":
        return model, _RandomFiller(seed=seed, device=device)
    reads = find_reads(model, source)
    if reads is None:
        return build_model(source, device=torch.device("cpu"), dtype=dtype), None
    _keep_wide(model, dtype=dtype)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source.model, revision=source.revision or "main")
    return model, _FileFiller(reads, device=device, model=copy.deepcopy(model), name=source.name)


def reads_base(lora: LoraConfig) -> bool:
    """Return whether PEFT computes the adapters of this configuration from the weights of the base."""
    if lora.use_dora or lora.trainable_token_indices:
        return True
    return lora.init_lora_weights not in (True, False, "gaussian", "orthogonal")


class Filler:
    """Give the tensors of a model on the meta device memory and values, module by module.

    Attributes:
        draws: Whether the model initialises its tensors. A module without tensors must then be initialised too.
        master_dtype: Dtype in which trained weights will be held; None for each weight's own.
    """

    draws = False
    master_dtype: torch.dtype | None = None

    def __init__(self, *, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold resources while the model is filled."""
        # As in build_model: Lightning may have set its own default device and dtype.
        with torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
            yield

    def fill(self, module: nn.Module, *, keys: list[str], prefix: str, owner: PreTrainedModel) -> None:
        """Fill module's own parameters of these keys and its buffers."""
        raise NotImplementedError

    @contextmanager
    def placeholders(self, model: nn.Module) -> Iterator[None]:
        """Replace weights on the meta device by zeros in host memory inside the block, without allocating their size.

        PEFT moves a new adapter to the device of its base weight; on the meta device its values would be lost.
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
    """Initialise the weights from the configuration, in the order of ``build_model``."""

    draws = True

    def __init__(self, *, seed: int, device: torch.device) -> None:
        super().__init__(device=device)
        self.seed = seed

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Draw from generators of this seed; the global generators do not change."""
        with super().opened(), seeded(self.seed, device=self.device):
            yield

    def fill(self, module: nn.Module, *, keys: list[str], prefix: str, owner: PreTrainedModel) -> None:
        """Allocate module's own tensors and let the model initialise them."""
        for key in keys:
            meta = module._parameters[key]
            assert meta is not None
            # NaN shows what no module initialises.
            module._parameters[key] = nn.Parameter(
                torch.full_like(meta, torch.nan, device=self.device), requires_grad=meta.requires_grad
            )
        _give_buffers(module, device=self.device)
        owner._init_weights(module)


class _FileFiller(Filler):
    """Read each tensor from the safetensors files that have it, or its parts.

    Args:
        reads: By the names of the model's tensors.
        device: Device of the finished tensors.
        model: A copy on the meta device, which never gets adapters. Conversions look up shapes and dtypes in it, and
            PEFT hides the experts that it adapts.
        name: Name of the checkpoint, for errors.
    """

    def __init__(self, reads: dict[str, Read], *, device: torch.device, model: PreTrainedModel, name: str) -> None:
        super().__init__(device=device)
        self.reads = reads
        self.model = model
        self.name = name
        self._files: dict[str, safe_open] = {}
        # Tensors of earlier reads that are not filled yet: a read may make several.
        self._made: dict[str, torch.Tensor] = {}
        # Largest magnitude of each tensor that was read.
        self.largest: dict[str, torch.Tensor] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the files open; at the end refuse weights that are not finite, on every rank."""
        from safetensors import safe_open

        with super().opened(), ExitStack() as stack:
            for path in sorted({stored.path for read in self.reads.values() for stored in read.stored}):
                self._files[path] = stack.enter_context(safe_open(path, framework="pt", device=str(self.device)))
            yield
            refuse_not_finite(list(self.largest), list(self.largest.values()), name=self.name)
            self._files, self.largest = {}, {}

    def fill(self, module: nn.Module, *, keys: list[str], prefix: str, owner: PreTrainedModel) -> None:
        """Read module's own tensors; the model computes those that no file has (tables of rotary frequencies)."""
        for key in keys:
            meta = module._parameters[key]
            assert meta is not None
            dtype = meta.dtype
            if self.master_dtype is not None and meta.requires_grad:
                # A master weight gets the value of the file, not one rounded to a narrower dtype.
                dtype = torch.promote_types(dtype, self.master_dtype)
            real = nn.Parameter(self._read(prefix + key, dtype=dtype), requires_grad=meta.requires_grad)
            # transformers checks this before it initialises a tensor.
            real._is_hf_initialized = True  # type: ignore[attr-defined]
            module._parameters[key] = real
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and prefix + key in self.reads:
                read = self._read(prefix + key, dtype=buffer.dtype)
                read._is_hf_initialized = True  # type: ignore[attr-defined]
                module._buffers[key] = read
        if _give_buffers(module, device=self.device):
            owner._init_weights(module)

    def _read(self, name: str, *, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._made:
            read = self.reads[name]
            _set_dtype(self.model, read.target, dtype)
            self._made |= read.run(self._load, model=self.model)
        tensor = self._made.pop(name)
        if tensor.is_floating_point() and tensor.numel():
            self.largest[name] = largest_magnitude(tensor)
        return tensor.to(device=self.device, dtype=dtype)

    def _load(self, stored: Stored) -> torch.Tensor:
        return self._files[stored.path].get_tensor(stored.key)


def _set_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> None:
    """Give a parameter on the meta device the dtype to which its files are dequantised; buffers keep theirs."""
    path, _, key = name.rpartition(".")
    parameter = model.get_submodule(path)._parameters.get(key)
    if parameter is not None:
        parameter.data = parameter.data.to(dtype)


def _keep_wide(model: PreTrainedModel, *, dtype: torch.dtype) -> None:
    """Give fp32 to tensors on the meta device that transformers reads in fp32; 5.17 does so only when it reads."""
    wide = find_wide_names(model, dtype)
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta and f"{path}.{key}" in wide:
                tensor.data = tensor.data.float()


def _give_buffers(module: nn.Module, *, device: torch.device) -> bool:
    """Allocate module's own buffers that are still on the meta device; return whether there were any."""
    metas = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    for key, buffer in metas.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    return bool(metas)
