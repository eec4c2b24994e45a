"""Write docs/support.md and docs/options.md from the package, and docs/numbers.md and the table of docs/reliability.md
from benchmarks/*.csv.

docs/which_gpu.md takes minutes and has a script of its own, docs/gpu_table.py.

Command: python docs/generate.py        (tests compare its output with the pages)
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef, Literal, get_args, get_origin

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import lightning_fastft
from lightning_fastft.cli.usage import USAGE
from lightning_fastft.cli.words import CONFIG_FOLDER, config_names
from lightning_fastft.core.errors import FastFTError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.fused.layer_parts import form_of, has_own_mixer, own_class
from lightning_fastft.hf.expert_nf4 import check_experts
from lightning_fastft.hf.families import (
    FAMILIES,
    check_servable,
    decoder_layers,
    find_sharing_obstacle,
    is_on_interface,
)
from lightning_fastft.hf.images import IMAGE_FAMILIES
from lightning_fastft.hf.lora_targets import find_default_targets, shorten
from lightning_fastft.hf.mixers import MIXERS
from lightning_fastft.mixers.kernels import KINDS
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.packing.context import ONE_BY_ONE

DOCS = Path(__file__).parent
HEAD = "<!-- Written by `python docs/generate.py`; edit the package, not this file. -->\n"
# Families that no test compares document by document: those with fused layers, more mixtures, and families that users
# often request.
MORE_FAMILIES = (
    *("gemma", "ministral", "ministral3", "cwm", "olmo2", "olmo3", "exaone4"),
    *("qwen2_moe", "deepseek_v2", "glm4_moe_lite", "granitemoe", "minimax_m2", "llama4_text", "phimoe", "ernie4_5_moe"),
    *("phi", "cohere", "stablelm", "gpt2", "opt", "minimax", "mamba2"),
)
# What a configuration leaves open in its defaults.
LEFT_OPEN = {
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "ministral": {"head_dim": 128},
}
# Enough to include every kind of layer: the first three of DeepSeek and GLM are dense.
NUM_LAYERS = 4
YES, NO = "yes", "-"
_ENTRY = re.compile(r"^    (\*{0,2}\w+): (.*)$")
_SECTION = re.compile(r"^(Args|Returns|Raises|Cost|Source|Example|Attributes):$")


def write_support() -> str:
    """Return docs/support.md: the package's own checks of each family, run on models on the meta device."""
    lines = [
        HEAD,
        "# Supported model families\n",
        "The family is the `model_type` of the text configuration. Packed training needs transformers' "
        "attention interface. The",
        "column *packed documents* has one of three values:",
        "",
        "- *tested*: packed documents are compared with one document at a time, gradients included",
        "  (`pytest tests/patches tests/mixers`).",
        "- *on the interface*: the family is not among the tested ones; a fit begins with a check of two documents. "
        "Its head shape",
        "  decides which kernels run.",
        "- *refused*: a packed batch raises `UnsupportedModelError` with the reason below; `attention='one_by_one'` "
        "serves it.\n",
        "| family | packed documents | attention kernels | `FusedKernels` | `BincountRouter` | `quantization='nf4'` |",
        "|---|---|---|---|---|---|",
    ]
    refusals = []
    for family in (*FAMILIES, *MORE_FAMILIES):
        model = build_on_meta(family)
        packed, refusal = _judge_packing(family, model)
        if refusal:
            refusals.append(f"- `{family}`: {refusal}")
        kernels = ", ".join(FAMILIES.get(family, ())) or ("" if refusal else "by head shape")
        judged = (packed, kernels or NO, _judge_fusion(model), _judge_experts(model), _judge_nf4(model))
        lines.append(f"| {family} | {' | '.join(judged)} |")
    lines += [
        "\n**Formats of checkpoints.** safetensors files in fp32, bf16 or fp16; in NF4 of bitsandbytes; in fp8 "
        "with scales per block",
        "(Qwen, MiniMax) or in MXFP4 (gpt-oss). The last two have no backward in transformers 5.17, so they "
        "are dequantised when they are",
        "read. `quantization='nf4'` quantises them again; it takes host memory for the model in bf16. transformers "
        "cannot dequantise a weight",
        "whose last block is smaller than the others, as DeepSeek V3 has them: it is refused. GPTQ, AWQ and others "
        "need the package that",
        "transformers names, and are not tested.",
        "\nThe option `attention` chooses one of the kernels in a row: our own (tiled: Hopper, heads of 64 or 128 "
        "columns),",
        "flash varlen, cuDNN, FlexAttention, torch's SDPA, or plain PyTorch. The table that `fit` logs shows which one",
        "ran. `auto` chooses for each layer: on a GPU the global layers of Gemma 4 (heads of 512 columns) run on SDPA,",
        "whose memory-efficient kernel reads document offsets, and its other layers on flash varlen.",
        "",
        "LoRA and full fine-tuning, offload, packed loss, the guards and the reports work with every family "
        "that is not refused.",
        "",
        "`BincountRouter` on a dense model, or `FusedKernels` on another family, changes nothing and reports it.\n",
        "## Refused, and why\n",
        *refusals,
        "",
        *_describe_sweep(),
        *_describe_hybrids(),
        *_describe_sharing(),
        *_describe_images(),
        *_describe_default_lora(),
        "## Strategies\n",
        "| | `fastft` | `fastft_ddp` | `fastft_fsdp` |",
        "|---|---|---|---|",
        "| LoRA, QLoRA, full fine-tuning | yes | yes | yes |",
        "| activations planned, offloaded | yes | yes | yes |",
        "| `FusedKernels` | yes | yes | yes |",
        "| `BincountRouter` | yes | yes | yes, but for NF4 experts |",
        "| `context_parallel` | one device | yes | yes |",
        "| `expert_parallel` | one device | - | yes |",
        "| `FusedAdamW`, `MuonAdamW` | yes | yes | yes |",
        "| schedule-free optimizers | yes | yes | - |",
        "| `fastft export` of its checkpoints | yes | yes | yes |",
    ]
    return "\n".join(lines) + "\n"


def _describe_sweep() -> list[str]:
    """Return how every causal type of transformers ended in the recorded sweep."""
    # Modules of the repository, not of the package: its root is on the path in scripts and tests only.
    from benchmarks.model_types import BOUND, read_record

    rows = read_record()
    packed = [row["model_type"] for row in rows if row["attention"] == "auto"]
    alone = [row for row in rows if row["attention"] == ONE_BY_ONE]
    rest = [row for row in rows if row["outcome"] != "exact"]
    return [
        f"## Every causal language model type of transformers {rows[0]['transformers']}\n",
        "`python -m benchmarks.model_types --record` builds each type tiny, with random weights, and compares loss",
        f"and gradients of packed documents with the same documents alone (fp32, CPU, bound {BOUND:.0e}).",
        f"Of {len(rows)} types {len(packed)} are exact packed and {len(alone)} one by one. {len(rest)} could not be",
        "compared, and none is silently wrong (`benchmarks/model_types.csv`). A fit with a family outside the tested",
        "ones begins with such a comparison on the real model, forward only, and refuses what differs by",
        "more than rounding explains.\n",
        "Packed:\n",
        ", ".join(f"`{name}`" for name in packed) + ".\n",
        "`attention='one_by_one'` of a strategy or of `PackedTraining` runs the documents of a pack one at a time,",
        "each with the model's own attention. It is exact for every family, and slow: nothing is packed but the batch,",
        "and activations follow the model's own checkpointing. `fastft_fsdp` refuses it.\n",
        "| one by one | why not packed |",
        "|---|---|",
        *(f"| `{row['model_type']}` | {_cell(row['reason'])} |" for row in alone),
        "",
        "| not compared | why |",
        "|---|---|",
        *(f"| `{row['model_type']}` | {row['outcome']}: {_cell(row['reason'])} |" for row in rest),
        "",
    ]


def _describe_images() -> list[str]:
    """Return the vision-language models whose images are packed, and why others are refused."""
    return [
        "## Images\n",
        "The `model_type` is that of the whole configuration. These families train on packed images; a test compares "
        "packs with each",
        "document alone, gradients included (`pytest tests/patches/test_images.py`):",
        f"{', '.join(IMAGE_FAMILIES)}.",
        "Tokens of one image see each other in both directions in Gemma 3, and in the layers with a sliding window of "
        "the larger",
        "models of Gemma 4. Attention runs with a dense mask there, built once per batch.",
        "",
        "All others train on text. Images are refused with the reason:\n",
        "- other families: packed and alone have not been compared",
        "- videos and sound: the batch has no positions for them",
        "",
    ]


def _describe_hybrids() -> list[str]:
    """Return the kinds of recurrent mixers and the families that have them."""
    families: dict[str, list[str]] = {}
    for model_type, family in MIXERS.items():
        families.setdefault(family.kind, []).append(model_type)
    return [
        "## Recurrent mixers\n",
        "Hybrids have layers with a recurrent mixer. In a packed batch each mixer starts anew at every document, in "
        "the forward",
        "and in the backward (`pytest tests/mixers`). On a GPU the kernels of fla-core are needed",
        "(`pip install 'lightning-fastft[hybrid]'`); without them, or for a mixer that has none, a packed batch raises",
        "`UnsupportedModelError`; `attention='one_by_one'` trains these families there. Gated delta rules are measured",
        "on an H200 (`python -m benchmarks.train_step run --workload qwen3.5-9b-lora`); the speed of Kimi delta",
        "attention and of Mamba-2 is not measured. On an H100, outputs and gradients of a pack in fp32 differ from",
        "those of each document alone by at most 1.2e-4 (`pytest tests/gpu/test_mixers_gpu.py`). There fla-core's",
        "kernels multiply fp32 as TF32x3; with plain TF32, Triton's default, the error was up to 1.2 %.\n",
        "`fastft plan` and `fastft init` predict steps of these mixers without a GPU, except Mamba, which has no GPU",
        "kernel; `python -m benchmarks.plan_error` compares the predictions for Qwen3.5 with its measured rows.",
        "Kimi delta attention is counted at the speed of the gated delta rule, and Mamba-2 by its bytes.\n",
        "| mixer | families | CPU | GPU |",
        "|---|---|---|---|",
        *(
            f"| {kind} | {', '.join(names)} | yes | {'with fla-core' if kind in KINDS else 'refused'} |"
            for kind, names in families.items()
        ),
        "",
    ]


def _describe_sharing() -> list[str]:
    """Return which families repeat the prompt of completions."""
    families: dict[str, list[str]] = {}
    for family in (*FAMILIES, *MORE_FAMILIES):
        obstacle = find_sharing_obstacle(build_on_meta(family).config)
        if obstacle:
            families.setdefault(obstacle.partition(" ")[2], []).append(f"`{family}`")
    return [
        "## Shared prompts\n",
        "Packs of preference rows, rewards and rollouts hold each prompt once, and its completions attend to it",
        "(`pytest tests/patches/test_shared_prompts.py`). These families get a copy of the prompt for each completion,",
        "which is logged:\n",
        *(f"- {', '.join(names)}: each {reason}" for reason, names in families.items()),
        "- any family whose configuration scales positions by length (`rope_type` dynamic or longrope)",
        "",
    ]


def build_on_meta(family: str) -> Any:
    """Return a model of a family on the meta device, with its default sizes and few layers."""
    config = AutoConfig.for_model(family, **LEFT_OPEN.get(family, {}))
    kinds = getattr(config, "layer_types", None)
    name = getattr(config, "attribute_map", {}).get("layer_types", "layer_types")
    config.num_hidden_layers = NUM_LAYERS
    if kinds and not isinstance(getattr(type(config), name, None), property):
        config.layer_types = kinds[:NUM_LAYERS]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _describe_default_lora() -> list[str]:
    """Return the rule of default LoRA, and what it adapts in each mixture and hybrid of the table of families."""
    rows = []
    for family in (*FAMILIES, *MORE_FAMILIES):
        model = build_on_meta(family)
        names = [name for name, _ in model.named_modules()]
        if family in MIXERS or any(is_on_interface(module) for module in model.modules()):
            targeted, skipped = find_default_targets(model)
            targets = shorten(targeted, others=set(names) - set(targeted))
            rows.append(f"| `{family}` | {', '.join(targets)} | {', '.join(skipped)} |")
    return [
        "## Default LoRA\n",
        "`FineTuner(lora={...})` without `target_modules` and `target_parameters` follows one rule in every family.",
        "It adapts the projections of attention and of recurrent mixers, and dense and shared feed-forward layers. It",
        "never adapts the head, towers for images and sound, routers, gates of shared experts, indexers, or",
        "convolutions. Routed experts are adapted only if `target_parameters` names their stacks",
        "([mixture of experts](experts.md)). The table that `fit` logs gives the targets and the number of trained",
        "weights (`pytest tests/hf/test_default_lora.py`).",
        "",
        "PEFT bars two kinds of layers. *barred by PEFT*: in families whose checkpoints hold experts one by one, PEFT",
        "takes `gate_proj`, `up_proj` and `down_proj` for parts of expert stacks, also in dense and shared layers, or",
        "it does not find the adapter again when it reads it. *projections that Mamba kernels read*: the kernels read",
        "their weights without the adapter, so PEFT refuses them.",
        "",
        "`target_modules='all-linear'` is PEFT's own choice, and the default of earlier versions: on some mixtures it",
        "adapts all routed experts and the router.\n",
        "| mixture or hybrid | adapted | not adapted |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _judge_packing(family: str, model: Any) -> tuple[str, str]:
    """Return the state of packed documents and the reason for a refusal."""
    try:
        check_servable(model)
    except UnsupportedModelError as error:
        return "refused", str(error).partition("documents: ")[2].partition(". Use attention=")[0]
    return ("tested" if family in FAMILIES else "on the interface"), ""


def _judge_fusion(model: Any) -> str:
    """Return what `FusedKernels` fuses of the layers of a model."""
    layers = [layer for layer in decoder_layers(model) if own_class(layer).__name__ in LAYERS]
    if not layers:
        return NO
    as_modules = [has_own_mixer(layer, form_of(layer)) for layer in layers]
    return "norms and blocks" if all(as_modules) else "yes, mixers as modules" if any(as_modules) else YES


def _judge_experts(model: Any) -> str:
    """Return whether `BincountRouter` supports the experts of a model."""
    patcher = ModelPatcher()
    try:
        return YES if install_bincount_router(model, patcher)[0].state == "active" else "dense"
    except UnsupportedModelError:
        return "refused"
    finally:
        patcher.undo()


def _judge_nf4(model: Any) -> str:
    """Return which weights of a quantised base are held in 4 bits."""
    try:
        return "linear layers and experts" if check_experts(model) else "linear layers"
    except FastFTError:
        return "refused"


def write_options() -> str:
    """Return docs/options.md: every public class with its options, their types, defaults and meaning."""
    lines = [
        HEAD,
        "# Every option\n",
        "This page is written from signatures and docstrings. In a config, write an option under "
        "`init_args`. On the command",
        "line, write `--model.lora.r 16`, `--data.max_tokens 8192` or `--trainer.strategy fastft`.",
        "",
        "`fastft fit --help` lists the options of FineTuner, PackedDataModule and Lightning's Trainer. For "
        "the options of a",
        "callback, replace `--help` with `--trainer.callbacks.help lightning_fastft.RunReport`; for those of another "
        "tuner with",
        "`--model.help PreferenceTuner`. Tuners take the options of FineTuner too.\n",
        "## Commands\n",
        f"```text\n{USAGE.format(configs=', '.join(config_names())).strip()}\n```\n",
        "## Configs that come with the package\n",
        *(_describe_config(name) for name in config_names()),
        "",
    ]
    for name in lightning_fastft.__all__:
        lines += _describe_public(name, getattr(lightning_fastft, name))
    return "\n".join(lines).rstrip() + "\n"


def _describe_config(name: str) -> str:
    text = (CONFIG_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    purpose = next(line for line in text.splitlines() if line.startswith("# Purpose: "))
    return f"- `{name}`: {purpose.removeprefix('# Purpose: ')}"


def _describe_public(name: str, value: Any) -> list[str]:
    """Return the section of one public name."""
    sections = parse_docstring(inspect.getdoc(value) or "")
    lines = [f"## {name}\n", *sections["Summary"], ""]
    meanings = read_meanings(value)
    # The fields of a NamedTuple are arguments of its ``__new__``.
    has_init = inspect.isclass(value) and value.__init__ is not object.__init__
    parameters = dict(inspect.signature(value.__init__ if has_init else value).parameters)
    if meanings.get("options") == f"Options of ``{name}``.":
        # Its base is no public name: list the base's options here.
        del parameters["options"]
        parameters |= {
            key: option
            for key, option in inspect.signature(value.__base__.__init__).parameters.items()
            if key not in parameters
        }
    options = [parameter for parameter in parameters.values() if parameter.name in meanings]
    if options:
        lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{_name_of(option)}` | `{_cell(_type_of(option, value))}` | {_default_of(option)} "
            f"| {_cell(meanings[option.name])} |"
            for option in options
        ] + [""]
    attributes = [f"| `{key}` | {_cell(meaning)} |" for key, meaning in _entries(sections.get("Attributes", []))]
    if attributes:
        lines += ["| attribute | meaning |", "|---|---|", *attributes, ""]
    for title in ("Raises", "Cost", "Source"):
        if title in sections:
            lines += [
                f"**{title}.** " + " ".join(" ".join(line.split()) for line in sections[title] if line.strip()),
                "",
            ]
    return lines


def read_meanings(value: Any) -> dict[str, str]:
    """Return what the options of a class or function mean; for a class, its own docstring comes before its bases'.

    "As in ``Base``" of a class that is no public name is replaced by what that base says.
    """
    found: dict[str, str] = {}
    for owner in inspect.getmro(value) if inspect.isclass(value) else (value,):
        own = dict(_entries(parse_docstring(inspect.cleandoc(owner.__doc__ or "")).get("Args", [])))
        for name, meaning in own.items():
            reference = f"As in ``{owner.__name__}``"
            if name in found and found[name].startswith(reference):
                found[name] = meaning + found[name].removeprefix(reference).removeprefix(";").removeprefix(".")
            found.setdefault(name, meaning)
    return {
        name: meaning.replace("Options of ``Tuner``", "Options of ``FineTuner``") for name, meaning in found.items()
    }


def parse_docstring(text: str) -> dict[str, list[str]]:
    """Return the unchanged lines of each section of a docstring, by title.

    Lines before the first section are under "Summary".
    """
    sections: dict[str, list[str]] = {"Summary": []}
    title = "Summary"
    for line in text.splitlines():
        found = _SECTION.match(line)
        if found:
            title = found[1]
            sections[title] = []
        else:
            sections[title].append(line)
    while sections["Summary"] and not sections["Summary"][-1].strip():
        sections["Summary"].pop()
    return sections


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield names and meanings of an Args section."""
    name, words = "", []
    for line in lines:
        found = _ENTRY.match(line)
        if found:
            if name:
                yield name, " ".join(words)
            name, words = found[1].lstrip("*"), [found[2]]
        elif line.strip():
            words.append(line.strip())
    if name:
        yield name, " ".join(words)


def _type_of(option: inspect.Parameter, owner: Any) -> str:
    """Return the type of an option of a class or function; the choices in place of the name of a Literal."""
    found = option.annotation
    if isinstance(found, ForwardRef):
        found = found.__forward_arg__
    for place in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        alias = vars(sys.modules[place.__module__]).get(found) if isinstance(found, str) else found
        if get_origin(alias) is Literal:
            return f"Literal[{', '.join(map(repr, get_args(alias)))}]"
    return (
        ""
        if found is inspect.Parameter.empty
        else found
        if isinstance(found, str)
        else getattr(found, "__name__", str(found))
    )


def _name_of(option: inspect.Parameter) -> str:
    return f"**{option.name}" if option.kind is option.VAR_KEYWORD else option.name


def _default_of(option: inspect.Parameter) -> str:
    if option.kind is option.VAR_KEYWORD:
        return ""
    if option.default is inspect.Parameter.empty:
        return "required"
    # The text of a function holds its address.
    default = option.default.__name__ if inspect.isfunction(option.default) else repr(option.default)
    return f"`{_cell(default)}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def write_faults() -> str:
    """Return the table of faults.csv: how many trials ended badly in the default stack and in ours (newest rows)."""
    from benchmarks.faults.table import read_rows, render_table

    return render_table(read_rows())


def replace_part(page: str, name: str, text: str) -> str:
    r"""Return a page with the text after a named mark replaced.

    The replaced text ends at the mark's end mark, or at the end of the page if there is none.

    Raises:
        ValueError: The page has no such mark.

    Example:
        >>> replace_part("a <!-- x -->old<!-- end of x --> b", "x", "new")
        'a <!-- x -->\nnew<!-- end of x --> b'
    """
    before, mark, rest = page.partition(f"<!-- {name} -->")
    if not mark:
        raise ValueError(f"no mark {name!r}: the table has no place")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    return f"{before}{mark}\n{text}{end}{after}"


def main() -> int:
    """Write the files and return 0."""
    (DOCS / "support.md").write_text(write_support(), encoding="utf-8")
    (DOCS / "options.md").write_text(write_options(), encoding="utf-8")
    from docs.named_runs import write_readme_headlines
    from docs.numbers_page import write_numbers

    (DOCS / "numbers.md").write_text(write_numbers(), encoding="utf-8")
    parts = (
        (DOCS / "reliability.md", "faults", write_faults()),
        (DOCS.parent / "README.md", "headlines", write_readme_headlines()),
    )
    for file, name, text in parts:
        file.write_text(replace_part(file.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    sys.exit(main())
