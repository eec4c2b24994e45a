"""Convert a Hugging Face folder to GGUF with the script of llama.cpp."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from lightning_fastft.checkpoint.atomic import part_beside
from lightning_fastft.core.errors import FastFTError, UnsupportedModelError
from lightning_fastft.core.extras import pip_line

SCRIPT = "convert_hf_to_gguf.py"
# llama.cpp's converter skips lm_head.weight of these, and the loader reads the embedding in its place.
_HEAD_IS_EMBEDDING = ("gemma", "gemma2")


def check_head(folder: Path) -> None:
    """Refuse a model whose head llama.cpp would replace by the embedding.

    Raises:
        UnsupportedModelError: The head of a Gemma or Gemma 2 has a weight of its own.

    Source:
        conversion/gemma.py and src/models/gemma2.cpp of llama.cpp; its issue 9065. Later Gemmas keep their head.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] in _HEAD_IS_EMBEDDING and config.get("tie_word_embeddings") is False:
        raise UnsupportedModelError(
            f"llama.cpp would drop the head of {folder} ({config['model_type']}): it reads the embedding in its place, "
            "and here both have a weight of their own (tie_word_embeddings is false). Train adapters on neither "
            "embed_tokens nor lm_head, or serve the folder itself with transformers; it is complete."
        )


def find_script(llama_cpp: str) -> str | None:
    """Return the path of llama.cpp's script in a clone, or on PATH if none is given; None if it is not there."""
    return str(Path(llama_cpp) / SCRIPT) if llama_cpp else shutil.which(SCRIPT)


def conversion_command(folder: Path, file: Path, *, type_name: str, llama_cpp: str) -> list[str]:
    """Return the words that convert a folder, with a place to fill in for a script that is not found."""
    found = find_script(llama_cpp)
    python = [sys.executable] if found else ["python"]
    return [*python, found or f"llama.cpp/{SCRIPT}", str(folder), "--outfile", str(file), "--outtype", type_name]


def convert_to_gguf(folder: Path, file: Path, *, type_name: str, llama_cpp: str) -> str:
    """Write a GGUF file, where llama.cpp's script is found; the file gets its name when it is complete.

    Returns:
        The command to run where the script is not found, else "".

    Raises:
        FastFTError: The script failed; the message has the end of its output.
    """
    command = conversion_command(folder, file, type_name=type_name, llama_cpp=llama_cpp)
    if not find_script(llama_cpp):
        return shlex.join(command)
    with part_beside(file) as part:
        command[command.index("--outfile") + 1] = str(part)
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
        is_written = done.returncode == 0 and part.is_file() and part.stat().st_size > 0
        if is_written:
            part.rename(file)
    if not is_written:
        end = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        advice = ""
        if "No module named" in end:
            advice = f" Install what its script imports: {pip_line('gguf')}."
        elif "pre-tokenizer was not recognized" in end:
            advice = (
                " llama.cpp converts the tokenizers of published models only, and that of this model is none of them."
            )
        raise FastFTError(
            f"llama.cpp did not write {file} (exit status {done.returncode}): {end}.{advice} The folder itself is "
            "complete."
        )
    return ""
