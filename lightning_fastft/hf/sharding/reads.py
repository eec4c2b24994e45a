"""Which tensors of a checkpoint's files make each tensor of a model, and the operations between them."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from lightning_fastft.hf.loading.quantised_files import (
    check_scales,
    dequantised_format,
    dequantising,
    quantization_method,
    save_as_dense,
)
from lightning_fastft.hf.loading.safe_files import check_headers
from lightning_fastft.hf.loading.source import ModelSource, weight_files

# Dtypes by their names in safetensors.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter


class Stored(NamedTuple):
    """A tensor of a file.

    Attributes:
        key: Its name in the file.
        path: The file.
        pattern: Pattern of a conversion that its name matches; None without a conversion.
    """

    key: str
    path: str
    pattern: str | None


class Read:
    """The tensors of files that make one or more tensors of a model.

    Args:
        target: Name of the model's tensor, of several the one that transformers names first.
        converter: transformers' conversion between them (experts merged into a stack, a product split, fp8
            dequantised); None if the one stored tensor is the model's.
    """

    def __init__(self, target: str, converter: WeightConverter | None) -> None:
        self.target, self._converter = target, converter
        self.stored: list[Stored] = []

    def run(self, load: Callable[[Stored], torch.Tensor], *, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the tensors of the model by name."""
        if self._converter is None:
            return {self.target: load(self.stored[0])}
        # A converter collects the tensors that it converts, so each run gets a copy.
        converter = copy.deepcopy(self._converter)
        for stored in self.stored:
            converter.add_tensor(self.target, stored.key, stored.pattern, functools.partial(load, stored))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def find_reads(model: PreTrainedModel, source: ModelSource) -> dict[str, Read] | None:
    """Return the reads that make the tensors of a model from the files of its checkpoint, by the tensors' names.

    None if the files do not make exactly the model's tensors in its shapes, or if a conversion needs their values. The
    caller then reads the whole model, which works or names the fault.

    The conversions are recorded in the model, as ``from_pretrained`` does: it is saved under the names of these files.

    Raises:
        DataError: A weight file is broken, or its weights in fp8 have no scales.
        UnsupportedModelError: As ``check_scales``.

    Cost:
        Reads the headers of the files. On the host about 70 microseconds per stored tensor: 2.6 s for Qwen3-235B-A22B.
    """
    method = quantization_method(source.config)
    is_dequantised = dequantised_format(source.config) is not None
    if method is not None and not is_dequantised:
        return None
    paths = weight_files(source)
    check_headers(paths, name=source.name, is_quantised=is_dequantised)
    check_scales(paths, source.config, name=source.name)
    try:
        return _plan(model, source, _read_metas(paths))
    except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        # A conversion needs values, or does not fit these tensors; or their dtype is not known here.
        return None


def _read_metas(paths: Sequence[str]) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the file of every stored tensor, and a tensor of its shape and dtype on the meta device."""
    from safetensors import safe_open

    metas = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                stored = file.get_slice(key)
                dtype = _DTYPES[stored.get_dtype()]
                metas[key] = path, torch.empty(stored.get_shape(), dtype=dtype, device="meta")
    return metas


def _plan(
    model: PreTrainedModel, source: ModelSource, metas: dict[str, tuple[str, torch.Tensor]]
) -> dict[str, Read] | None:
    """Return the reads after running each on the meta device; record the conversions in the model. None as above."""
    conversions = _find_conversions(model, source)
    tensors = model.state_dict()
    tied = set(model.all_tied_weights_keys)
    reads = _assign(metas, conversions, model=model, tensors=tensors)
    found: dict[str, Read] = {}
    for read in reads.values():
        for name, made in read.run(lambda stored: metas[stored.key][1], model=model).items():
            if name not in tensors or made.shape != tensors[name].shape:
                return None
            found[name] = read
    if set(found) != set(tensors) - tied:
        return None
    model._weight_conversions = [change for change in conversions if change.was_used()]
    if dequantised_format(source.config) is not None:
        save_as_dense(model)
    return found


def _assign(
    metas: dict[str, tuple[str, torch.Tensor]],
    conversions: list[Any],
    *,
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
) -> dict[str, Read]:
    """Return the reads of all stored tensors by their first target; raise KeyError on a tensor without one."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [change for change in conversions if isinstance(change, WeightRenaming)]
    converters = [change for change in conversions if isinstance(change, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    reads: dict[str, Read] = {}
    # Conversions get the tensors of a list, such as experts, in this order.
    for key in sorted(metas, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, tensors)
        if name not in tensors and key in tensors:
            name, pattern = key, None
        if name in model.all_tied_weights_keys:
            continue
        if name not in tensors:
            if any(re.search(expression, name) for expression in ignored):
                continue
            raise KeyError(name)
        read = reads.setdefault(name, Read(name, None if pattern is None else by_pattern[pattern]))
        read.stored.append(Stored(key, metas[key][0], pattern))
    return reads


def _find_conversions(model: PreTrainedModel, source: ModelSource) -> list[Any]:
    """Return transformers' renamings and conversions of a checkpoint's tensors for a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers import AutoHfQuantizer

    reader = None
    if dequantised_format(source.config) is not None:
        reader = AutoHfQuantizer.from_config(dequantising(source.config).quantization_config, pre_quantized=True)
    return get_model_conversion_mapping(model, None, reader)
