"""Workloads: models by configuration, packs from the seeded list of lengths, and the files that every system reads.

``python -m benchmarks.train_step build`` writes one folder per workload (random weights, a word tokenizer, non-zero
adapters, the token file); the arms only read it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ruler.model_configs import (
    GEMMA4_E4B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_8B_6L,
    LLAMA_70B,
    QWEN3_06B,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_14B_10L,
    QWEN3_32B,
    QWEN35_9B,
    QWEN35_35B_12L,
    TINY,
    TINY_GEMMA4,
    TINY_GPT_OSS,
    TINY_MOE,
    TINY_QWEN35,
    TINY_QWEN35_MOE,
    gpt_oss,
    qwen3_moe,
)
from benchmarks.ruler.tensors import TensorFiles

LENGTHS_PATH = Path(__file__).parents[1] / "lengths" / "lognormal_mean512.json"
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The wide projections of gated delta layers; the two with one output per head stay frozen.
MIXER_MODULES = ("in_proj_qkv", "in_proj_z", "out_proj")
# In mixture models adapters are on attention and on the stacks of expert weights. PEFT names the wrapper of the first
# stack after the wrapper around it.
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = {"base_layer.": "gate_up_proj", "": "down_proj"}
IGNORED_LABEL = -100
# A pack does not end in a document shorter than this; the document before it is longer instead.
SHORTEST_DOCUMENT = 16
# Words of the tokenizer; token ids are below this number for every model.
TOKENIZER_WORDS = 8000
# Ids below this are special tokens (pad, start, end, unknown), which no document has.
FIRST_WORD = 4
# An adapter adds about 3 % to its layer's output (0.6 of this), as after some hundred steps. It is far from zero, so
# that A has a gradient.
ADAPTER_SHARE = 0.05
# The sum of all branches in the residual stream, and the size of the input of a gate: see _condition in building.py.
BRANCH_SHARE = 0.3
GATE_STD = 0.7
# Mixture models: the embedding of every token id has the directions of its experts, of this size, in columns that are
# zero otherwise, and routers read them with this gain. With random routers two correct bf16 systems choose another last
# expert for 2 to 7 % of the tokens of a layer, and cosines fall to 0.995 (CPU, 12 layers, 128 experts); with these both
# choose the same experts. With a lower gain a system that drops the routers' gradient would pass the judge.
EXPERT_CODES = (2.0, 3.5)
ROUTER_GAIN = 1.2


@dataclass(frozen=True)
class Workload:
    """One model and one kind of pack.

    Args:
        name: Name on the command line.
        model_type: Hugging Face's name of the family.
        model_config: Arguments of its configuration.
        quantization: "nf4" for QLoRA, None for bf16 weights.
        max_tokens: Tokens of a pack.
        length_divisor: Divisor of the document lengths of the list (1 except in CPU tests).
        num_packs: Packs in the token file; a longer run starts again with changed packs.
        weights_of: Workload whose model and adapters this one trains on its own packs; None for its own model.
        is_skewed: Whether half of the rows go to a tenth of the experts.
        document_lengths: Documents of every pack; None takes them from the stored list.
        is_full: Whether all weights are trained, without adapters.
        more_targets: Linear layers with an adapter in addition to the usual ones.
        learning_rate: Peak learning rate; 0 for that of the ruler.
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
    learning_rate: float = 0.0

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 in a dense model."""
        return int(self.model_config.get("num_experts", self.model_config.get("num_local_experts", 0)))

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have a gated delta rule."""
        return "linear_num_value_heads" in self.model_config

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Linear layers with an adapter, by the last part of their names."""
        return (*(ATTENTION_MODULES if self.num_experts else TARGET_MODULES), *self.more_targets)


def _with_routings(name: str, model_type: str, config: dict[str, Any]) -> list[Workload]:
    """Return a mixture workload at 8,192 tokens, one at 16,384, the same two with skewed routing (another model), and
    one in NF4.
    """
    workloads = []
    for title, is_skewed in ((name, False), (f"{name}-skewed", True)):
        usual = Workload(title, model_type, config, None, is_skewed=is_skewed)
        workloads += [usual, replace(usual, name=f"{title}-16k", max_tokens=16_384, num_packs=24, weights_of=title)]
    return [*workloads, Workload(name.replace("-lora", "-qlora"), model_type, config, "nf4", weights_of=name)]


# Packs of other lengths on the same weights: suffix of the name, tokens, and packs that the stored list fills.
_LONGER = (("16k", 16_384, 24), ("32k", 32_768, 12), ("48k", 49_152, 8))


def _with_longer(name: str, config: dict[str, Any], quantization: str | None) -> list[Workload]:
    """Return the workload at 8,192 tokens, and those with longer packs that share its weights."""
    usual = Workload(name, "qwen3", config, quantization)
    longer = [
        replace(usual, name=f"{name}-{suffix}", max_tokens=max_tokens, num_packs=num_packs, weights_of=name)
        for suffix, max_tokens, num_packs in _LONGER
    ]
    longest = replace(
        usual,
        name=f"{name}-128k-one-document",
        max_tokens=131_072,
        num_packs=4,
        document_lengths=(131_072,),
        weights_of=name,
    )
    return [usual, *longer, longest]


def _llama_8b() -> list[Workload]:
    """Return Llama-3.1-8B on packs of 32,768 tokens, with three documents or one, and on one document of 131,072 or
    262,144 tokens.
    """
    three = Workload(
        "llama-3.1-8b-lora-32k",
        "llama",
        LLAMA_8B,
        None,
        max_tokens=32_768,
        num_packs=12,
        document_lengths=(16_384, 8192, 8192),
    )
    return [
        three,
        *(
            replace(
                three,
                name=f"llama-3.1-8b-lora-{suffix}-one-document",
                max_tokens=num_tokens,
                num_packs=num_packs,
                document_lengths=(num_tokens,),
                weights_of=three.name,
            )
            for suffix, num_tokens, num_packs in (("32k", 32_768, 12), ("128k", 131_072, 12), ("256k", 262_144, 4))
        ),
    ]


def _one_document(name: str, model_type: str, config: dict[str, Any], num_tokens: int, **others: Any) -> Workload:
    """Return a workload of one document with its own model."""
    return Workload(
        name, model_type, config, max_tokens=num_tokens, num_packs=12, document_lengths=(num_tokens,), **others
    )


def _tiny(
    name: str, model_type: str, config: dict[str, Any], quantization: str | None = None, **others: Any
) -> Workload:
    """Return a workload for CPU tests."""
    sizes = {"max_tokens": 256, "length_divisor": 16, "num_packs": 8, "lora_rank": 4, "lora_alpha": 4}
    return Workload(name, model_type, config, quantization, **{**sizes, **others})


WORKLOADS = {
    workload.name: workload
    for workload in (
        *_with_longer("qwen3-14b-qlora", QWEN3_14B, "nf4"),
        *_with_longer("qwen3-8b-qlora", QWEN3_8B, "nf4"),
        *_with_longer("qwen3-32b-qlora", QWEN3_32B, "nf4"),
        Workload("qwen3-8b-lora", "qwen3", QWEN3_8B, None),
        Workload("qwen3-8b-full", "qwen3", QWEN3_8B, None, weights_of="qwen3-8b-lora", is_full=True),
        Workload("qwen3-0.6b-lora", "qwen3", QWEN3_06B, None),
        Workload("qwen3-0.6b-full", "qwen3", QWEN3_06B, None, weights_of="qwen3-0.6b-lora", is_full=True),
        Workload("llama-3.2-1b-lora", "llama", LLAMA_1B, None),
        *_llama_8b(),
        _one_document("llama-3.1-8b-6l-lora-256k-one-document", "llama", LLAMA_8B_6L, 262_144, quantization=None),
        _one_document("qwen3-14b-10l-qlora-128k-one-document", "qwen3", QWEN3_14B_10L, 131_072, quantization="nf4"),
        Workload("llama-3.3-70b-qlora", "llama", LLAMA_70B, "nf4"),
        Workload("llama-3.3-70b-lora", "llama", LLAMA_70B, None),
        *_with_routings("qwen3-30b-a3b-12l-lora", "qwen3_moe", qwen3_moe(layers=12)),
        *_with_routings("qwen3-30b-a3b-lora", "qwen3_moe", qwen3_moe(layers=48)),
        *_with_routings("gpt-oss-20b-12l-lora", "gpt_oss", gpt_oss(layers=12)),
        *_with_routings("gpt-oss-20b-lora", "gpt_oss", gpt_oss(layers=24)),
        Workload("gpt-oss-120b-lora", "gpt_oss", gpt_oss(layers=36, experts=128), None),
        Workload("qwen3.5-9b-lora", "qwen3_5_text", QWEN35_9B, None, more_targets=MIXER_MODULES),
        # The layers that Unsloth adapts: in gated delta layers only the feed-forward blocks.
        Workload("qwen3.5-9b-usual-lora", "qwen3_5_text", QWEN35_9B, None),
        Workload("qwen3.5-9b-full", "qwen3_5_text", QWEN35_9B, None, weights_of="qwen3.5-9b-lora", is_full=True),
        Workload("gemma-4-e4b-lora", "gemma4_text", GEMMA4_E4B, None),
        Workload("qwen3.5-35b-a3b-12l-lora", "qwen3_5_moe_text", QWEN35_35B_12L, None, more_targets=MIXER_MODULES),
        # As above: adapters on attention and experts.
        Workload("qwen3.5-35b-a3b-12l-usual-lora", "qwen3_5_moe_text", QWEN35_35B_12L, None),
        *(
            _tiny(f"{name}{'-skewed' if is_skewed else ''}", model_type, config, is_skewed=is_skewed)
            for name, model_type, config in (
                ("tiny-moe", "qwen3_moe", TINY_MOE),
                ("tiny-gpt-oss", "gpt_oss", TINY_GPT_OSS),
            )
            for is_skewed in (False, True)
        ),
        _tiny("tiny-moe-qlora", "qwen3_moe", TINY_MOE, "nf4", weights_of="tiny-moe"),
        _tiny("tiny", "qwen3", TINY),
        _tiny("tiny-long", "qwen3", TINY, max_tokens=512, num_packs=6, weights_of="tiny"),
        _tiny("tiny-qwen3.5", "qwen3_5_text", TINY_QWEN35, more_targets=MIXER_MODULES),
        _tiny("tiny-qwen3.5-moe", "qwen3_5_moe_text", TINY_QWEN35_MOE),
        _tiny("tiny-gemma4", "gemma4_text", TINY_GEMMA4),
        _tiny("tiny-full", "qwen3", TINY, lora_rank=16, lora_alpha=16, weights_of="tiny", is_full=True),
        _tiny("tiny-qlora", "qwen3", TINY, "nf4"),
    )
}

# The shipped config of a workload. "tiny" is for tests: its config accumulates, and a step of the ruler still is one pack.
SHIPPED_CONFIGS: Mapping[str, str] = {
    "qwen3-14b-qlora": "qlora_qwen3_14b",
    "qwen3-8b-qlora": "qlora_qwen3_8b",
    "qwen3-0.6b-lora": "lora_qwen3_0.6b",
    "llama-3.1-8b-lora-32k": "long_context_llama_3.1_8b",
    "llama-3.1-8b-lora-32k-one-document": "long_context_llama_3.1_8b",
    "qwen3-30b-a3b-12l-lora": "moe_qwen3_30b_a3b",
    "qwen3-30b-a3b-lora": "moe_qwen3_30b_a3b",
    "gpt-oss-20b-12l-lora": "moe_gpt_oss_20b",
    "tiny": "qlora_qwen3_8b",
    "tiny-qlora": "qlora_qwen3_8b",
}


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

    def renewed(self, number: int) -> Pack:
        """Return the pack with its tokens and documents rotated by so many places; 0 is the pack itself.

        Every document gets other tokens; lengths and the routing of each token are unchanged.

        Example:
            >>> pack = Pack(input_id_T=np.arange(4, 9), lengths=[2, 3]).renewed(1)
            >>> pack.input_id_T.tolist(), pack.lengths
            ([8, 4, 5, 6, 7], [3, 2])
        """
        if number == 0:
            return self
        places = number % len(self.lengths)
        return Pack(input_id_T=np.roll(self.input_id_T, number), lengths=self.lengths[places:] + self.lengths[:places])

    def label_T(self, share: float) -> np.ndarray:
        """Return unshifted labels: the last share of every document, without its first token, and at least one token
        if it has two.
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
    """Return the number of trained tokens at the end of a document."""
    return 0 if length < 2 else min(length - 1, max(1, round(share * length)))


def generate_lengths(num_documents: int, *, seed: int, mean: int, sigma: float, low: int, high: int) -> list[int]:
    """Return log-normal document lengths with this mean before clipping, as in the stored list."""
    source = random.Random(seed)
    log_mean = math.log(mean) - 0.5 * sigma * sigma
    return [min(high, max(low, int(source.lognormvariate(log_mean, sigma)))) for _ in range(num_documents)]


def read_lengths(path: Path = LENGTHS_PATH) -> dict[str, Any]:
    """Return the stored list and the arguments that generated it."""
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
        # The list is repeated if packs need more documents; token ids are new in every pack.
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


def make_ragged(packs: Sequence[Pack]) -> list[Pack]:
    """Return the first pack, and the others without their last document, so that they have many lengths.

    Example:
        >>> packs = [Pack(input_id_T=np.arange(9), lengths=lengths) for lengths in ([4, 5], [6, 3], [9])]
        >>> [pack.input_id_T.size for pack in make_ragged(packs)]
        [9, 6, 9]
    """
    ends = [pack.input_id_T.size - (pack.lengths[-1] if len(pack.lengths) > 1 else 0) for pack in packs[1:]]
    shorter = [
        Pack(input_id_T=pack.input_id_T[:end], lengths=pack.lengths[:-1] or pack.lengths)
        for pack, end in zip(packs[1:], ends, strict=True)
    ]
    return [*packs[:1], *shorter]


class WorkloadFiles:
    """The folder of a built workload.

    Args:
        root: Folder with a subfolder for each workload.
        workload: The workload.
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
        """Return the file of the plain arm's gradients for this label share."""
        return self.folder / f"reference_gradients_{share:g}.safetensors"

    def is_built(self) -> bool:
        """Return whether build has finished here, with exactly this workload and the weights that it shares."""
        is_done = self.done.exists() and json.loads(self.done.read_text()) == fingerprint(self.workload)
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
        """Return the adapter, or all weights, at the start of every case by their names in the files."""
        return TensorFiles(sorted(self.model.glob("*.safetensors"))) if self.workload.is_full else self.read_adapter()


def fingerprint(workload: Workload) -> dict[str, Any]:
    """Return the description by which a built workload is recognised."""
    fields = vars(workload)
    # Workloads that were built before these fields existed stay valid.
    for name in ("is_full", "more_targets", "learning_rate"):
        if not getattr(workload, name):
            fields = {key: value for key, value in fields.items() if key != name}
    return json.loads(
        json.dumps({**fields, "shares": [ADAPTER_SHARE, BRANCH_SHARE, GATE_STD, *EXPERT_CODES, ROUTER_GAIN]})
    )


def lora_config(workload: Workload) -> Any:
    """Return the LoraConfig of every system; None if all weights are trained."""
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
