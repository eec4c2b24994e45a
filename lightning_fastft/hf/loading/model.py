"""Build a model on its device: read and verified, or initialised from its configuration; dense or in NF4."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_fastft.core.errors import DataError, MissingDependencyError, OptionError, list_names
from lightning_fastft.core.extras import pip_line
from lightning_fastft.hf.dtypes import default_dtype, find_wide_names
from lightning_fastft.hf.loading.finite_weights import check_finite, refuse_not_finite
from lightning_fastft.hf.loading.initialisation import initialise
from lightning_fastft.hf.loading.quantised_files import (
    check_scales,
    dequantised_format,
    dequantising,
    quantization_method,
    save_as_dense,
    without_quantization,
)
from lightning_fastft.hf.loading.safe_files import check_headers
from lightning_fastft.hf.loading.source import ModelSource, auto_class, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Literal["nf4"] | None = None,
    seed: int = 0,
    home: torch.device | None = None,
) -> PreTrainedModel:
    """Return the model on its device: read from safetensors and verified, or initialised from its configuration.

    Args:
        source: Where the model comes from. Files in fp8 and MXFP4 are read dequantised.
        device: Device that quantises, and draws random weights; and that of every tensor without another home.
        dtype: Dtype of all floating tensors that are not quantised.
        quantization: "nf4" holds every linear layer but the head, and every stack of experts, in NF4 with doubly
            quantised scales; None for no quantisation.
        seed: Seed of a random initialisation, the same on every rank; the global generators do not change.
        home: Device of every tensor of the finished model, such as the host for weights that will be streamed. The
            values are those of a model on the device, bit by bit.

    Returns:
        A transformers causal language model in training mode.

    Raises:
        DataError: Weights are missing, unexpected, of another shape, or not finite; the message names the tensors. Or a
            weight file is broken, or is not a safetensors file as the others are.
        MissingDependencyError: A package is not installed that quantization or the format of the files needs.
        UnsupportedModelError: The files hold weights in fp8 in blocks that transformers cannot dequantise.

    Cost:
        One read of the weights, one reduction over them on the device and one host sync (two if they are quantised).
        A random model is built block by block: peak memory is the finished model plus one block. With another home the
        device holds one tensor at a time, of a random model one block; the home holds the finished model and the
        tensor that is read. NF4 of files in fp8 or MXFP4 takes host memory for the model in dtype.

    Source:
        NF4 and double quantisation: QLoRA, arXiv 2305.14314, through bitsandbytes.
    """
    from lightning_fastft.hf.expert_nf4 import quantise_experts

    quantization_config = None if quantization is None else _nf4_config(dtype)
    # Lightning calls configure_model under its own default device and dtype; loading sets both explicitly.
    with torch.device("cpu"), default_dtype(torch.float32):
        if source.init == "random":
            model = initialise(
                source.config,
                device=device,
                dtype=dtype,
                quantization_config=quantization_config,
                seed=seed,
                home=home or device,
            )
        else:
            # First, because it says what to do if there is no such model.
            is_quantised = quantization_method(source.config) is not None
            _refuse_adapters(source)
            check_headers(weight_files(source), name=source.name, is_quantised=is_quantised)
            check_scales(weight_files(source), source.config, name=source.name)
            read = functools.partial(_read, source, device=device, dtype=dtype)
            if quantization_config is None or dequantised_format(source.config) is None:
                model = read(quantization_config=quantization_config, home=home or device)
            else:
                dense = read(quantization_config=None, home=torch.device("cpu"))
                check_finite(dense, name=source.name)
                model = initialise(
                    source.config,
                    device=device,
                    dtype=dtype,
                    quantization_config=quantization_config,
                    home=home or device,
                    values=dict((*dense.named_parameters(), *dense.named_buffers())),
                )
    # transformers names models of files that hold 4-bit weights.
    if quantization is not None or getattr(model, "is_loaded_in_4bit", False):
        _check_nf4_layers(model, name=source.name)
    if quantization is not None:
        # Quantise the experts that are still dense, and create one dense buffer for all.
        quantise_experts(model)
    check_finite(model, name=source.name)
    return model.train()


def _refuse_adapters(source: ModelSource) -> None:
    """Raise OptionError if the folder holds PEFT adapters beside the model; ``config`` refuses adapters alone."""
    from transformers.utils import find_adapter_config_file

    assert isinstance(source.model, str)
    # transformers would attach the adapters, and read the base model from the place that their file names.
    if find_adapter_config_file(source.model, revision=source.revision or "main") is not None:
        raise OptionError(
            f"{source.model} holds both a model and PEFT adapters (adapter_config.json), so it is not clear which of "
            "them to load. Give a folder with the model alone."
        )


def _read(
    source: ModelSource, *, device: torch.device, dtype: torch.dtype, quantization_config: Any, home: torch.device
) -> PreTrainedModel:
    """Read a checkpoint and verify that every weight of the model came from it."""
    from lightning_fastft.hf.expert_nf4_reading import quantise_experts_too

    options: dict[str, Any] = {}
    is_dequantised = dequantised_format(source.config) is not None
    if is_dequantised:
        options["config"] = dequantising(source.config)
    if quantization_config is not None:
        options["quantization_config"] = quantise_experts_too(quantization_config, device=device)
    model, report = _from_pretrained(source, dtype=dtype, home=home, options=options)
    if quantization_config is not None:
        # Quantisation on CUDA hides a NaN.
        largest = model.hf_quantizer.largest
        refuse_not_finite(list(largest), list(largest.values()), name=source.name)
    _check_report(report, model=model, source=source)
    with torch.device("meta"):
        defined = auto_class(source.config).from_config(without_quantization(source.config), dtype=dtype)
    _freeze_as_defined(model, defined)
    if is_dequantised:
        save_as_dense(model)
        _cast_as_defined(model, defined, dtype=dtype)
    return model


def _from_pretrained(
    source: ModelSource, *, dtype: torch.dtype, home: torch.device, options: dict[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return the model that transformers reads, and its report."""
    try:
        return auto_class(source.config).from_pretrained(
            source.model,
            revision=source.revision or "main",
            dtype=dtype,
            device_map={"": home},
            use_safetensors=True,
            # Mismatches are reported by name below, with the other faults.
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except RuntimeError as error:
        if "automatic conversion" not in str(error):
            raise
        raise DataError(
            f"transformers cannot convert the weights of {source.model}; its report above says which and why. Check "
            "the files and the configuration, or load the model yourself and pass it to FineTuner."
        ) from error
    except ImportError as error:
        method = quantization_method(source.config)
        if method is None:
            raise
        raise MissingDependencyError(
            f"{source.model} holds weights quantised by {method}. transformers says: {error} Or give the checkpoint "
            "that was quantised, with quantization='nf4' for 4 bits."
        ) from error


def _check_report(report: Mapping[str, Any], *, model: PreTrainedModel, source: ModelSource) -> None:
    """Raise DataError if a weight of the model did not come from the files, or one of theirs has no place in it."""
    wrong = {
        "missing from the files": sorted(report["missing_keys"]),
        "in the files but not in the model": sorted(report["unexpected_keys"]),
        "of another shape": [
            f"{key} ({tuple(found)} in the files, {tuple(expected)} in the model)"
            for key, found, expected in report["mismatched_keys"]
        ],
        "unreadable": [str(message) for message in report.get("error_msgs", ())],
    }
    faults = [f"{list_names(names)} {kind}" for kind, names in wrong.items() if names]
    if faults:
        raise DataError(
            f"The weights of {source.model} do not fit {type(model).__name__}: {'; '.join(faults)}. "
            "Check the files and the configuration, or load the model yourself and pass it to FineTuner."
        )


def _freeze_as_defined(model: PreTrainedModel, defined: PreTrainedModel) -> None:
    """Freeze the parameters that the model's class creates frozen; transformers makes all that it reads trainable."""
    frozen = [name for name, parameter in defined.named_parameters() if not parameter.requires_grad]
    for name in frozen:
        model.get_parameter(name).requires_grad_(requires_grad=False)


def _cast_as_defined(model: PreTrainedModel, defined: PreTrainedModel, *, dtype: torch.dtype) -> None:
    """Give the tensors of a dequantised model the dtypes of one that is read from dense files.

    transformers 5.17 leaves stacks and tensors of other names than in the files in the dtype that they have there.
    """
    wide = find_wide_names(model, dtype)
    dtypes = {name: tensor.dtype for name, tensor in defined.state_dict().items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if name in wide else dtypes[name])


def _check_nf4_layers(model: nn.Module, *, name: str) -> None:
    """Refuse NF4 weights whose shape differs from their layer's, which transformers loads without a warning. Keep the
    layout of the others trainable.
    """
    import bitsandbytes as bnb

    wrong = []
    for layer_name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            # On some CPUs the first evaluation would repack the weight, and a repacked layer has no backward.
            layer.support_avx512bf16_for_cpu = False
            found, expected = tuple(layer.weight.quant_state.shape), (layer.out_features, layer.in_features)
            if found != expected:
                wrong.append(f"{layer_name}.weight ({found} in the files, {expected} in the model)")
    if wrong:
        raise DataError(
            f"The weights of {name} do not fit the model: {list_names(wrong)} of another shape. Check the files and "
            "the configuration."
        )


def _nf4_config(dtype: torch.dtype) -> Any:
    """Return NF4 with double quantisation and arithmetic in dtype."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        message = f"quantization='nf4' needs bitsandbytes. Install it with: {pip_line('qlora')}"
        raise MissingDependencyError(message) from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
