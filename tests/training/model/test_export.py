"""Files of a trained model: who may read them."""

import os

import pytest
from safetensors.torch import load_file

from lightning_fastft.hf.export import export_adapters, export_merged
from lightning_fastft.training.reward import RewardTuner
from tests.support.fine_tuners import tuner, word_tokenizer
from tests.support.tuners import make_tuner


@pytest.fixture(params=[0o022, 0o027], autouse=True)
def umask(request):
    """The umask of a process, and what it was before."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def built(make):
    make.configure_model()
    return make


def permissions(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.mark.parametrize(
    "write",
    [
        lambda out: built(tuner("full", tokenizer=word_tokenizer())).save_pretrained(str(out)),
        lambda out: built(tuner("lora", tokenizer=word_tokenizer())).save_pretrained(str(out)),
        lambda out: built(make_tuner(RewardTuner)).save_pretrained(str(out)),
        lambda out: export_adapters(built(tuner("lora")).model, out, tokenizer=word_tokenizer()),
        lambda out: export_merged(built(tuner("lora")).model, out, tokenizer=word_tokenizer(), card="text"),
    ],
    ids=["whole", "adapters", "reward", "exported adapters", "exported merged"],
)
def test_weights_have_the_permissions_of_other_new_files(tmp_path, write):
    write(tmp_path / "out")
    (tmp_path / "other").touch()
    found = permissions(tmp_path / "out")
    assert any(name.endswith(".safetensors") for name in found)
    assert {*found.values()} == {permissions(tmp_path)["other"]}


def test_a_tied_head_is_one_tensor_with_the_embedding(tmp_path):
    model = built(tuner("lora")).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    exported = export_merged(model, tmp_path / "out", tokenizer=None)
    assert exported.num_tensors == len(load_file(tmp_path / "out/model.safetensors"))
