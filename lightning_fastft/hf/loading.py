"""From a name, a folder or a configuration to a model on its device: read or initialised, quantised, verified."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_fastft.core.checks import check_choice, check_path
from lightning_fastft.core.errors import DataError, MissingDependencyError, OptionError, UnsupportedModelError
from lightning_fastft.hf.dtypes import seeded
from lightning_fastft.hf.safe_files import check_config, check_headers, check_index

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

MAX_NAMES_IN_MESSAGE = 8
# Options with which transformers returns None for a file that is not there.
_SILENT = MappingProxyType(
    {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER_FILE = re.compile(r"^(tokenizer|vocab|merges|spiece|sentencepiece|tekken)|\.(model|tiktoken|vocab)$")


class ModelSource:
    """Name where a model comes from, without loading it.

    Args:
        model: Hub id, local folder, path of a ``config.json``, a dictionary with ``model_type``, or a transformers
            configuration.
        init: "pretrained" reads the weights; "random" initialises them from the configuration.
        revision: Branch, tag or commit on the hub; None for the default branch.

    Raises:
        OptionError: init is unknown, or a bare configuration is given where weights are asked for.

    Example:
        >>> source = ModelSource({"model_type": "qwen3", "vocab_size": 64}, init="random")
        >>> source.config.vocab_size
        64
    """

    def __init__(
        self, model: str | dict[str, Any] | PretrainedConfig, *, init: str = "pretrained", revision: str | None = None
    ) -> None:
        check_choice("init", init, ("pretrained", "random"))
        if not isinstance(model, (str, Mapping)) and not hasattr(model, "to_diff_dict"):
            raise OptionError(
                f"model must be a name, a folder, a configuration or a transformers model, got {type(model).__name__}."
            )
        if isinstance(model, str):
            check_path("model", model)
        is_configuration = not isinstance(model, str) or model.endswith(".json")
        if is_configuration and init == "pretrained":
            raise OptionError(
                f"The configuration {_describe(model)} has no weights. Give a hub id or a folder, or set init='random'."
            )
        self.model = model
        self.init = init
        self.revision = revision

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """The transformers configuration; read on first use. A hub id may be downloaded here.

        Raises:
            OptionError: It cannot be read, or has sizes that no model has.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, PretrainedConfig

        if isinstance(self.model, str):
            try:
                check_config(
                    PretrainedConfig.get_config_dict(self.model, revision=self.revision or "main")[0], name=self.model
                )
                return AutoConfig.from_pretrained(self.model, revision=self.revision or "main", trust_remote_code=False)
            except OptionError:
                raise
            # What is wrong with a type in a file shows in many ways.
            except (
                OSError,
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
                ArithmeticError,
                RecursionError,
                StrictDataclassError,
            ) as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                advice = "Check the name and the connection, or give a local folder."
                if "custom code" in reason:
                    advice = (
                        "Code of a model repository is never run here, as with trust_remote_code=False: load the "
                        "model yourself and pass it."
                    )
                raise OptionError(f"The configuration of {self.model!r} cannot be read: {reason} {advice}") from error
        if isinstance(self.model, Mapping):
            content = dict(self.model)
            if "model_type" not in content:
                raise OptionError(f"The configuration has no 'model_type'; it has {sorted(content)}.")
            check_config(content, name=str(content["model_type"]))
            return AutoConfig.for_model(content.pop("model_type"), **content)
        return copy.deepcopy(self.model)

    @property
    def name(self) -> str:
        """The hub id or path; for a configuration its model type."""
        return self.model if isinstance(self.model, str) else self.config.model_type

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding as the configuration has it."""
        return int(self.config.get_text_config(decoder=True).vocab_size)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer saved with the model; None for a configuration, and for a folder without one.

        Raises:
            OptionError: Its files are nested without end, or have another shape than a tokenizer's.
        """
        from transformers import AutoTokenizer

        if not isinstance(self.model, str) or self.model.endswith(".json"):
            return None
        names = {path.name for path in Path(self.model).glob("*")}
        # For a model without tokenizer files, transformers makes a tokenizer without a vocabulary: every text becomes
        # one token.
        if "config.json" in names and not any(map(_TOKENIZER_FILE.search, names)):
            return None
        try:
            with _BareErrors(self.model):
                return AutoTokenizer.from_pretrained(
                    self.model, revision=self.revision or "main", trust_remote_code=False
                )
        except OptionError:
            raise
        except (RecursionError, TypeError, AttributeError, KeyError, UnicodeDecodeError) as error:
            raise OptionError(
                f"The tokenizer of {self.model!r} cannot be read: {error!r}. Fetch its files again."
            ) from error

    @property
    def has_processor(self) -> bool:
        """Whether the folder or hub id comes with a processor of images. Of a hub id a small file may be fetched."""
        from transformers.utils.hub import cached_file

        if not isinstance(self.model, str) or self.model.endswith(".json"):
            return False
        if Path(self.model).is_dir():
            return any((Path(self.model) / name).is_file() for name in _PROCESSOR_FILES)
        options = {"revision": self.revision or "main", **_SILENT}
        return any(cached_file(self.model, name, **options) is not None for name in _PROCESSOR_FILES)

    def processor_settings(self) -> str:
        """Return the text of the processor's files; of a hub id its name and revision."""
        files = [Path(str(self.model)) / name for name in _PROCESSOR_FILES]
        found = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
        return "\n".join(found or [self.name, self.revision or ""])

    def load_processor(self) -> ProcessorMixin:
        """Return the processor saved with the model.

        Raises:
            MissingDependencyError: The extra ``vision`` is not installed.
            OptionError: Its files cannot be read.
        """
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(self.model, revision=self.revision or "main", trust_remote_code=False)
        except ImportError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "a package is missing.")
            raise MissingDependencyError(
                f"The processor of {self.name!r} cannot be loaded: {reason} Install what images need with: "
                "pip install 'lightning_fastft[vision]'"
            ) from error
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise OptionError(f"The processor of {self.model!r} cannot be read: {error!s:.300}") from error


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class that makes a language model of a configuration: with its image tower where it has one.

    Some types (Qwen3.5) also have a class without the tower. It would read the same folder, but give adapters and
    weights other names than the whole model has.

    Raises:
        OptionError: transformers has no language model for it.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    raise OptionError(
        f"transformers has no causal language model of type {config.model_type!r}. Give a model whose configuration "
        "AutoModelForCausalLM or "
        "AutoModelForImageTextToText reads."
    )


def build_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Literal["nf4"] | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Return the model on its device: read from safetensors and verified, or initialised from its configuration.

    Args:
        source: Where the model comes from.
        device: Where every tensor goes; nothing passes through another device's memory.
        dtype: Dtype of all floating tensors that are not quantised.
        quantization: "nf4" holds every linear layer but the head, and every stack of experts, in NF4 with doubly
            quantised scales; None for no quantisation.
        seed: Seed of a random initialisation, the same on every rank; the global generators are left as they were.

    Returns:
        A transformers causal language model in training mode.

    Raises:
        DataError: Weights are missing, left over, of another shape, or not finite; the message names the tensors. Or a
            file of them is broken, or is no safetensors file beside the others.
        MissingDependencyError: quantization needs bitsandbytes and it is not installed.
        OptionError: quantization="nf4" for a checkpoint in MXFP4, which is read dequantised.

    Cost:
        One read of the weights (two where they are quantised), one reduction over them on the device and one host sync.
        A random model is made block by block: peak memory is the finished model plus one block.

    Source:
        NF4 and double quantisation: QLoRA, arXiv 2305.14314, through bitsandbytes.
    """
    from lightning_fastft.hf.expert_nf4 import quantise_experts

    quantization_config = None if quantization is None else _nf4_config(dtype)
    # Lightning calls configure_model under a default device and dtype of its own; a load names both itself.
    with torch.device("cpu"), default_dtype(torch.float32):
        if source.init == "random":
            model = _initialise(
                source.config, device=device, dtype=dtype, quantization_config=quantization_config, seed=seed
            )
        else:
            _refuse_adapters(source)
            held = getattr(source.config, "quantization_config", None)
            check_headers(weight_files(source), name=source.name, is_quantised=held is not None)
            if quantization is not None:
                _check_files_finite(source, device=device)
            model = _read(source, device=device, dtype=dtype, quantization_config=quantization_config)
    if quantization is not None:
        _check_nf4_layers(model, name=source.name)
        # Whatever was not quantised on the way, and one dense buffer for all.
        quantise_experts(model)
    check_finite(model, name=source.name)
    return model.train()


def check_finite(model: nn.Module, *, name: str) -> None:
    """Refuse weights that hold NaN or infinity.

    Quantised weights are judged by their scales, which show infinity but on CUDA no NaN: files are judged before they
    are quantised.

    Raises:
        DataError: A weight is not finite; the message names the tensors.

    Cost:
        One reduction over all weights on their device and one host sync.
    """
    names, tensors = [], []
    for parameter_name, parameter in model.named_parameters():
        for tensor in _judged_tensors(parameter):
            if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
                names.append(parameter_name)
                tensors.append(tensor.detach())
    # The largest magnitude carries NaN and infinity along and needs no copy of the weights.
    refuse_not_finite(names, [largest_magnitude(tensor) for tensor in tensors], name=name)


def _check_files_finite(source: ModelSource, *, device: torch.device) -> None:
    """Refuse NaN and infinity in the files of a checkpoint: once quantised on CUDA, a NaN leaves no trace."""
    from safetensors import safe_open

    names, largest = [], []
    for path in weight_files(source):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor = file.get_tensor(key)
                if tensor.is_floating_point() and tensor.numel():
                    names.append(key)
                    largest.append(largest_magnitude(tensor))
    refuse_not_finite(names, largest, name=source.name)


def weight_files(source: ModelSource) -> list[str]:
    """Return the safetensors files of a folder or hub id under their standard names; none where it has others,
    which loading itself refuses.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    options = {"revision": source.revision or "main"}
    single = cached_file(source.model, SAFE_WEIGHTS_NAME, **options, **_SILENT)
    if single is not None:
        return [single]
    index = cached_file(source.model, SAFE_WEIGHTS_INDEX_NAME, **options, **_SILENT)
    if index is not None:
        check_index(index, name=source.name)
    return [] if index is None else get_checkpoint_shard_files(source.model, index, **options)[0]


def largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, fp32, which carries NaN and infinity along."""
    return torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32)


def refuse_not_finite(names: list[str], largest: list[torch.Tensor], *, name: str) -> None:
    """Raise for those names whose largest magnitude is not finite; one host sync."""
    if not largest:
        return
    is_finite = torch.isfinite(torch.stack(largest)).tolist()
    broken = list(dict.fromkeys(tensor_name for tensor_name, finite in zip(names, is_finite) if not finite))
    if broken:
        raise DataError(
            f"Weights of {name} hold NaN or infinity in {list_names(broken)}. Fetch the files again or check the "
            "checkpoint."
        )


def _judged_tensors(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield what shows whether a weight is finite: itself, or the scales of a quantised one."""
    quant_state = getattr(parameter, "quant_state", None)
    if quant_state is None:
        yield parameter
        return
    nested = quant_state.state2
    yield quant_state.absmax if nested is None else nested.absmax
    if nested is not None:
        yield quant_state.offset.reshape(1)


def _refuse_adapters(source: ModelSource) -> None:
    """Say what a folder without a model is, where it is one of adapters."""
    from transformers.utils import find_adapter_config_file

    assert isinstance(source.model, str)
    folder = Path(source.model)
    if folder.is_dir() and (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise OptionError(
            f"{source.model} holds PEFT adapters, not a model. Give the base model, and the adapters through a "
            "checkpoint."
        )
    # transformers would attach the adapters, and take the base model from where their file says.
    if find_adapter_config_file(source.model, revision=source.revision or "main") is not None:
        raise OptionError(
            f"{source.model} holds PEFT adapters (adapter_config.json) beside its model; which of the two is meant is "
            "not guessed. "
            "Give a folder of the model alone."
        )


class _BareErrors:
    """Turn the bare Exception that the tokenizers library raises for a file of another shape, and that class
    alone, into an OptionError.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        is_panic = kind is not None and kind.__name__ == "PanicException"
        if kind is Exception or is_panic:
            raise OptionError(
                f"The tokenizer of {self._name!r} cannot be read: {error!s:.300}. Fetch its files again."
            ) from error


def _read(
    source: ModelSource, *, device: torch.device, dtype: torch.dtype, quantization_config: Any
) -> PreTrainedModel:
    """Read a checkpoint and verify that every weight of the model came from it."""
    from lightning_fastft.hf.expert_nf4_reading import quantise_experts_too

    options = {} if quantization_config is None else {"quantization_config": quantise_experts_too(quantization_config)}
    is_mxfp4 = _holds_mxfp4(source.config)
    if is_mxfp4:
        if quantization_config is not None:
            raise OptionError(
                f"{source.model} holds its experts in MXFP4, which is read as bf16 or fp32, and quantization='nf4' "
                "quantises what is read in such a "
                "dtype. Leave quantization away, or save the model dequantised first."
            )
        from transformers import Mxfp4Config

        # In MXFP4 itself transformers has no backward.
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    model, report = auto_class(source.config).from_pretrained(
        source.model,
        revision=source.revision or "main",
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        # Mismatches are reported below, with the other faults and by name.
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )
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
    if is_mxfp4:
        # transformers 5.17 leaves what it dequantised in bf16 whatever dtype is asked for.
        for parameter in model.parameters():
            if parameter.ndim == 3:
                parameter.data = parameter.data.to(dtype)
    return model


def _holds_mxfp4(config: PretrainedConfig) -> bool:
    """Whether a checkpoint holds expert weights in MXFP4, as those of gpt-oss do."""
    held = getattr(config, "quantization_config", None) or {}
    method = held.get("quant_method") if isinstance(held, Mapping) else getattr(held, "quant_method", None)
    return str(getattr(method, "value", method)) == "mxfp4"


def _initialise(
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization_config: Any,
    seed: int,
) -> PreTrainedModel:
    """Make a model with random weights on the device, block by block, each block quantised as soon as it is there."""
    with torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=dtype)
    quantizer = None
    if quantization_config is not None:
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
        # The layers that replace nn.Linear take the default dtype.
        with default_dtype(dtype):
            quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": device})
    tied = set(model.all_tied_weights_keys)
    is_quantised = quantizer is not None
    with seeded(seed, device=device), torch.no_grad():
        _materialise(
            model,
            name="",
            owner=model,
            tied=tied,
            device=device,
            finish=_quantise if is_quantised else None,
            is_block=True,
        )
    model.tie_weights()
    if quantizer is not None:
        model = quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    left = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.device.type != device.type
    ]
    if left:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be initialised at random: nothing fills {list_names(left)}."
        )
    return model


def _materialise(
    module: nn.Module,
    *,
    name: str,
    owner: Any,
    tied: set[str],
    device: torch.device,
    finish: Callable[[nn.Module], None] | None,
    is_block: bool,
) -> None:
    """Give module and what is below it real, initialised tensors, children first; finish each block that is
    complete.
    """
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        owner = module
    prefix = f"{name}." if name else ""
    for child_name, child in module.named_children():
        is_layer = isinstance(module, nn.ModuleList)
        _materialise(
            child, name=prefix + child_name, owner=owner, tied=tied, device=device, finish=finish, is_block=is_layer
        )
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.device.type == "meta" and prefix + key not in tied:
            real = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
                requires_grad=parameter.requires_grad,
            )
            # bitsandbytes keeps the options of the coming quantisation as attributes of its meta parameter.
            real.fastft_options = dict(parameter.__dict__)  # type: ignore[attr-defined]
            module._parameters[key] = real
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.device.type == "meta":
            module._buffers[key] = torch.empty_like(buffer, device=device)
    owner._init_weights(module)
    if is_block and finish is not None:
        finish(module)


def _quantise(block: nn.Module) -> None:
    """Turn the weights of every bitsandbytes layer and the experts of a finished block into NF4, as is done while
    a file is read.
    """
    from lightning_fastft.hf.expert_nf4 import quantise_block

    quantise_block(block)
    for module in block.modules():
        for key, parameter in module._parameters.items():
            options = {} if parameter is None else vars(parameter).pop("fastft_options", {})
            if "quant_type" in options:
                import bitsandbytes as bnb

                assert parameter is not None
                module._parameters[key] = bnb.nn.Params4bit(parameter.data, **{**options, "requires_grad": False}).to(
                    parameter.device
                )


def _check_nf4_layers(model: nn.Module, *, name: str) -> None:
    """Refuse NF4 weights of another shape than their layer, which transformers loads without a word, and keep
    their layout trainable.
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
        message = "quantization='nf4' needs bitsandbytes. Install it with: pip install 'lightning_fastft[qlora]'"
        raise MissingDependencyError(message) from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have new floating tensors made in dtype for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _describe(model: object) -> str:
    """Name a model argument in a message."""
    return repr(model) if isinstance(model, str) else f"of type {type(model).__name__}"


def list_names(names: list[str]) -> str:
    """Return the first names and how many more there are."""
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
