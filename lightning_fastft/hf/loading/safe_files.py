"""Check untrusted model files before a library reads them: sizes in a configuration, paths and dtypes of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from lightning_fastft.core.errors import DataError, OptionError

# About ten times the largest published models; a library that accepted more would not terminate or run out of memory.
LARGEST_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 10_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 2**23),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**14),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2**16),
    "vocab_size": 2**24,
    "max_position_embeddings": 2**32,
}
# For these sizes zero means none.
_MAY_BE_ZERO = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    }
)
_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


def check_config(content: Mapping[str, Any], *, name: str) -> None:
    """Raise on sizes that no model has, on kernels from repositories, and on weight files named by the configuration.

    The check runs before transformers builds the configuration object, because some families build a list of all layers
    there. Parts of a
    configuration (text, vision) are checked too.

    Raises:
        OptionError: A size is not an integer within bounds, an implementation is a repository, whose code would be
            fetched and run, or ``transformers_weights`` names the file of weights.
    """
    foreign = next(
        (found for found in _implementations(content) if not found.replace("_", "").replace("-", "").isalnum()), None
    )
    if foreign is not None:
        raise OptionError(
            f"The configuration of {name!r} needs the implementation {foreign[:80]!r}, which is not part of "
            "transformers; code of a repository is never run. Remove the entry, or load the model yourself and pass it."
        )
    weights = content.get("transformers_weights")
    if weights is not None:
        raise OptionError(
            f"The configuration of {name!r} names its weight file (transformers_weights={str(weights)[:80]!r}); only "
            "files with standard names are read. Rename the file and remove the entry."
        )
    for field, value in _sizes(content):
        most, least = LARGEST_SIZES[field], 0 if field in _MAY_BE_ZERO else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            shown = repr(value)[:40]
            raise OptionError(
                f"The configuration of {name!r} has {field}={shown}; it must be a whole number between {least} and "
                f"{most}."
            )


def _implementations(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of implementations (of attention, of experts) in a configuration and its parts."""
    for part in _parts(content):
        for field, value in part.items():
            if "implementation" in str(field):
                yield from (
                    entry
                    for entry in (value.values() if isinstance(value, Mapping) else (value,))
                    if isinstance(entry, str)
                )


def _sizes(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sizes of a configuration and its parts; None means the default, and a list has one size per layer."""
    for part in _parts(content):
        for field, value in part.items():
            if field in LARGEST_SIZES and value is not None:
                yield from ((field, entry) for entry in (value if isinstance(value, (list, tuple)) else (value,)))


def _parts(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and every mapping in it."""
    waiting: list[Mapping[str, Any]] = [content]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [value for value in part.values() if isinstance(value, Mapping)]


def check_index(path: str, *, name: str) -> None:
    """Raise on an index of weights that names anything but safetensors files in its folder.

    transformers joins the names to the folder, so a name with ``..`` would leave it. It reads a name that does not end
    in .safetensors as a pickle.

    Raises:
        DataError: The index cannot be read, or names another kind of file or a file outside its folder.
    """
    try:
        weight_map = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        names = {str(file) for file in weight_map.values()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"The weight index of {name}, {path}, cannot be read: {error!r}. Download it again.") from error
    for file in sorted(names):
        is_beside = PurePosixPath(file).name == file == PureWindowsPath(file).name
        if not is_beside or not file.endswith(".safetensors"):
            raise DataError(
                f"The weight index of {name} names {file[:80]!r}; only safetensors files in the same folder are read. "
                "Download the model again."
            )


def check_headers(paths: Sequence[str], *, name: str, is_quantised: bool) -> None:
    """Raise on weight files whose headers do not describe their bytes, and on integer tensors for floating weights.

    Raises:
        DataError: A header is invalid, or a tensor has a dtype that weights cannot have.

    Cost:
        Reads the headers only.
    """
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{path} is not a complete safetensors file: {error}. Download the files of {name} again."
            ) from error
        wrong = [] if is_quantised else [f"{key} ({dtype})" for key, dtype in dtypes.items() if dtype not in _FLOATING]
        if wrong:
            raise DataError(
                f"{path} has {len(wrong)} tensors that are not floating-point weights: {', '.join(wrong[:3])}. "
                "Quantised models need quantization_config in their configuration."
            )
