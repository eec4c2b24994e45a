"""A checkpoint of adapters knows its base: files by headers and sampled blocks, a model in memory by sampled values."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors
from transformers import AutoModelForCausalLM

from lightning_fastft.cli.command import main
from lightning_fastft.core.errors import ResumeError
from lightning_fastft.hf.base_digest import digest_files, digest_tensors, digest_values
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.model.base_identity import check_base, describe_base, digest_base
from tests.support.fine_tuners import word_tokenizer
from tests.support.training_parts import packed_loader, quiet_trainer, tiny_llama

LORA = {"r": 4, "lora_alpha": 8}
# The resumed runs are longer.
pytestmark = pytest.mark.filterwarnings("ignore:Resumed with another setting")


def fit(folder, module, *, ckpt_path=None, max_steps=1):
    trainer = quiet_trainer(folder, strategy="fastft", max_steps=max_steps)
    trainer.fit(module, packed_loader(4), ckpt_path=ckpt_path)
    return trainer


def tuner(model, **options):
    return FineTuner(model, **{"lora": LORA, "dtype": "float32", "learning_rate": 1e-3, **options})


def save_base(folder, *, seed=0):
    torch.manual_seed(seed)
    tiny_llama().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def saved(tmp_path):
    """A base in files, and a checkpoint of adapters on it."""
    base = save_base(tmp_path / "base")
    fit(tmp_path, tuner(base)).save_checkpoint(tmp_path / "a.ckpt")
    return base, tmp_path / "a.ckpt"


def change(kind, base):
    """Replace the weights under the same path."""
    path = os.path.join(base, "model.safetensors")
    if kind == "other training":
        save_base(base, seed=1)
    elif kind == "one tensor":
        state = load_safetensors(path)
        state["model.layers.1.mlp.down_proj.weight"] += 0.5
        save_safetensors(state, path, metadata={"format": "pt"})
    else:
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)


@pytest.mark.parametrize("kind", ["other training", "one tensor", "other dtype"])
def test_other_weights_under_the_same_path_are_refused_unless_accepted(saved, tmp_path, kind):
    base, checkpoint = saved
    change(kind, base)
    with pytest.raises(ResumeError, match="accept_other_base"):
        fit(tmp_path, tuner(base), ckpt_path=checkpoint, max_steps=2)
    with pytest.warns(UserWarning, match="loaded all the same"):
        assert fit(tmp_path, tuner(base, accept_other_base=True), ckpt_path=checkpoint, max_steps=2).global_step == 2


def test_same_weights_elsewhere_are_the_same_base(saved, tmp_path):
    base, checkpoint = saved
    shutil.copytree(base, tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="model was"):
        assert fit(tmp_path, tuner(str(tmp_path / "elsewhere")), ckpt_path=checkpoint, max_steps=2).global_step == 2


def test_random_weights_are_another_base_than_those_of_files(saved, tmp_path):
    base, checkpoint = saved
    with pytest.raises(ResumeError, match="accept_other_base"):
        fit(tmp_path, tuner(base, init="random"), ckpt_path=checkpoint, max_steps=2)


def test_checkpoint_without_a_digest_goes_on(saved, tmp_path):
    base, checkpoint = saved
    content = torch.load(checkpoint, weights_only=True)
    del content["fastft_base"]["digest"]
    quiet_trainer(tmp_path, strategy="fastft").strategy.checkpoint_io.save_checkpoint(content, tmp_path / "old.ckpt")
    change("other training", base)
    assert fit(tmp_path, tuner(base), ckpt_path=tmp_path / "old.ckpt", max_steps=2).global_step == 2


def test_evaluation_is_refused_too(saved, tmp_path):
    base, checkpoint = saved
    change("other training", base)
    with pytest.raises(ResumeError, match="accept_other_base"):
        quiet_trainer(tmp_path, strategy="fastft").validate(
            tuner(base), packed_loader(1), ckpt_path=checkpoint, verbose=False
        )


def test_model_in_memory_is_known_by_its_values(tmp_path):
    def given(seed):
        torch.manual_seed(seed)
        return tiny_llama()

    fit(tmp_path, tuner(given(0))).save_checkpoint(tmp_path / "a.ckpt")
    assert fit(tmp_path, tuner(given(0)), ckpt_path=tmp_path / "a.ckpt", max_steps=2).global_step == 2
    with pytest.raises(ResumeError, match="accept_other_base"):
        fit(tmp_path, tuner(given(1)), ckpt_path=tmp_path / "a.ckpt", max_steps=2)


def test_permission_is_not_taken_from_a_checkpoint(saved):
    assert not FineTuner.load_from_checkpoint(saved[1], weights_only=True).accept_other_base
    assert "accept_other_base" not in torch.load(saved[1], weights_only=True)["hyper_parameters"]


def test_files_are_known_by_content_and_not_by_name_or_order(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        save_safetensors({"weight": torch.randn(700_000)}, tmp_path / name)
    digest = digest_files([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a").rename(tmp_path / "c")
    os.utime(tmp_path / "c", (1, 1))
    assert digest_files([tmp_path / "b", tmp_path / "c"]) == digest
    assert digest_files([tmp_path / "c"]) != digest


@pytest.mark.parametrize("damage", ["shift", "cut", "end", "header"])
def test_files_that_were_cut_or_shifted_have_another_digest(tmp_path, damage):
    path = tmp_path / "a"
    save_safetensors({"weight": torch.randn(700_000), "other": torch.zeros(3)}, path)
    digest, content = digest_files([path]), path.read_bytes()
    changed = {
        "shift": content[:5000] + b"\1" + content[5000:-1],
        "cut": content[:-8],
        "end": content[:-1] + bytes([content[-1] ^ 1]),
        "header": content.replace(b"other", b"orher"),
    }[damage]
    path.write_bytes(changed)
    assert digest_files([path]) != digest


def test_file_of_a_few_bytes_has_a_digest(tmp_path):
    (tmp_path / "a").write_bytes(b"ab")
    assert digest_files([tmp_path / "a"]).startswith("files:")


def test_trained_parameters_of_a_given_model_are_not_its_base():
    model = tiny_llama().requires_grad_(requires_grad=False)
    model.model.norm.weight.requires_grad_(requires_grad=True)
    digest = digest_tensors(model, is_trained_too=False)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert digest_tensors(model, is_trained_too=False) == digest != digest_tensors(model, is_trained_too=True)
    assert not digest_tensors(torch.nn.Dropout(), is_trained_too=True)


def test_export_refuses_another_base_unless_accepted(saved, tmp_path, capsys):
    base, checkpoint = saved
    other = save_base(tmp_path / "other", seed=1)
    for folder in (base, other):
        word_tokenizer().save_pretrained(folder)
    words = ["export", str(checkpoint), str(tmp_path / "out"), "--base", other]
    assert main(words) == 1
    assert "--accept-other-base" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="loaded all the same"):
        assert main([*words, "--accept-other-base"]) == 0, capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "again"), "--base", base]) == 0


def test_export_compares_a_model_that_was_given_with_the_files_of_a_base(tmp_path, capsys):
    base, other = save_base(tmp_path / "base"), save_base(tmp_path / "other", seed=1)
    given = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fit(tmp_path, tuner(given)).save_checkpoint(tmp_path / "a.ckpt")
    resized = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    resized.resize_token_embeddings(resized.config.vocab_size + 8)
    resized.save_pretrained(tmp_path / "resized")
    for folder in (base, other, tmp_path / "resized"):
        word_tokenizer().save_pretrained(folder)
    words = ["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--merge", "--base"]
    for folder in (other, tmp_path / "resized"):
        assert main([*words, str(folder)]) == 1
        assert "--accept-other-base" in capsys.readouterr().err
    assert main([*words, base, "--dtype", "bfloat16"]) == 0, capsys.readouterr().err


def test_values_are_compared_in_every_dtype_that_holds_them():
    model = tiny_llama()
    digest = digest_values(model).split()[0]
    assert digest_values(model.bfloat16()) == digest
    model.resize_token_embeddings(model.config.vocab_size + 1)
    assert digest_values(model) != digest
    model.lm_head.half()
    assert not digest_values(model)


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_of_a_model_is_compared_with_its_files_in_their_dtype(file_dtype, tmp_path):
    def read(dtype):
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)

    torch.manual_seed(0)
    model = tiny_llama()
    with torch.no_grad():
        # Values that are subnormal in fp16, and others that bf16 rounds.
        model.model.embed_tokens.weight[::2] *= 1e-5
    model.to(file_dtype).save_pretrained(tmp_path / "base")
    source = ModelSource(str(tmp_path / "base"))
    recorded = describe_base(None, seed=0, digest=digest_base(read(torch.float16), source=None))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        present = {"source": source, "seed": 0, "accept_other": False}
        check_base(recorded, digest=digest_base(read(dtype), source=source), **present)
        other = read(dtype)
        with torch.no_grad():
            other.model.norm.weight.mul_(1.5)
        # Another rounding than that of the files cannot be compared.
        if dtype is torch.bfloat16 and file_dtype is not torch.bfloat16:
            assert "halves" not in digest_base(other, source=source)
            continue
        with pytest.raises(ResumeError, match="other weights"):
            check_base(recorded, digest=digest_base(other, source=source), **present)


def test_a_checkpoint_of_a_peft_model_that_was_given_says_how_to_export_it(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    fit(tmp_path, FineTuner(adapted, learning_rate=1e-3)).save_checkpoint(tmp_path / "a.ckpt")
    assert (
        main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--base", save_base(tmp_path / "base")]) == 1
    )
    assert "load_from_checkpoint" in capsys.readouterr().err
