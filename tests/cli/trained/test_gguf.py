"""What is said when llama.cpp's script writes no file."""

import pytest

from lightning_fastft.cli.trained.gguf import SCRIPT, convert_to_gguf
from lightning_fastft.core.errors import FastFTError


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ModuleNotFoundError(\"No module named 'sentencepiece'\")", r"lightning-fastft\[gguf\]"),
        ("NotImplementedError('BPE pre-tokenizer was not recognized - update it')", "tokenizers of published models"),
        ("ValueError('other')", r"other\. The folder itself is complete"),
    ],
)
def test_an_error_of_the_script_is_explained(error, advice, tmp_path):
    (tmp_path / SCRIPT).write_text(f"raise {error}\n")
    with pytest.raises(FastFTError, match=advice):
        convert_to_gguf(tmp_path, tmp_path / "a.gguf", type_name="f16", llama_cpp=str(tmp_path))
