"""LitGPT folders are refused by name and converted; a fake of LitGPT's converter writes the same file."""

import resource
import sys

import huggingface_hub
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from lightning_fastft.cli.command import main
from lightning_fastft.core.errors import (
    CheckpointNotSavedError,
    DataError,
    MissingDependencyError,
    OptionError,
    UnsafeCheckpointError,
)
from lightning_fastft.hf.loading.litgpt import convert_litgpt
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import build_tiny

DOUBLE = """
import torch
def convert_lit_checkpoint(checkpoint_dir, output_dir):
    print("arguments")
    state = torch.load(checkpoint_dir / "lit_model.pth", weights_only=True)
    torch.save({name.removeprefix("lit."): tensor for name, tensor in state.items()}, output_dir / "model.pth")
"""


@pytest.fixture
def has_litgpt(tmp_path, monkeypatch):
    scripts = tmp_path / "site" / "litgpt" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "convert_lit_checkpoint.py").write_text(DOUBLE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "litgpt"]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path):
    """A folder as LitGPT's fine-tuning leaves it; the configuration ties a head that was trained by itself."""
    folder = tmp_path / "lit"
    model = build_tiny("llama").bfloat16()
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(folder)
    torch.save({f"lit.{name}": tensor for name, tensor in model.state_dict().items()}, folder / "lit_model.pth")
    for name in ("model_config.yaml", "hyperparameters.yaml", "notes.txt"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.usefixtures("has_litgpt")
def test_a_converted_folder_holds_the_same_weights_in_the_same_dtype(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(folder), str(out)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    found = AutoModelForCausalLM.from_pretrained(out)
    expected = build_tiny("llama").bfloat16()
    assert found.dtype is torch.bfloat16
    assert not found.config.tie_word_embeddings
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in expected.state_dict().items())
    assert FineTuner(str(out)).source is not None


@pytest.mark.usefixtures("has_litgpt")
@pytest.mark.parametrize("name", ["lit.model.norm.weight", "lit.model.layers.1.mlp.up_proj.weight"])
def test_weights_that_do_not_fit_the_configuration_leave_nothing(folder, tmp_path, name):
    state = torch.load(folder / "lit_model.pth")
    state.pop(name)
    torch.save(state, folder / "lit_model.pth")
    with pytest.raises(DataError, match=name.removeprefix("lit.")):
        convert_litgpt(folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"lit", "site"}


@pytest.mark.usefixtures("has_litgpt")
@pytest.mark.parametrize("has_space", [False, True])
def test_a_full_disk_is_named_and_leaves_nothing(has_space, folder, tmp_path, monkeypatch):
    """has_space: for the file of LitGPT's converter, and not for the new one."""

    def fill(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if has_space:
        monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", fill)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointNotSavedError, match=r"out was not written: .* enough space"):
            convert_litgpt(folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in tmp_path.iterdir()} == {"lit", "site"}


@pytest.mark.usefixtures("has_litgpt")
def test_a_file_that_could_run_code_is_not_loaded(folder, tmp_path):
    torch.save({"a": torch.nn.Linear(1, 1)}, folder / "lit_model.pth")
    with pytest.raises(UnsafeCheckpointError, match="Linear"):
        convert_litgpt(folder, tmp_path / "out")


def test_without_litgpt_the_error_has_the_command(folder, tmp_path):
    with pytest.raises(MissingDependencyError, match=f"pip install litgpt && fastft convert {folder} "):
        convert_litgpt(folder, tmp_path / "out")


def test_folders_that_cannot_be_converted_say_why(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OptionError, match="already exists"):
        convert_litgpt(folder, folder)
    (folder / "config.json").unlink()
    with pytest.raises(OptionError, match=r"no config\.json"):
        convert_litgpt(folder, out)
    (folder / "lit_model.pth").rename(folder / "lit_model.pth.lora")
    with pytest.raises(OptionError, match=f"litgpt merge_lora {folder}"):
        convert_litgpt(folder, out)
    (folder / "lit_model.pth.lora").unlink()
    with pytest.raises(OptionError, match=r"not a LitGPT checkpoint: it has no lit_model\.pth"):
        convert_litgpt(folder, out)
    with pytest.raises(OptionError, match=r"There is no folder .*nothing"):
        convert_litgpt(tmp_path / "nothing", out)


def test_a_folder_of_both_formats_is_said_to_be_one(folder, tmp_path):
    """``litgpt download`` leaves the safetensors files that it read."""
    (folder / "model.safetensors").touch()
    with pytest.raises(OptionError, match=rf"has safetensors files too.* --model.model {folder}"):
        convert_litgpt(folder, tmp_path / "out")


def test_a_fine_tuner_answers_with_the_command(folder):
    with pytest.raises(OptionError, match=f"fastft convert {folder} {folder}-hf"):
        FineTuner(str(folder))
