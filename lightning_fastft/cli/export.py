"""``fastft export``: write trained adapters or merged weights as a plain Hugging Face folder, GGUF or for Ollama."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastft.cli.arguments import Arguments, read_path
from lightning_fastft.cli.trained.opening import add_options, read_request
from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    from lightning_fastft.training.fine_tuner import FineTuner

# Types of llama.cpp's converter that need no further quantisation.
GGUF_TYPES = ("q8_0", "f16", "bf16", "f32")
# Exit status: the folder is written, and the GGUF file is not, for want of llama.cpp.
WITHOUT_GGUF = 3
_MIB = 2**20


def run_export(words: Sequence[str]) -> int:
    """Write the adapters or merged weights of a checkpoint or PEFT folder to a new folder and verify them.

    Args:
        words: A checkpoint file of a FineTuner or another tuner (not of a RewardTuner) or a folder of PEFT adapters,
            then the folder to write. ``--merge`` merges the adapters into the weights of the whole model. ``--base
            NAME`` and ``--tokenizer NAME`` are the base model and the tokenizer, if they have moved since training.
            ``--dtype`` is the dtype of merged weights; by default that of the run, or if that is "auto", bfloat16 on an
            NF4 base and else the dtype of the base's files. ``--device`` is the device to build the model on (cpu).
            ``--accept-other-base`` accepts a base with other weights than those of the run. ``--for vllm`` refuses
            adapters of which vLLM would not read a part. ``--gguf TYPE`` merges, and converts with llama.cpp's script,
            in the folder ``--llama-cpp`` or on PATH. ``--ollama`` writes a Modelfile next to the GGUF file.

    Returns:
        0, or ``WITHOUT_GGUF`` where llama.cpp is not there: the command to run is printed.

    Raises:
        OptionError: The target exists, the source does not exist or is of another kind, or its base is not known.
        DamagedCheckpointError: The checkpoint does not match its digest.
        ResumeError: The checkpoint does not fit the model that it names, or the base has other weights.
        UnsupportedModelError: vLLM would not read all of the adapters, llama.cpp would drop the head, or Ollama cannot
            have the chat template.
        CheckpointNotSavedError: The folder cannot be written or reads back differently; it is removed.

    Cost:
        The base on the device once; for a merge, once more on the host while it is verified.
    """
    args = _parse_args(words)
    if args.gguf:
        _check_unconverted(args)
    from lightning_fastft.cli.trained.writing import write_trained

    out = args.out
    opened, kind, exported, max_lora_rank = write_trained(args.request, out, is_for_vllm=args.server == "vllm")
    tokenizer, notes = opened.module.tokenizer, [*opened.notes]
    if max_lora_rank is not None:
        revision = "" if opened.revision is None else f"--revision {shlex.quote(opened.revision)} "
        notes.append(
            f"for vLLM: vllm serve {shlex.quote(opened.base)} {revision}--enable-lora --max-lora-rank "
            f"{max_lora_rank} --lora-modules {shlex.quote(f'{out.name}={out}')}"
        )
    notes.append("without a tokenizer, because none is known" if tokenizer is None else "the tokenizer is included")
    if opened.images is not None:
        notes.append("the processor of images is included")
    if opened.module.answer_end is not None:
        end = tokenizer.convert_ids_to_tokens(opened.module.answer_end) if tokenizer is not None else ""
        others = "; PEFT reads that of the base" if kind == "adapters" else ""
        notes.append(f"answers end with {end!r}, and generation_config.json stops there{others}")
    if opened.module.chat_template_kwargs:
        given = json.dumps(opened.module.chat_template_kwargs)
        notes.append(f"trained with chat_template_kwargs {given}: give them to apply_chat_template, or to the server")
    if exported.is_untied:
        notes.append(
            "embedding and head are two weights now, because the adapters change one of them "
            "(tie_word_embeddings is false in config.json)"
        )
    lines = [f"Wrote {kind} to {out}: {exported.num_tensors} tensors, {exported.num_bytes / _MIB:,.1f} MiB."]
    lines += [f"  {note}" for note in notes]
    lines.append(
        "  read back by stock libraries: keys, dtypes and values equal, largest difference of a logit "
        f"{exported.reload_difference:.1e}"
    )
    if kind == "merged weights":
        lines.append(
            f"  relative logit difference between the merged model and adapters: {exported.merge_difference:.1e}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return _convert(args, opened.module) if args.gguf else 0


def _convert(args: Namespace, module: FineTuner) -> int:
    """Write the GGUF file and the Modelfile of a whole model."""
    from lightning_fastft.cli.trained.gguf import check_head, convert_to_gguf

    out = args.out
    check_head(out)
    file, serve = _gguf_file(args), ""
    if args.ollama:
        from lightning_fastft.cli.trained.modelfile import write_modelfile

        path = write_modelfile(out, gguf=file, tokenizer=module.tokenizer, variables=module.chat_template_kwargs)
        sys.stdout.write(f"Wrote {path}.\n")
        serve = f"Then:\n  {shlex.join(['ollama', 'create', out.name, '-f', str(path)])}\n"
    command = convert_to_gguf(out, file, type_name=args.gguf, llama_cpp=args.llama_cpp)
    if command:
        sys.stdout.write(
            "No GGUF file yet: convert_hf_to_gguf.py is not on PATH. Clone llama.cpp and run the script, or next time "
            f"give the clone with --llama-cpp:\n  {command}\n"
        )
    else:
        sys.stdout.write(f"Wrote {file}: {file.stat().st_size / _MIB:,.1f} MiB.\n")
    sys.stdout.write(serve)
    return WITHOUT_GGUF if command else 0


def _gguf_file(args: Namespace) -> Path:
    out: Path = args.out
    return out / f"{out.name}-{args.gguf}.gguf"


def _check_unconverted(args: Namespace) -> None:
    """Raise with the command that converts an existing folder, if only its GGUF file is missing.

    Its weights may be those of another checkpoint, so it is not converted without being asked.
    """
    out, file, modelfile = args.out, _gguf_file(args), args.out / "Modelfile"
    is_listed = not args.ollama or (modelfile.is_file() and f"FROM ./{file.name}\n" in modelfile.read_text("utf-8"))
    if file.exists() or not (out / "config.json").is_file() or not is_listed:
        return
    from lightning_fastft.cli.trained.gguf import check_head, conversion_command

    check_head(out)
    command = conversion_command(out, file, type_name=args.gguf, llama_cpp=args.llama_cpp)
    raise OptionError(
        f"{out} already exists and is a whole model without {file.name}, as an export leaves it that ended before the "
        f"conversion. To convert it, run:\n  {shlex.join(command)}\nTo export it again, remove it first."
    )


def _parse_args(words: Sequence[str]) -> Namespace:
    """Parse and check the command line."""
    arguments = Arguments("export")
    arguments.add_argument("source", metavar="CHECKPOINT|FOLDER")
    arguments.add_argument("out", metavar="OUT", type=read_path)
    add_options(arguments)
    arguments.add_argument("--merge", action="store_true")
    arguments.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    arguments.add_argument("--for", dest="server", choices=("vllm",))
    arguments.add_argument("--gguf", choices=GGUF_TYPES, default="")
    arguments.add_argument("--llama-cpp", default="", type=os.path.expanduser)
    arguments.add_argument("--ollama", action="store_true")
    given = arguments.read(words)
    given.gguf = given.gguf or (GGUF_TYPES[0] if given.ollama else "")
    is_merged = given.merge or bool(given.gguf)
    if given.dtype != "auto" and not is_merged:
        raise OptionError(
            "--dtype applies only to merged weights; adapters and trained weights keep their dtype. Add --merge, or "
            "remove --dtype."
        )
    if given.llama_cpp and not (Path(given.llama_cpp) / "convert_hf_to_gguf.py").is_file():
        raise OptionError(f"--llama-cpp: {given.llama_cpp} has no convert_hf_to_gguf.py. Give a clone of llama.cpp.")
    given.request = read_request(
        given, device="cpu", is_merged=is_merged, takes_whole=bool(given.gguf), dtype=given.dtype
    )
    return given
