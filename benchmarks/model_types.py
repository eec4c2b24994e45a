"""Compare packed documents with the same documents one by one, for every causal model type of transformers.

Each type is built tiny with random weights, in fp32 on the CPU. The outcome is "exact" (packed or, if that is refused,
one by one), "refused" (by an error of the package), "not built" with the reason, or a fault: "wrong" (no error, but
another loss or gradients) or "raw" (an error from elsewhere). A fault makes the exit code 1.

    python -m benchmarks.model_types                   # all types, about three minutes on two cores python -m
    benchmarks.model_types llama phi3 opt    # these python -m benchmarks.model_types --record          # all, into
    benchmarks/model_types.csv, which docs/support.md shows python -m benchmarks.model_types --composite       # classes
    that take images, on text alone
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    __version__,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from lightning_fastft.core.errors import FastFTError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import ADVICE, check_servable
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.context import ONE_BY_ONE
from lightning_fastft.patches.head import STATUS_NAME as HEAD_STATUS
from lightning_fastft.patches.lazy_logits import LazyLogits
from lightning_fastft.patches.packed import install_packed_training

VOCABULARY = 131
LENGTHS = (7, 1, 12, 9)
BOUND = 2e-4
MOST_PARAMETERS = 20_000_000
FAULTS = ("wrong", "raw")
RECORD = Path(__file__).with_suffix(".csv")
RECORDED = ("model_type", "outcome", "attention", "error", "reason", "transformers")
# Sizes of a tiny model by the names in configurations; each configuration gets only the names that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "vocab_size",
            "text_vocab_size",
            "vocab_size_per_layer_input",
            "unpadded_vocab_size",
            "pronunciation_vocab_size",
            "shape_vocab_size",
        ),
        VOCABULARY,
    ),
    # Heads of gated delta rules.
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "dim",
            "word_embed_proj_dim",
            "decoder_hidden_size",
            "embedding_size",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "ffn_hidden_size",
            "n_inner",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "intermediate_size_mlp",
            "mlp_dim",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        24,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers", "depth"), 2
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads", "n_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_source_positions"), 256
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_top_k"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "head_dim", "kv_channels"), 16),
    **dict.fromkeys(
        ("mamba_d_state", "state_size", "mamba_d_head", "mamba_head_dim", "ssm_state_size", "mamba_expand_dim"), 8
    ),
    "qk_rope_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 5,
    "attention_window_size": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION_SIZES: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers"), 1),
    "image_size": 28,
    "patch_size": 14,
    "num_key_value_heads": 4,
    "out_hidden_size": 64,
}
VISION_PARTS = ("vision", "audio", "vq", "image", "qformer", "perceiver", "encoder", "projector")
# Keeps the size of the configuration.
DEFAULT = object()
# Some families require relations between these sizes: the second and later attempts.
ALTERNATIVES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 4, "sliding_window": None},
    {"head_dim": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 8},
    {"head_dim": 16, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    {"head_dim": DEFAULT},
    {"head_dim": DEFAULT, "num_attention_heads": DEFAULT, "num_key_value_heads": DEFAULT, "sliding_window": DEFAULT},
    {"head_dim": DEFAULT, "qk_rope_head_dim": 16, "num_key_value_heads": 4},
    {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    {"head_dim": 16, "num_experts": 4, "layer_types": DEFAULT, "num_hidden_layers": 6},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 6, "num_key_value_heads": 4},
)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 32, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_chunk_size": 4}
# Options of single types, or without a default there.
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "mamba2": {"num_heads": 16, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    # The layers in the middle run twice.
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1, "moe_router_topk": 1},
    "bamba": {**MAMBA, "attn_layer_indices": [1], "num_key_value_heads": 2, "head_dim": 16},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 48,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
}


class Outcome(NamedTuple):
    """Result of one type: the outcome, its message, the larger of the two relative errors, and the choice of
    ``attention=`` that was exact.
    """

    model_type: str
    outcome: str
    detail: str
    error: float = 0.0
    attention: str = ""


def build_config(model_type: str, changes: dict[str, Any]) -> Any:
    """Return a tiny configuration of a type, its parts included."""
    return _tiny_config(CONFIG_MAPPING[model_type], SIZES, changes)


def _tiny_config(config_class: Any, sizes: dict[str, Any], changes: dict[str, Any]) -> Any:
    default = config_class()
    changes = {**changes, **SPECIAL.get(default.model_type, {})}
    values = {name: value for name, value in sizes.items() if _has(default, name)}
    values = {name: value for name, value in values.items() if changes.get(name) is not DEFAULT}
    given = {name: value for name, value in changes.items() if value is not DEFAULT}
    values |= {
        name: value
        for name, value in given.items()
        if name in vars(default) or name in getattr(default, "attribute_map", {})
    }
    values |= {name: 0.0 for name, value in vars(default).items() if "drop" in name and isinstance(value, float)}
    if getattr(default, "is_decoder", None) is False:
        values["is_decoder"] = True
    for name, part_class in default.sub_configs.items():
        part = getattr(default, name, None)
        if part is not None:
            part_sizes = VISION_SIZES if any(word in name for word in VISION_PARTS) else sizes
            is_tower = part_sizes is VISION_SIZES
            part_changes = {key: value for key, value in changes.items() if not (is_tower and key == "rope_parameters")}
            values[name] = _tiny_config(
                type(part) if part_class.__name__ == "AutoConfig" else part_class, part_sizes, part_changes
            )
    return config_class(**values)


def _has(config: Any, name: str) -> bool:
    own_name = getattr(config, "attribute_map", {}).get(name, name)
    return vars(config).get(own_name) is not None or (name == "sliding_window" and name in vars(config))


def build_model(model_type: str, *, is_composite: bool = False) -> PreTrainedModel | str:
    """Return a tiny model that runs a document alone, or why none could be built."""
    reason = ""
    auto = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    for changes in ALTERNATIVES:
        for implementation in ("eager", None):
            torch.manual_seed(0)
            try:
                config = build_config(model_type, changes)
                options = {"attn_implementation": implementation} if implementation else {}
                with torch.device("meta"):
                    num_parameters = auto.from_config(copy.deepcopy(config), **options).num_parameters()
                if num_parameters > MOST_PARAMETERS:
                    reason = f"{num_parameters / 1e6:.0f} million parameters with the sizes that are known here"
                    break
                model = auto.from_config(config, **options).float().eval()
                _draw_weights(model)
                with torch.no_grad():
                    output = model(input_ids=torch.arange(3, 9)[None], use_cache=False)
                if not output.logits.isfinite().all():
                    reason = reason or "logits are not finite"
                    continue
                return model
            # Any error of a foreign constructor or forward is the reason why the model is not compared.
            except Exception as error:  # noqa: BLE001
                reason = (
                    reason
                    or f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                )
    return reason


def find_refusal(model_type: str, *, is_composite: bool) -> str:
    """Return why a type is refused at its default sizes on the meta device; empty if it is not, or cannot be built."""
    auto = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    try:
        config = CONFIG_MAPPING[model_type]()
        with torch.device("meta"):
            check_servable(auto.from_config(config))
    except FastFTError as error:
        return f"{type(error).__name__}: {error}"
    # An error of a foreign constructor is no statement about packing.
    except Exception:  # noqa: BLE001
        return ""
    return ""


def _draw_weights(model: PreTrainedModel) -> None:
    """Make weights so large that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)


def draw_batch() -> tuple[PackedBatch, list[Document]]:
    """Return a packed batch and its documents, the same in every call."""
    generator = np.random.default_rng(0)
    documents = []
    for length in LENGTHS:
        ids = generator.integers(3, VOCABULARY, length)
        documents.append(Document(ids, np.where(generator.random(length) < 0.7, ids, -100)))
    return collate(documents), documents


def compare_all(model_type: str, model: PreTrainedModel) -> Outcome:
    """Return the result of a model on packed documents: packed, or one by one if that is refused."""
    packed = compare(model_type, model)
    if packed.outcome != "refused":
        return packed
    alone = compare(model_type, model, attention=ONE_BY_ONE)
    if alone.outcome == "refused":
        return packed._replace(detail=f"{packed.detail} One by one: {alone.detail}")
    return alone._replace(detail=packed.detail if alone.outcome == "exact" else alone.detail)


def compare(model_type: str, model: PreTrainedModel, *, attention: str = "auto") -> Outcome:
    """Return the result of a model on packed documents."""
    (batch, documents), patcher = draw_batch(), ModelPatcher()
    try:
        installation = install_packed_training(model, patcher, attention=attention)
        statuses = installation.statuses
        for check in installation.checks:
            check()
        model.zero_grad()
        output = model(**batch)
        if batch.context.num_reads == 0:
            # A run raises ContextError here, before the backward.
            return Outcome(model_type, "refused", "ContextError: no attention layer read the context")
        output.loss.backward()
        is_lazy = any(status.name == HEAD_STATUS and status.state == "active" for status in statuses)
        logits = vars(output).get("logits")
        claim = (
            ""
            if not is_lazy or (isinstance(logits, LazyLogits) and logits._tensor is None)
            else "claims a lazy head, forms full logits"
        )
    except FastFTError as error:
        return Outcome(model_type, "refused", f"{type(error).__name__}: {error}")
    # Any other error is a fault that this script looks for.
    except Exception as error:  # noqa: BLE001
        return Outcome(
            model_type,
            "raw",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
        )
    finally:
        patcher.undo()
    packed_loss, packed = output.loss.detach(), _take_gradients(model)
    loss = torch.zeros(())
    for document in documents:
        logits_of_one = model(input_ids=torch.as_tensor(document.input_ids)[None], use_cache=False).logits[0]
        label_T = torch.as_tensor(document.labels)
        of_one = (
            torch.nn.functional.cross_entropy(
                logits_of_one[:-1].float(), label_T[1:], reduction="sum", ignore_index=-100
            )
            / batch.context.num_items
        )
        if of_one.requires_grad:
            of_one.backward()
        loss += of_one.detach()
    truth = _take_gradients(model)
    difference = (
        sum(float((packed.get(name, 0.0) - gradient).double().square().sum()) for name, gradient in truth.items())
        ** 0.5
    )
    norm = sum(float(gradient.double().square().sum()) for gradient in truth.values()) ** 0.5
    error = max(abs(float(packed_loss - loss)) / float(loss), difference / max(norm, 1e-30))
    detail = f"{batch.context.num_reads} reads"
    if claim:
        return Outcome(model_type, "wrong", claim, error)
    return Outcome(model_type, "exact" if error <= BOUND else "wrong", detail, error, attention)


def _take_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def examine(model_type: str, *, is_composite: bool = False) -> Outcome:
    """Return the outcome of a type."""
    model = build_model(model_type, is_composite=is_composite)
    if isinstance(model, PreTrainedModel):
        return compare_all(model_type, model)
    refusal = find_refusal(model_type, is_composite=is_composite)
    return Outcome(model_type, "refused" if refusal else "not built", refusal or model)


def sweep(model_types: Iterable[str], *, is_composite: bool = False) -> list[Outcome]:
    """Return the outcome of each type."""
    outcomes = []
    for model_type in model_types:
        outcomes.append(examine(model_type, is_composite=is_composite))
        gc.collect()
        sys.stderr.write(
            f"{outcomes[-1].model_type}: {outcomes[-1].outcome} {outcomes[-1].error:.1e} {outcomes[-1].attention} "
            f"{outcomes[-1].detail}\n"
        )
        sys.stderr.flush()
    return outcomes


def record(outcomes: Iterable[Outcome], place: Path = RECORD) -> None:
    """Write outcomes into the recorded table, replacing earlier ones of the same types."""
    rows = {row["model_type"]: row for row in read_record(place)} if place.exists() else {}
    for outcome in outcomes:
        reason = "" if outcome.attention == "auto" else _shorten(outcome.detail)
        values = (outcome.model_type, outcome.outcome, outcome.attention, f"{outcome.error:.1e}", reason, __version__)
        rows[outcome.model_type] = dict(zip(RECORDED, values))
    with place.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, RECORDED, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[model_type] for model_type in sorted(rows))


def read_record(place: Path = RECORD) -> list[dict[str, str]]:
    """Return the recorded table."""
    with place.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _shorten(detail: str) -> str:
    """Return the reason of a refusal without the sentences around it."""
    reason = detail.partition("documents: ")[2] or detail.partition("): ")[2] or detail.partition(": ")[2] or detail
    return reason.partition(f" {ADVICE}")[0].rstrip(". ")


def main() -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="types to compare; all if none is given")
    parser.add_argument("--composite", action="store_true", help="classes that take images, with text alone")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    every = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if arguments.composite else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    outcomes = sweep(arguments.model_types or sorted(every), is_composite=arguments.composite)
    csv.writer(sys.stdout).writerows([Outcome._fields, *outcomes])
    if arguments.record:
        record(outcomes)
    totals = Counter(outcome.outcome for outcome in outcomes)
    sys.stderr.write(", ".join(f"{number} {name}" for name, number in totals.most_common()) + "\n")
    return int(any(totals[fault] for fault in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
