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


@pytest.mark.parametrize("end", ["raise OSError(28, 'No space left on device')", "sys.exit(0)"])
def test_a_file_gets_its_name_when_it_is_complete(end, tmp_path):
    """A half file would be uploaded, and Ollama would read it."""
    write = "open(sys.argv[sys.argv.index('--outfile') + 1], 'wb').write(b'GGUF')"
    (tmp_path / SCRIPT).write_text(f"import sys\n{write}\nassert not {str(tmp_path / 'a.gguf')!r} in sys.argv\n{end}\n")
    if "28" in end:
        with pytest.raises(FastFTError, match="No space left"):
            convert_to_gguf(tmp_path, tmp_path / "a.gguf", type_name="f16", llama_cpp=str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == [SCRIPT]
    else:
        assert convert_to_gguf(tmp_path, tmp_path / "a.gguf", type_name="f16", llama_cpp=str(tmp_path)) == ""
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", SCRIPT]


def test_a_script_that_writes_nothing_is_no_success(tmp_path):
    (tmp_path / SCRIPT).write_text("")
    with pytest.raises(FastFTError, match="exit status 0"):
        convert_to_gguf(tmp_path, tmp_path / "a.gguf", type_name="f16", llama_cpp=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [SCRIPT]
