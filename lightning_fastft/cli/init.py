"""``fastft init``: write a config for a model, data and a GPU, with the speed and memory to expect."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastft.cli.arguments import (
    Arguments,
    add_data_options,
    data_options_named,
    read_data_options,
    read_path,
    take_columns,
)
from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.core.files import find_write_obstacle
from lightning_fastft.core.phases import phase
from lightning_fastft.estimate.machines import Gpu, find_gpu
from lightning_fastft.packing.reading.sources import check_exists

if TYPE_CHECKING:
    from lightning_fastft.cli.recipe.plans import Method, Planned, Steps
    from lightning_fastft.cli.recipe.text import Recipe
    from lightning_fastft.hf.loading.source import ModelSource

_GIB = 2**30
# Pinned host memory of another machine.
_ASSUMED_HOST_GIB = 64


def run_init(words: Sequence[str]) -> int:
    """Write a config and print what to expect of it; return 0.

    Args:
        words: ``--model NAME``, ``--data PATH``, and ``--gpu NAME`` (default: the GPU of this machine), ``--method``
            (default: LoRA where it fits and is about as fast, else QLoRA), ``--out FILE`` (config.yaml),
            ``--overwrite``. ``--data.columns.OURS YOURS``, ``--max-reject-share``, ``--extra-columns``,
            ``--chat-template``, ``--chat-template-kwargs`` and ``--cache-dir`` are options of PackedDataModule, which
            the config has too.

    Raises:
        OptionError: A value is not allowed, out exists, the model cannot be read, or it does not fit the GPU.
        DataError: The data cannot be read.

    Cost:
        One pass over the data, and some seconds for the plan; the weights of the model are not read.
    """
    args = _parse_args(words)
    recipe = _choose(args)
    # Imported after the phases that say so.
    from lightning_fastft.cli.recipe.text import describe_expectation, describe_lengths, render_config
    from lightning_fastft.packing.store.dataset import replace_file

    try:
        replace_file(args.out, render_config(recipe).encode())
    except OptionError as error:
        raise OptionError(f"--out: {error}") from error
    steps = recipe.steps
    lines = [
        f"Wrote {args.out}: {recipe.method} of {args.model}, packs of {steps.max_tokens:,} tokens, "
        f"{steps.accumulate} per optimizer step.",
        f"  method: {recipe.method_reason}",
        f"  data: {describe_lengths(recipe.lengths, steps)}",
        f"  an epoch: about {steps.num_packs:,} packs, {steps.num_steps:,} optimizer steps; epochs: {steps.num_epochs}",
        *(f"  expected: {line}" for line in describe_expectation(recipe)),
        *_warn_of_weights(args.model),
        "Then:",
        f"  {shlex.join(recipe.fit_words)}",
        f"  {shlex.join(recipe.chat_words)}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _parse_args(words: Sequence[str]) -> Namespace:
    """Parse and check the command line, without torch."""
    columns, words = take_columns(words)
    arguments = Arguments("init")
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--data", required=True)
    arguments.add_argument("--gpu", default="")
    arguments.add_argument("--method", choices=("auto", "qlora", "lora", "full"), default="auto")
    arguments.add_argument("--out", type=read_path, default="config.yaml")
    arguments.add_argument("--overwrite", action="store_true")
    # It chooses max_tokens and too_long itself.
    add_data_options(arguments, without=("too_long",))
    given = arguments.read(words)
    given.reading = read_data_options(given, columns=columns)
    check_exists(given.data)
    _check_model(given.model)
    out = given.out
    if out.suffix not in (".yaml", ".yml"):
        raise OptionError(f"--out must name a .yaml file, got {given.out}.")
    if out.is_symlink() or (out.exists() and not (given.overwrite and out.is_file())):
        raise OptionError(f"{out} exists and is not overwritten. Name another file with --out, or add --overwrite.")
    if obstacle := find_write_obstacle(out.parent):
        raise OptionError(f"--out: {out} cannot be written: {obstacle}. Name a file in another folder.")
    given.gpu = find_gpu(given.gpu) if given.gpu else None
    return given


def _check_model(model: str) -> None:
    """Refuse a path at which there is no model; what may be a hub id is not checked."""
    path = Path(model).expanduser()
    is_path = path.is_absolute() or model.startswith((".", "~")) or model.endswith("/") or model.count("/") > 1
    if is_path and not path.exists():
        raise OptionError(
            f"--model: there is nothing at {model} (searched from {Path.cwd()}). Give a name on huggingface.co or a "
            "folder; its config.json alone is enough here."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise OptionError(f"--model: the folder {model} has no config.json. Copy the one of the model there.")


def _choose(args: Namespace) -> Recipe:
    """Read model and data, and choose how to train."""
    with phase("importing torch"):
        import torch
    with phase("importing transformers"):
        from lightning_fastft.activations.budgets import auto_host_bytes
        from lightning_fastft.cli.recipe.lengths import measure_lengths
        from lightning_fastft.cli.recipe.plans import ASSUMED_MARGIN, choose_pack_tokens, count_steps, plan_run
        from lightning_fastft.cli.recipe.text import Recipe
        from lightning_fastft.hf.loading.source import ModelSource

    with phase("reading the model's configuration"):
        source = ModelSource(args.model, init="random")
        most = _longest_of(source)
    gpu, host_bytes = args.gpu, _ASSUMED_HOST_GIB * _GIB
    if gpu is None and torch.cuda.is_available():
        gpu, host_bytes = find_gpu(torch.cuda.get_device_name()), auto_host_bytes()
    with phase("reading the data"), data_options_named():
        lengths = measure_lengths(args.data, source=source, reading=args.reading)
    length_N = lengths.length_N
    tokens = choose_pack_tokens(length_N * ASSUMED_MARGIN if lengths.assumption else length_N, most=most)
    planned: Planned | None = None
    if gpu is not None:
        with phase("planning"):
            planned = plan_run(
                source,
                gpu=gpu,
                methods=_methods(args.method),
                length_N=length_N,
                max_tokens=tokens,
                host_bytes=host_bytes,
            )
    steps: Steps = count_steps(length_N, max_tokens=tokens if planned is None else planned.max_tokens)
    method = _methods(args.method)[0] if planned is None else planned.method
    return Recipe(
        model=args.model,
        data=args.data,
        reading=args.reading,
        out=args.out,
        method=method,
        method_reason=_explain_method(args.method, planned, gpu=gpu),
        has_experts=_has_experts(source),
        lengths=lengths,
        steps=steps,
        gpu=gpu,
        planned=planned,
    )


def _methods(name: str) -> tuple[Method, ...]:
    """Return the methods to choose from, the preferred one first."""
    return ("lora", "qlora") if name == "auto" else (name,)  # type: ignore[return-value]


def _explain_method(name: str, planned: Planned | None, *, gpu: Gpu | None) -> str:
    if name != "auto":
        return f"{name}, as asked for."
    if planned is None or gpu is None:
        return "lora, because there is no GPU whose memory would ask for less."
    if planned.method == "lora":
        return f"lora: the base fits {gpu.name} in bf16, and 4 bits would not be faster by 5 %."
    return f"qlora: in bf16 the base does not fit {gpu.name}, or leaves too little for activations to be as fast."


def _longest_of(source: ModelSource) -> int:
    """Return the longest sequence of a model; read its configuration, which may need the hub."""
    try:
        config = source.config
    except OptionError as error:
        raise OptionError(
            f"{error} A folder with the model's config.json is enough for fastft init: --model FOLDER."
        ) from error
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31 - 1)


def _has_experts(source: ModelSource) -> bool:
    """Return whether BincountRouter serves the experts of a model."""
    import torch

    from lightning_fastft.hf.loading.source import auto_class
    from lightning_fastft.moe.install import find_experts

    with torch.device("meta"):
        model = auto_class(source.config).from_config(source.config, dtype=torch.bfloat16)
    try:
        return bool(find_experts(model))
    except UnsupportedModelError:
        return False


def _warn_of_weights(model: str) -> list[str]:
    """Return a line on weights that are missing in a local folder."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return []
    return [f"  note: {model} has no weights (*.safetensors): add them before fastft fit, or set model.init to random."]
