"""Workloads: models by configuration, packs from the seeded list of lengths, and the files that every system reads.

``python -m benchmarks.train_step build`` writes one folder per workload (random weights, a word tokenizer, non-zero
adapters, the token file); the arms only read it.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ruler.tensors import TensorFiles

LENGTHS_PATH = Path(__file__).parents[1] / "lengths" / "lognormal_mean512.json"
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The wide projections of gated delta layers; the two that give a number per head stay frozen.
MIXER_MODULES = ("in_proj_qkv", "in_proj_z", "out_proj")
# In mixture models: adapters on attention, and on the stacks of expert weights. PEFT names the wrapper of the first
# stack after the one around it.
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = {"base_layer.": "gate_up_proj", "": "down_proj"}
IGNORED_LABEL = -100
# Documents shorter than this are not cut off at the end of a pack; the document before them grows instead.
SHORTEST_DOCUMENT = 16
# The word tokenizer knows this many words, so token ids stay below it for every model.
TOKENIZER_WORDS = 8000
# Ids below this are the tokenizer's own (pad, start, end, unknown): no document has them.
FIRST_WORD = 4
# An adapter adds about 3 % to its layer's output (0.6 of this): as after some hundred steps, and far from zero, so that
# A has a gradient.
ADAPTER_SHARE = 0.05
# What the branches of all layers together add to the residual stream, and the size of what enters a gate: see
# _condition.
BRANCH_SHARE = 0.3
GATE_STD = 0.7
# Mixture models: every token id carries the directions of its experts in its embedding, this strong, where nothing else
# of it lies, and routers read them with this gain. With random routers two correct bf16 systems choose another last
# expert for 2 to 7 % of the tokens of a layer, and cosines fall to 0.995 (CPU, 12 layers, 128 experts); so, both choose
# the same. With a lower gain a system that drops the routers' gradient would pass the judge.
EXPERT_CODES = (2.0, 3.5)
ROUTER_GAIN = 1.2
# Tokens on which routers are measured.
NUM_ROUTED_TOKENS = 2048


@dataclass(frozen=True)
class Workload:
    """One model and one kind of pack.

    Args:
        name: As on the command line.
        model_type: Hugging Face's name of the family.
        model_config: Arguments of its configuration.
        quantization: "nf4" for QLoRA, None for bf16 weights.
        max_tokens: Tokens of a pack.
        length_divisor: Document lengths of the list are divided by this (1 except in CPU tests).
        num_packs: Packs in the token file; a run that needs more starts again.
        weights_of: Workload whose model and adapters this one trains, on packs of its own; None for its own.
        is_skewed: Whether half of the rows go to a tenth of the experts.
        document_lengths: Documents of every pack; None takes them from the stored list.
        is_full: Whether all weights are trained, without adapters.
        more_targets: Linear layers that get an adapter besides the usual ones.
    """

    name: str
    model_type: str
    model_config: dict[str, Any] = field(hash=False)
    quantization: str | None
    max_tokens: int = 8192
    length_divisor: int = 1
    num_packs: int = 48
    lora_rank: int = 16
    lora_alpha: int = 16
    weights_of: str | None = None
    is_skewed: bool = False
    document_lengths: tuple[int, ...] | None = None
    is_full: bool = False
    more_targets: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 in a dense model."""
        return int(self.model_config.get("num_experts", self.model_config.get("num_local_experts", 0)))

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers are gated delta rules."""
        return "linear_num_value_heads" in self.model_config

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Linear layers that get an adapter, by the last part of their names."""
        return (*(ATTENTION_MODULES if self.num_experts else TARGET_MODULES), *self.more_targets)


def _qwen3(*, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


_QWEN3_14B = _qwen3(hidden=5120, inner=17_408, layers=40, heads=40, kv_heads=8, tied=False)
_QWEN3_8B = _qwen3(hidden=4096, inner=12_288, layers=36, heads=32, kv_heads=8, tied=False)
_QWEN3_32B = _qwen3(hidden=5120, inner=25_600, layers=64, heads=64, kv_heads=8, tied=False)
_QWEN3_06B = _qwen3(hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, tied=True)
_LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
_LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_70B = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def _qwen3_moe(*, layers: int) -> dict[str, Any]:
    return {
        **_qwen3(hidden=2048, inner=6144, layers=layers, heads=32, kv_heads=4, tied=False),
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    }  # fmt: skip


def _gpt_oss(*, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    }


def _qwen3_5(*, hidden: int, layers: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """Qwen3.5: three gated delta layers, then one of attention with a gate."""
    return {
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        **others,
    }


_QWEN35_9B = _qwen3_5(hidden=4096, layers=32, kv_heads=4, intermediate_size=12_288)
_QWEN35_35B_12L = _qwen3_5(
    hidden=2048,
    layers=12,
    kv_heads=2,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
_TINY_QWEN35 = {
    **_qwen3_5(hidden=64, layers=4, kv_heads=2, intermediate_size=128),
    "vocab_size": 160,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}
# Five windows, then one global layer of wide heads; the last layers share keys and values of earlier ones.
_GEMMA4_E4B = {
    "vocab_size": 262_144,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 18,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_TINY_GEMMA4 = {
    **_GEMMA4_E4B,
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 160,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_TINY_MOE = {**_TINY, "moe_intermediate_size": 24, "num_experts": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_TINY_GPT_OSS = {
    **{key: value for key, value in _TINY.items() if key != "rope_parameters"},
    "intermediate_size": 48, "num_local_experts": 32, "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip


def _with_routings(name: str, model_type: str, config: dict[str, Any]) -> list[Workload]:
    """A mixture workload at 8,192 tokens, its packs of 16,384, the same two with skewed routing, which are a
    model of their own, and one in NF4.
    """
    found = []
    for title, is_skewed in ((name, False), (f"{name}-skewed", True)):
        found.append(Workload(title, model_type, config, None, is_skewed=is_skewed))
        found.append(
            Workload(
                f"{title}-16k",
                model_type,
                config,
                None,
                max_tokens=16_384,
                num_packs=24,
                weights_of=title,
                is_skewed=is_skewed,
            )
        )
    return [*found, Workload(name.replace("-lora", "-qlora"), model_type, config, "nf4", weights_of=name)]


# Packs of other lengths on the same weights: name of the suffix, tokens, packs that the stored list of documents fills.
_LONGER = (("16k", 16_384, 24), ("32k", 32_768, 12), ("48k", 49_152, 8))


def _with_longer(name: str, config: dict[str, Any], quantization: str | None) -> list[Workload]:
    """The workload at 8,192 tokens, and those with longer packs that share its weights."""
    longer = [
        Workload(
            f"{name}-{suffix}",
            "qwen3",
            config,
            quantization,
            max_tokens=max_tokens,
            num_packs=num_packs,
            weights_of=name,
        )
        for suffix, max_tokens, num_packs in _LONGER
    ]
    return [Workload(name, "qwen3", config, quantization), *longer]


def _llama_8b() -> list[Workload]:
    """Llama-3.1-8B on packs of 32,768 tokens: three long documents, and one."""
    three = Workload(
        "llama-3.1-8b-lora-32k",
        "llama",
        _LLAMA_8B,
        None,
        max_tokens=32_768,
        num_packs=12,
        document_lengths=(16_384, 8192, 8192),
    )
    return [three, replace(three, name=f"{three.name}-one-document", document_lengths=(32_768,), weights_of=three.name)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        *_with_longer("qwen3-14b-qlora", _QWEN3_14B, "nf4"),
        *_with_longer("qwen3-8b-qlora", _QWEN3_8B, "nf4"),
        *_with_longer("qwen3-32b-qlora", _QWEN3_32B, "nf4"),
        Workload("qwen3-8b-lora", "qwen3", _QWEN3_8B, None),
        Workload("qwen3-8b-full", "qwen3", _QWEN3_8B, None, weights_of="qwen3-8b-lora", is_full=True),
        Workload("qwen3-0.6b-lora", "qwen3", _QWEN3_06B, None),
        Workload("qwen3-0.6b-full", "qwen3", _QWEN3_06B, None, weights_of="qwen3-0.6b-lora", is_full=True),
        Workload("llama-3.2-1b-lora", "llama", _LLAMA_1B, None),
        *_llama_8b(),
        Workload("llama-3.3-70b-qlora", "llama", _LLAMA_70B, "nf4"),
        *_with_routings("qwen3-30b-a3b-12l-lora", "qwen3_moe", _qwen3_moe(layers=12)),
        *_with_routings("qwen3-30b-a3b-lora", "qwen3_moe", _qwen3_moe(layers=48)),
        *_with_routings("gpt-oss-20b-12l-lora", "gpt_oss", _gpt_oss(layers=12)),
        *_with_routings("gpt-oss-20b-lora", "gpt_oss", _gpt_oss(layers=24)),
        Workload("qwen3.5-9b-lora", "qwen3_5_text", _QWEN35_9B, None, more_targets=MIXER_MODULES),
        # What Unsloth adapts: nothing in gated delta layers but their feed-forward blocks.
        Workload("qwen3.5-9b-usual-lora", "qwen3_5_text", _QWEN35_9B, None),
        Workload("qwen3.5-9b-full", "qwen3_5_text", _QWEN35_9B, None, weights_of="qwen3.5-9b-lora", is_full=True),
        Workload("gemma-4-e4b-lora", "gemma4_text", _GEMMA4_E4B, None),
        Workload("qwen3.5-35b-a3b-12l-lora", "qwen3_5_moe_text", _QWEN35_35B_12L, None, more_targets=MIXER_MODULES),
        *(
            Workload(
                f"{name}{'-skewed' if is_skewed else ''}",
                model_type,
                config,
                None,
                max_tokens=256,
                length_divisor=16,
                num_packs=8,
                lora_rank=4,
                lora_alpha=4,
                is_skewed=is_skewed,
            )
            for name, model_type, config in (
                ("tiny-moe", "qwen3_moe", _TINY_MOE),
                ("tiny-gpt-oss", "gpt_oss", _TINY_GPT_OSS),
            )
            for is_skewed in (False, True)
        ),
        Workload(
            "tiny-moe-qlora",
            "qwen3_moe",
            _TINY_MOE,
            "nf4",
            max_tokens=256,
            length_divisor=16,
            num_packs=8,
            lora_rank=4,
            lora_alpha=4,
            weights_of="tiny-moe",
        ),
        Workload(
            "tiny", "qwen3", _TINY, None, max_tokens=256, length_divisor=16, num_packs=8, lora_rank=4, lora_alpha=4
        ),
        Workload(
            "tiny-long",
            "qwen3",
            _TINY,
            None,
            max_tokens=512,
            length_divisor=16,
            num_packs=6,
            lora_rank=4,
            lora_alpha=4,
            weights_of="tiny",
        ),
        Workload(
            "tiny-qwen3.5",
            "qwen3_5_text",
            _TINY_QWEN35,
            None,
            max_tokens=256,
            length_divisor=16,
            num_packs=8,
            lora_rank=4,
            lora_alpha=4,
            more_targets=MIXER_MODULES,
        ),
        Workload(
            "tiny-gemma4",
            "gemma4_text",
            _TINY_GEMMA4,
            None,
            max_tokens=256,
            length_divisor=16,
            num_packs=8,
            lora_rank=4,
            lora_alpha=4,
        ),
        Workload(
            "tiny-full",
            "qwen3",
            _TINY,
            None,
            max_tokens=256,
            length_divisor=16,
            num_packs=8,
            weights_of="tiny",
            is_full=True,
        ),
        Workload(
            "tiny-qlora",
            "qwen3",
            _TINY,
            "nf4",
            max_tokens=256,
            length_divisor=16,
            num_packs=8,
            lora_rank=4,
            lora_alpha=4,
        ),
    )
}


def num_weights(config: dict[str, Any]) -> int:
    """Return about how many weights a dense model of this configuration has; norms are left out.

    Example:
        >>> round(num_weights(_QWEN3_14B) / 1e9, 1)
        14.8
    """
    width, head = config["hidden_size"], config["head_dim"]
    attention = 2 * width * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = attention + 3 * width * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + config["vocab_size"] * width * (
        1 if config["tie_word_embeddings"] else 2
    )


class Pack:
    """One packed micro-batch as every system receives it: token ids and document lengths; labels follow from the label
    share.

    Args:
        input_id_T: Token ids, shape (T,), int64.
        lengths: Tokens of each document, in order; they add up to T.
    """

    def __init__(self, *, input_id_T: np.ndarray, lengths: Sequence[int]) -> None:
        self.input_id_T = input_id_T
        self.lengths = [int(length) for length in lengths]

    def label_T(self, share: float) -> np.ndarray:
        """Return unshifted labels: the last share of every document, never its first token, at least one token
        where it has two.
        """
        label_T = np.full(self.input_id_T.shape, IGNORED_LABEL, dtype=np.int64)
        for start, end in self.borders():
            num_labelled = num_labelled_tokens(end - start, share=share)
            label_T[end - num_labelled : end] = self.input_id_T[end - num_labelled : end]
        return label_T

    def position_T(self) -> np.ndarray:
        """Return positions that restart with every document."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    def borders(self) -> list[tuple[int, int]]:
        """Return start and end of every document."""
        ends = np.cumsum(self.lengths).tolist()
        return [(end - length, end) for end, length in zip(ends, self.lengths)]

    def documents(self, share: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, labels) of every document."""
        label_T = self.label_T(share)
        return [(self.input_id_T[start:end], label_T[start:end]) for start, end in self.borders()]


def num_labelled_tokens(length: int, *, share: float) -> int:
    """Return how many tokens at the end of a document are trained."""
    return 0 if length < 2 else min(length - 1, max(1, round(share * length)))


def generate_lengths(num_documents: int, *, seed: int, mean: int, sigma: float, low: int, high: int) -> list[int]:
    """Return log-normal document lengths with that mean before clipping; the stored list was made by this."""
    source = random.Random(seed)
    log_mean = math.log(mean) - 0.5 * sigma * sigma
    return [min(high, max(low, int(source.lognormvariate(log_mean, sigma)))) for _ in range(num_documents)]


def read_lengths(path: Path = LENGTHS_PATH) -> dict[str, Any]:
    """Return the stored list with the arguments it was generated by."""
    return json.loads(path.read_text(encoding="utf-8"))


def plan_packs(lengths: Sequence[int], *, max_tokens: int, num_packs: int) -> list[list[int]]:
    """Fill packs to exactly max_tokens in the order of the list; the last document of a pack is cut or stretched to
    fit.

    Raises:
        ValueError: The list does not fill num_packs.
    """
    packs: list[list[int]] = []
    current: list[int] = []
    for length in lengths:
        room = max_tokens - sum(current)
        taken = min(length, room)
        if room - taken < min(SHORTEST_DOCUMENT, max_tokens):
            taken = room
        current.append(taken)
        if sum(current) == max_tokens:
            packs.append(current)
            current = []
        if len(packs) == num_packs:
            return packs
    raise ValueError(
        f"{len(lengths)} lengths fill {len(packs)} packs of {max_tokens} tokens, {num_packs} were asked for."
    )


def make_packs(workload: Workload) -> list[Pack]:
    """Return the packs of a workload; the same on every machine."""
    if workload.document_lengths is not None:
        plans = [list(workload.document_lengths)] * workload.num_packs
    else:
        lengths = [max(2, length // workload.length_divisor) for length in read_lengths()["lengths"]]
        # The list is repeated where packs need more documents; token ids are new in every pack.
        lengths *= 1 + workload.num_packs * workload.max_tokens // sum(lengths)
        plans = plan_packs(lengths, max_tokens=workload.max_tokens, num_packs=workload.num_packs)
    highest = min(workload.model_config["vocab_size"], TOKENIZER_WORDS)
    return [
        Pack(
            input_id_T=np.random.default_rng([7, number]).integers(
                FIRST_WORD, highest, size=workload.max_tokens, dtype=np.int64
            ),
            lengths=plan,
        )
        for number, plan in enumerate(plans)
    ]


class WorkloadFiles:
    """The folder of a built workload.

    Args:
        root: Folder that holds one subfolder per workload, /dev/shm/... on the GPU machine.
        workload: Which one.
    """

    def __init__(self, root: Path, workload: Workload) -> None:
        self.workload = workload
        self.folder = root / workload.name
        weights = root / (workload.weights_of or workload.name)
        self.model = weights / "model"
        self.adapter = weights / "adapter"
        self.routing = weights / "routing.json"
        self.tokens = self.folder / "tokens.safetensors"
        self.done = self.folder / "done.json"

    def reference(self, share: float) -> Path:
        """Where the plain arm leaves its gradients for this label share."""
        return self.folder / f"reference_gradients_{share:g}.safetensors"

    def is_built(self) -> bool:
        """Whether build has finished here, with this very workload and the weights it shares."""
        is_done = self.done.exists() and json.loads(self.done.read_text()) == _fingerprint(self.workload)
        return is_done and self.model.exists()

    def read_packs(self) -> list[Pack]:
        """Return the packs of the token file."""
        from safetensors.numpy import load_file

        arrays = load_file(self.tokens)
        length_rows = np.split(arrays["length_D"], np.cumsum(arrays["num_documents_P"])[:-1])
        return [Pack(input_id_T=ids, lengths=lengths) for ids, lengths in zip(arrays["input_id_PT"], length_rows)]

    def read_adapter(self) -> dict[str, torch.Tensor]:
        """Return the adapter tensors by their names in the PEFT file, fp32 on the CPU."""
        from safetensors.torch import load_file

        return load_file(self.adapter / "adapter_model.safetensors")

    def read_trained(self) -> Mapping[str, torch.Tensor]:
        """Return what every case starts from by the names of its files: the adapter, or all weights, each read
        when it is asked for.
        """
        return TensorFiles(sorted(self.model.glob("*.safetensors"))) if self.workload.is_full else self.read_adapter()


def build(workload: Workload, *, root: Path, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Write the folder of a workload, once, and return what took how many seconds.

    Args:
        workload: What to build.
        root: Where; needs the size of the bf16 weights.
        device: Where random weights are drawn.
        dtype: Dtype of the weights: bf16, or fp32 for CPU runs.
    """
    files = WorkloadFiles(root, workload)
    if files.is_built():
        return {"seconds": 0.0}
    files.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if workload.weights_of is not None:
        seconds = build(WORKLOADS[workload.weights_of], root=root, device=device, dtype=dtype)
        _write_tokens(files)
        files.done.write_text(json.dumps(_fingerprint(workload)))
        return {**seconds, "seconds": time.perf_counter() - start}
    shapes = _write_model(files, device=device, dtype=dtype)
    model_seconds = time.perf_counter() - start
    _write_tokenizer(files)
    if not workload.is_full:
        _write_adapter(files, shapes)
    _write_tokens(files)
    files.done.write_text(json.dumps(_fingerprint(workload)))
    return {"seconds": time.perf_counter() - start, "model_seconds": model_seconds}


def _fingerprint(workload: Workload) -> dict[str, Any]:
    fields = vars(workload)
    # What was built before there were these fields stays what it is.
    for name in ("is_full", "more_targets"):
        if not getattr(workload, name):
            fields = {key: value for key, value in fields.items() if key != name}
    return json.loads(
        json.dumps({**fields, "shares": [ADAPTER_SHARE, BRANCH_SHARE, GATE_STD, *EXPERT_CODES, ROUTER_GAIN]})
    )


def _write_model(files: WorkloadFiles, *, device: str, dtype: torch.dtype) -> dict[str, tuple[int, int, float]]:
    """Draw random weights and save them; return rows, columns and standard deviation of every adapted weight by
    its name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(files.workload.model_type, **files.workload.model_config)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _condition(model, tied=bool(files.workload.model_config["tie_word_embeddings"]))
    if files.workload.num_experts:
        _write_routes(model, is_skewed=files.workload.is_skewed)
        files.routing.write_text(json.dumps(_measure_routing(model, make_packs(files.workload)[0])))
    model.save_pretrained(files.model, max_shard_size="6GB")
    if files.workload.num_experts:
        return _mixture_shapes(model, files.workload)
    return {
        name: (*module.weight.shape, float(module.weight.detach().float().std()))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in files.workload.target_modules
    }  # fmt: skip


@torch.no_grad()
def _condition(model: Any, *, tied: bool) -> None:
    """Scale random weights so that signals and gradients keep their size through the layers, as they do in a trained
    model.

    With a library's default initialisation the branches swamp the residual stream, and rounding grows from layer to
    layer: two correct bf16 systems then have cosines of 0.997 to 0.998 in a deep model, and no judge could tell a fault
    from noise. Scaled so, the same two agree to 0.9997 (tried on CPU with 16 to 40 layers). Thresholds stay what they
    are.
    """
    stream = float(model.config.initializer_range) if tied else 1.0
    if hasattr(model.model.layers[0], "post_feedforward_layernorm"):
        _condition_norms(model)
        return
    _set_std(model.model.embed_tokens, stream)
    if not tied:
        _set_std(model.lm_head, model.config.hidden_size**-0.5)
    branch = stream * BRANCH_SHARE / math.sqrt(2 * len(model.model.layers))
    for layer in model.model.layers:
        mlp = layer.mlp
        gains = _mixer_gains(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, branch=branch)
        if hasattr(mlp, "experts"):
            _condition_experts(layer, branch=branch)
        dense = getattr(mlp, "shared_expert", None) if hasattr(mlp, "experts") else mlp
        if dense is not None:
            # silu(gate) * up has 0.6 of its inputs' squares.
            gains += [(dense.gate_proj, GATE_STD), (dense.up_proj, GATE_STD)]
            gains += [(dense.down_proj, branch / (0.6 * GATE_STD**2))]
        for linear, gain in gains:
            _set_std(linear, gain / math.sqrt(linear.in_features))


def _condition_norms(model: Any) -> None:
    """Scale a model whose branches end in norms (Gemma): these set the size of what is added, and heads are normed."""
    # Embeddings are multiplied by the root of the width.
    _set_std(model.model.embed_tokens, model.config.hidden_size**-0.5)
    branch = BRANCH_SHARE / math.sqrt(3 * len(model.model.layers))
    for layer in model.model.layers:
        for name, norm in layer.named_children():
            if name.startswith("post_") and name.endswith("norm"):
                norm.weight.fill_(branch)
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (attention.q_norm, getattr(attention, "k_norm", None)):
            if norm is not None:
                # Scores are products of heads, without a scale.
                norm.weight.fill_(norm.weight.shape[0] ** -0.25)
        for linear in (mlp.gate_proj, mlp.up_proj):
            _set_std(linear, GATE_STD / math.sqrt(linear.in_features))


def _mixer_gains(mixer: Any, *, branch: float) -> list[tuple[Any, float]]:
    """Return the projections of attention, or of the gated delta layer in its place, with the size of their outputs."""
    if hasattr(mixer, "in_proj_qkv"):
        # The output is normed and multiplied with silu(z), which has 0.6 of the size of z.
        inputs = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        return [*((linear, 1.0) for linear in inputs), (mixer.out_proj, branch / 0.6)]
    # Attention averages values, so its output is smaller than its input; 2 makes up for some of it.
    inputs = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    return [*((linear, 1.0) for linear in inputs), (mixer.o_proj, 2.0 * branch)]


def _set_std(module: torch.nn.Module, std: float) -> None:
    module.weight.mul_(std / module.weight.float().std())


def _condition_experts(layer: Any, *, branch: float) -> None:
    """Scale the expert stacks of one layer; draw what gpt-oss adds (biases, sinks), so that nothing is zero that
    a system could drop.
    """
    mlp, is_gpt_oss = layer.mlp, hasattr(layer.mlp, "router")
    router, experts = _router(mlp), mlp.experts
    # gpt-oss stores (experts, inputs, outputs), and its gate, (up + 1) * gate * sigmoid(1.7 gate), has 0.55 where
    # silu(gate) * up has 0.6 of squares.
    num_inner = experts.down_proj.shape[1 if is_gpt_oss else 2]
    inner = 0.55 if is_gpt_oss else 0.6 * GATE_STD**2
    experts.gate_up_proj.normal_(std=GATE_STD * router.weight.shape[1] ** -0.5)
    # A weighted mean of experts is smaller than each of them: 1.5 makes up for it.
    experts.down_proj.normal_(std=1.5 * branch / inner * num_inner**-0.5)
    if is_gpt_oss:
        router.bias.normal_(std=0.1)
        experts.gate_up_proj_bias.normal_(std=0.1 * GATE_STD)
        experts.down_proj_bias.normal_(std=0.1 * branch)
        attention = layer.self_attn
        attention.sinks.normal_()
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.bias.normal_(std=0.1)
        attention.o_proj.bias.normal_(std=0.1 * branch)


def _router(mlp: Any) -> Any:
    return mlp.router if hasattr(mlp, "router") else mlp.gate


@torch.no_grad()
def _write_routes(model: Any, *, is_skewed: bool) -> None:
    """Give every token id its experts: their directions in its embedding, and routers that read them, each layer with
    other experts for them.

    Experts are drawn evenly, or half of each token's from a tenth of the experts.
    """
    generator = torch.Generator().manual_seed(13)
    routers = [_router(layer.mlp) for layer in model.model.layers]
    table = model.model.embed_tokens.weight
    num_experts, num_chosen, width = routers[0].num_experts, routers[0].top_k, table.shape[1]
    num_words = min(TOKENIZER_WORDS, table.shape[0])
    score = torch.rand(num_words, num_experts, generator=generator)
    if is_skewed:
        # Every token has as many of the busy experts as of the others.
        busy = num_busy(num_experts)
        parts = (
            score[:, :busy].topk(num_chosen // 2).indices,
            score[:, busy:].topk(num_chosen - num_chosen // 2).indices + busy,
        )
        expert_WK = torch.cat(parts, dim=1)
    else:
        expert_WK = score.topk(num_chosen).indices
    # In an order of its own, so that the weights of busy experts are not the small ones.
    expert_WK = expert_WK.gather(1, torch.rand(expert_WK.shape, generator=generator).argsort(dim=1))
    direction_ED = (
        torch.linalg.qr(torch.randn(width, num_experts, generator=generator)).Q.T.contiguous().to(table.device)
    )
    direction_DE = direction_ED.T.to(table.dtype)
    table -= table @ direction_DE @ direction_DE.T
    for strength, expert_W in zip(torch.linspace(*EXPERT_CODES, num_chosen).tolist(), expert_WK.unbind(dim=1)):
        table[:num_words] += (strength * direction_ED[expert_W.to(table.device)]).to(table.dtype)
    for number, router in enumerate(routers):
        router.weight.copy_(ROUTER_GAIN * direction_ED.roll(7 * number, dims=0))


@torch.no_grad()
def _measure_routing(model: Any, pack: Pack) -> dict[str, Any]:
    """Return what the busiest tenth of the experts gets in each layer, on the longest document of a pack."""
    shares: list[float] = []
    handles = [
        _router(layer.mlp).register_forward_hook(
            lambda router, _, outputs: shares.append(busiest_share(outputs[2], router.num_experts))
        )
        for layer in model.model.layers
    ]
    start, end = max(pack.borders(), key=lambda border: border[1] - border[0])
    ids = torch.from_numpy(pack.input_id_T[start:end][:NUM_ROUTED_TOKENS])[None].to(model.device)
    model.model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {
        "busiest_tenth": sum(shares) / len(shares),
        "lowest": min(shares),
        "highest": max(shares),
        "num_tokens": ids.numel(),
    }


def busiest_share(expert_TK: torch.Tensor, num_experts: int) -> float:
    """Return the share of rows that go to the busiest tenth of the experts.

    Example:
        >>> busiest_share(torch.tensor([[0, 1], [0, 2]]), 10)
        0.5
    """
    counts = torch.bincount(expert_TK.reshape(-1), minlength=num_experts)
    return float(counts.topk(num_busy(num_experts)).values.sum() / expert_TK.numel())


def num_busy(num_experts: int) -> int:
    """Return how many experts are a tenth of them."""
    return max(1, num_experts // 10)


def _mixture_shapes(model: Any, workload: Workload) -> dict[str, tuple[int, int, float]]:
    """Return rows and columns of B and A for every adapted weight by the name of its wrapper; stacks count all
    their experts' ranks apart.
    """
    found = {
        name: (*module.weight.shape, float(module.weight.detach().float().std()))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in workload.target_modules
    }
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            for wrapper, parameter in EXPERT_PARAMETERS.items():
                _, rows, columns = (stack := getattr(module, parameter).detach()).shape
                if getattr(module, "is_transposed", False):
                    rows, columns = columns, rows
                found[f"{name}.{wrapper}".rstrip(".")] = (rows, columns, float(stack.float().std()))
    return found


def _write_tokenizer(files: WorkloadFiles) -> None:
    """Write a word tokenizer: peers insist on one, although every system reads token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    num_words = min(TOKENIZER_WORDS, files.workload.model_config["vocab_size"])
    vocabulary.update({f"w{number}": number for number in range(4, num_words)})
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=32_768,
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(files.model)


def _write_adapter(files: WorkloadFiles, shapes: dict[str, tuple[int, int, float]]) -> None:
    """Write non-zero adapters in PEFT's format; values are exact in bf16, so that bf16 and fp32 adapters hold the
    same numbers.
    """
    from safetensors.torch import save_file

    rank, num_experts = files.workload.lora_rank, files.workload.num_experts
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, (num_rows, num_columns, weight_std) in shapes.items():
        num_ranks = rank * num_experts if ".experts" in name else rank
        a = (torch.rand(num_ranks, num_columns, generator=generator) * 2 - 1) / math.sqrt(num_columns)
        b = torch.randn(num_rows, num_ranks, generator=generator) * (
            ADAPTER_SHARE * weight_std * math.sqrt(num_columns / rank)
        )
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16).float()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16).float()
    files.adapter.mkdir(exist_ok=True)
    save_file(tensors, files.adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    lora_config(files.workload).save_pretrained(files.adapter)


def lora_config(workload: Workload) -> Any:
    """Return the LoraConfig that every system is given; None where all weights are trained."""
    if workload.is_full:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=workload.lora_rank,
        lora_alpha=workload.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(workload.target_modules),
        target_parameters=[f"mlp.experts.{name}" for name in EXPERT_PARAMETERS.values()]
        if workload.num_experts
        else None,
        task_type="CAUSAL_LM",
    )


def _write_tokens(files: WorkloadFiles) -> None:
    from safetensors.numpy import save_file

    packs = make_packs(files.workload)
    arrays = {
        "input_id_PT": np.stack([pack.input_id_T for pack in packs]),
        "length_D": np.concatenate([np.asarray(pack.lengths, dtype=np.int64) for pack in packs]),
        "num_documents_P": np.asarray([len(pack.lengths) for pack in packs], dtype=np.int64),
    }
    save_file(arrays, files.tokens)
