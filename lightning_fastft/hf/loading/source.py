"""ModelSource: where a model comes from, and what transformers finds there."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_fastft.core.checks import check_choice, check_path
from lightning_fastft.core.errors import MissingDependencyError, OptionError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.hf.loading.hub_ids import refuse_missing_path
from lightning_fastft.hf.loading.safe_files import check_config, check_index

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

# Options with which transformers returns None for a missing file.
_SILENT = MappingProxyType(
    {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_VIDEO_FILE = "video_preprocessor_config.json"
# The second is that of older processors.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER_FILE = re.compile(r"^(tokenizer|vocab|merges|spiece|sentencepiece|tekken)|\.(model|tiktoken|vocab)$")


class ModelSource:
    """Name where a model comes from, without loading it.

    Args:
        model: Hub id, local folder, path of a ``config.json``, a dictionary with ``model_type``, or a transformers
            configuration.
        init: "pretrained" reads the weights; "random" initialises a model from the configuration.
        revision: Branch, tag or commit on the hub; None for the default branch.

    Raises:
        OptionError: init is unknown, or init="pretrained" for a configuration without weights.

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
            model = os.path.expanduser(model)
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
            refuse_missing_path(self.model)
            refuse_adapters(self.model)
            if self.init == "pretrained":
                refuse_litgpt(self.model)
            try:
                check_config(
                    PretrainedConfig.get_config_dict(self.model, revision=self.revision or "main")[0], name=self.model
                )
                return AutoConfig.from_pretrained(self.model, revision=self.revision or "main", trust_remote_code=False)
            except OptionError:
                raise
            # A value of the wrong type in a file raises any of these.
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
                        "Code of a model repository is never run (trust_remote_code=False): load the model yourself "
                        "and pass it."
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
        """Rows of the token embedding by the configuration."""
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the tokens at which generation stops, by generation_config.json, else by the configuration.

        For a hub id, a small file may be downloaded.
        """
        from transformers.utils import GENERATION_CONFIG_NAME
        from transformers.utils.hub import cached_file

        content: Any = None
        if isinstance(self.model, str) and self.init == "pretrained":
            file = cached_file(self.model, GENERATION_CONFIG_NAME, revision=self.revision or "main", **_SILENT)
            try:
                content = None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
            except (ValueError, RecursionError, OSError):
                # transformers reads a damaged file as an absent one.
                content = None
        if not isinstance(content, dict):
            content = {"eos_token_id": getattr(self.config.get_text_config(decoder=True), "eos_token_id", None)}
        return read_stop_ids(content.get("eos_token_id"))

    def load_tokenizer(self, *, option: str = "model") -> PreTrainedTokenizerBase | None:
        """Return the tokenizer saved with the model; None for a configuration, and for a folder without one.

        Args:
            option: The option that names the model, for messages.

        Raises:
            OptionError: It is not found, its files are nested endlessly, or they are not those of a tokenizer.
        """
        from transformers import AutoTokenizer

        if not isinstance(self.model, str) or self.model.endswith(".json"):
            return None
        refuse_missing_path(self.model, option=option)
        names = {path.name for path in Path(self.model).glob("*")}
        # Without tokenizer files, transformers makes a tokenizer without a vocabulary: every text becomes one token.
        if "config.json" in names and not any(map(_TOKENIZER_FILE.search, names)):
            return None
        try:
            with _BareErrors(self.model):
                return AutoTokenizer.from_pretrained(
                    self.model, revision=self.revision or "main", trust_remote_code=False
                )
        except OptionError:
            raise
        except OSError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise OptionError(
                f"The tokenizer of {self.model!r} cannot be read: {reason} Check the name and the connection, or give "
                "a local folder."
            ) from error
        except (RecursionError, TypeError, AttributeError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise OptionError(
                f"The tokenizer of {self.model!r} cannot be read: {error!r}. Fetch its files again."
            ) from error
        except ValueError as error:
            # A folder with vocab.json and merges.txt alone, a package that is missing, or code of the repository.
            reason, advice = " ".join(str(error).split()), "Give a hub id or a folder with tokenizer.json."
            if "custom code" in reason:
                reason, advice = "Code of a model repository is never run.", "Load the tokenizer yourself and pass it."
            raise OptionError(f"The tokenizer of {self.model!r} cannot be read: {reason} {advice}") from error

    @property
    def has_processor(self) -> bool:
        """Whether the folder or hub id has an image processor. For a hub id, a small file may be downloaded."""
        from transformers.utils.hub import cached_file

        if not isinstance(self.model, str) or self.model.endswith(".json"):
            return False
        if Path(self.model).is_dir():
            return any((Path(self.model) / name).is_file() for name in _PROCESSOR_FILES)
        options = {"revision": self.revision or "main", **_SILENT}
        return any(cached_file(self.model, name, **options) is not None for name in _PROCESSOR_FILES)

    def copy_processor(self, folder: Path, *, with_template: bool) -> None:
        """Copy the files of the image processor, and its chat template if wanted, as they are; not those of the
        tokenizer. For a hub id, small files may be downloaded.
        """
        from transformers.utils.hub import cached_file

        names = [*_PROCESSOR_FILES, _VIDEO_FILE, *(_TEMPLATE_FILES if with_template else ())]
        for name in names:
            found = cached_file(self.model, name, revision=self.revision or "main", **_SILENT)
            if found is not None:
                shutil.copyfile(found, folder / name)

    def processor_settings(self) -> str:
        """Return the text of the processor's files; for a hub id its name and revision."""
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
            # transformers breaks its sentences into lines, and goes on with installation pages.
            reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".") or "a package is missing"
            raise MissingDependencyError(
                f"The processor of {self.name!r} cannot be loaded: {reason}. Install what images need with: "
                f"{pip_line('vision')}"
            ) from error
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise OptionError(f"The processor of {self.model!r} cannot be read: {error!s:.300}") from error


def read_stop_ids(eos_token_id: object) -> tuple[int, ...]:
    """Return the ids of ``eos_token_id`` of a generation configuration: none, one or several."""
    found = eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id]
    return tuple(sorted({number for number in found if type(number) is int}))


def find_litgpt(model: str) -> Path | None:
    """Return the file of weights if a folder holds them in LitGPT's format only."""
    folder = Path(model)
    found = [folder / name for name in ("lit_model.pth", "lit_model.pth.lora") if (folder / name).is_file()]
    return found[0] if found and not any(folder.glob("*.safetensors")) else None


def refuse_litgpt(model: str) -> None:
    """Raise an OptionError with the conversion command if the model is a LitGPT folder."""
    if find_litgpt(model) is not None:
        name = model.rstrip("/")
        raise OptionError(
            f"{model!r} is a LitGPT checkpoint. Convert it and give the new folder: fastft convert {name} {name}-hf"
        )


def refuse_adapters(model: str) -> None:
    """Raise an OptionError with the option to use if the model is a folder of PEFT adapters alone."""
    folder = Path(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise OptionError(
            f"{model} holds PEFT adapters, not a model. Give their base as the model, and this folder to "
            "FineTuner(adapter=...) if they are to be trained on."
        )


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class that makes a language model from a configuration, with its image tower if it has one.

    Some types (Qwen3.5) also have a class without the tower. It would read the same folder, but its adapters and
    weights have other names than in the whole model.

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
        f"transformers has no causal language model of type {config.model_type!r}. Give a model that "
        "AutoModelForCausalLM or AutoModelForImageTextToText reads."
    )


def weight_files(source: ModelSource) -> list[str]:
    """Return the safetensors files of a folder or hub id under their standard names. If it has no such files, return
    none; loading refuses other files.
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


class _BareErrors:
    """Turn the bare Exception that the tokenizers library raises for a malformed file into an OptionError.

    Subclasses of Exception pass; only that class itself, and a panic of its Rust code, are converted.
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


def load_given_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the hub id or folder that an option names.

    Raises:
        OptionError: There is no such folder, or it holds no tokenizer.
    """
    name = os.path.expanduser(name)
    refuse_missing_path(name, option="tokenizer")
    found = None if name.endswith(".json") else ModelSource(name).load_tokenizer()
    if found is None:
        raise OptionError(
            f"tokenizer={name!r} has no files of a tokenizer, such as tokenizer.json. Give a hub id or a folder with "
            "them."
        )
    return found


def _describe(model: object) -> str:
    """Name a model argument in a message."""
    return repr(model) if isinstance(model, str) else f"of type {type(model).__name__}"
