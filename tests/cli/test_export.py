"""``fastft export``: what stock libraries read is what was trained, and what cannot be written leaves nothing
behind.
"""

import json
import shlex
import subprocess

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from lightning_fastft.checkpoint.folders import save_folder
from lightning_fastft.cli.command import main
from lightning_fastft.cli.export import WITHOUT_GGUF
from lightning_fastft.cli.trained import opening, writing
from lightning_fastft.cli.trained.gguf import SCRIPT
from lightning_fastft.core.errors import CheckpointNotSavedError, UnsupportedModelError
from lightning_fastft.hf import export
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import VOCAB_SIZE, packed_loader, quiet_trainer

register_strategies()

LORA = {"r": 4, "lora_alpha": 8}
# Layers that NF4 takes, and a head of its own.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
RUNS = {
    "lora": {"dtype": "float32", "lora": LORA},
    "bf16": {"dtype": "bfloat16", "lora": LORA, "adapter_dtype": "bfloat16"},
    "qlora": {"dtype": "bfloat16", "lora": LORA, "quantization": "nf4"},
    "full": {"dtype": "float32"},
}
IDS = torch.arange(3, 15).unsqueeze(0)


class Trained:
    """A run of some steps: its base, its checkpoint, and logits of the model as it was trained."""

    def __init__(self, folder, name, *, family="qwen3", tie_word_embeddings=False, **options):
        self.base, self.checkpoint = folder / "base", folder / "a.ckpt"
        torch.manual_seed(1)
        model = build_tiny(family, tie_word_embeddings=tie_word_embeddings, **SIZES)
        model.generation_config.max_new_tokens = 7
        model.save_pretrained(self.base)
        core = Tokenizer(
            models.WordLevel({"<eos>": 0, **{f"w{index}": index for index in range(1, VOCAB_SIZE)}}, unk_token="<eos>")
        )
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(self.base)
        module = FineTuner(str(self.base), learning_rate=2e-2, **{**RUNS[name], **options})
        trainer = quiet_trainer(folder, strategy="fastft", max_steps=4)
        trainer.fit(module, packed_loader(4))
        trainer.save_checkpoint(self.checkpoint)
        # PEFT's own arithmetic, without our low-precision copies.
        module.teardown("fit")
        with torch.no_grad():
            self.logits = module.model.eval()(IDS).logits.float()
        self.adapted = module.model
        module.save_pretrained(str(folder / "adapters"))
        self.adapters = folder / "adapters"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that returns a run by its name, trained once."""
    found = {}

    def train(name):
        if name not in found:
            found[name] = Trained(tmp_path_factory.mktemp(name), name)
        return found[name]

    return train


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "bf16"])
def test_adapters_of_a_checkpoint_load_in_stock_peft(name, trained, folder, capsys):
    run = trained(name)
    assert main(["export", str(run.checkpoint), "out"]) == 0
    text = capsys.readouterr().out
    assert "Wrote adapters to out" in text
    assert "largest difference of a logit 0.0e+00" in text
    base = AutoModelForCausalLM.from_pretrained(run.base, dtype="auto" if name == "lora" else torch.bfloat16)
    stock = PeftModel.from_pretrained(base, "out", autocast_adapter_dtype=False)
    assert torch.equal(logits_of(stock), run.logits)
    written = load_file("out/adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32 if name == "lora" else torch.bfloat16}
    assert AutoTokenizer.from_pretrained("out").eos_token_id == 0
    # As PEFT writes it: the generation configuration is read from the base.
    assert AutoModelForCausalLM.from_pretrained("out").generation_config.max_new_tokens == 7
    assert {path.name for path in folder.glob("out/*")} == {path.name for path in run.adapters.iterdir()}
    assert json.loads((folder / "out/adapter_config.json").read_text())["base_model_name_or_path"] == str(run.base)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "full"])
def test_folder_of_shards_is_exported_as_the_file_is(name, trained, folder):
    run = trained(name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    save_folder(torch.load(run.checkpoint), folder / "last.ckpt")
    dist.destroy_process_group()
    words = ["--merge"] if name == "lora" else []
    assert main(["export", "last.ckpt", "out", *words]) == 0
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert (logits_of(stock) - run.logits).norm() < 2e-6 * run.logits.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "bound", "words"),
    [
        ("lora", torch.float32, 2e-6, []),
        ("bf16", torch.bfloat16, 2**-5, []),
        # The factors are in bf16, their product is not.
        ("bf16", torch.float32, 2**-5, ["--dtype", "float32"]),
    ],
)
def test_merged_weights_are_base_plus_adapters_in_stock_transformers(
    name, dtype, bound, words, trained, folder, capsys
):
    run = trained(name)
    assert main(["export", str(run.checkpoint), "out", "--merge", *words]) == 0
    assert "Wrote merged weights to out" in capsys.readouterr().out
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert type(stock).__name__ == "Qwen3ForCausalLM"
    assert {parameter.dtype for parameter in stock.parameters()} == {dtype}
    # As far from the adapters as rounding, and far from the base.
    size = run.logits.norm()
    assert (logits_of(stock) - run.logits).norm() < bound * size
    base = AutoModelForCausalLM.from_pretrained(run.base, dtype=dtype)
    assert (logits_of(base) - run.logits).norm() > 0.1 * size
    # The formula of LoRA, weight by weight, to one rounding.
    adapted = dict(run.adapted.base_model.model.named_modules())
    layers = {key: layer for key, layer in adapted.items() if isinstance(layer, LoraLayer)}
    assert len(layers) == 14
    for key, layer in layers.items():
        a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        truth = base.get_submodule(key).weight.double() + 2.0 * b @ a
        off = (stock.get_submodule(key).weight.double() - truth).abs()
        assert bool((off <= 2 * torch.finfo(dtype).eps * truth.abs().max()).all())
    assert AutoTokenizer.from_pretrained("out").eos_token_id == 0
    assert sorted(path.suffix for path in folder.glob("out/*")) == [".json"] * 4 + [".md", ".safetensors"]


@pytest.mark.slow
def test_nf4_base_is_merged_dense_in_bf16_and_said(trained, folder, capsys):
    run = trained("qlora")
    assert main(["export", str(run.checkpoint), "out", "--merge"]) == 0
    assert "NF4 to bfloat16" in capsys.readouterr().out
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}
    assert getattr(stock.config, "quantization_config", None) is None
    distance = (logits_of(stock) - run.logits).norm() / run.logits.norm()
    assert distance < 2**-4
    # Merged into the base's own weights it would be further off.
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.bfloat16), run.adapters
    )
    assert (logits_of(plain) - run.logits).norm() / run.logits.norm() > 2 * distance


@pytest.mark.slow
def test_adapters_of_an_nf4_run_are_written_as_they_are(trained, folder):
    run = trained("qlora")
    assert main(["export", str(run.checkpoint), "out"]) == 0
    expected = load_file(run.adapters / "adapter_model.safetensors")
    written = load_file("out/adapter_model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_all_weights_of_a_checkpoint_become_a_model(trained, folder, answer):
    run = trained("full")
    assert answer(["export", str(run.checkpoint), "out"])[0] == 0
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained("out", dtype="auto")), run.logits)
    assert json.loads((folder / "out/generation_config.json").read_text())["max_new_tokens"] == 7
    status, text = answer(["export", str(run.checkpoint), "more", "--merge"])
    assert status == 1
    assert "no adapters" in text
    words = ["--gguf", "bf16", "--dtype", "bfloat16"]
    assert answer(["export", str(run.checkpoint), "narrow", *words])[0] == WITHOUT_GGUF
    assert AutoModelForCausalLM.from_pretrained("narrow", dtype="auto").dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_random_base_is_drawn_again_to_be_merged(dtype, tmp_path, folder):
    config = build_tiny("qwen3", **SIZES).config.to_dict()
    module = FineTuner(config, init="random", learning_rate=2e-2, **{**RUNS["lora"], "dtype": dtype})
    torch.manual_seed(11)
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    trainer.fit(module, packed_loader(3))
    trainer.save_checkpoint("a.ckpt")
    torch.manual_seed(12)
    assert main(["export", "a.ckpt", "out", "--merge"]) == 0
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    expected = logits_of(module.model)
    assert (logits_of(stock) - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.slow
def test_a_folder_of_adapters_is_merged_into_its_base(trained, folder, capsys):
    run = trained("lora")
    assert main(["export", str(run.adapters), "out", "--merge", "--dtype", "float32"]) == 0
    assert f"merged into the weights of {run.base} as its files hold them" in capsys.readouterr().out
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert (logits_of(stock) - run.logits).norm() < 2e-6 * run.logits.norm()
    (folder / "moved").symlink_to(run.base)
    assert main(["export", str(run.adapters), "again", "--base", "moved"]) == 0
    assert json.loads((folder / "again/adapter_config.json").read_text())["base_model_name_or_path"] == "moved"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_experts_with_adapters_are_merged(quantization, tmp_path, folder):
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "target_parameters": stacks}
    run = Trained(tmp_path, "bf16", family="qwen3_moe", lora=lora, adapter_dtype="float32", quantization=quantization)
    assert main(["export", str(run.checkpoint), "out", "--merge"]) == 0
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert (logits_of(stock) - run.logits).norm() < 2**-3 * run.logits.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{checkpoint}"], "needs OUT"),
        (["{checkpoint}", "out", "--merg"], "Did you mean --merge?"),
        (["{checkpoint}", "taken"], "taken already exists and is not overwritten"),
        (["{base}", "out"], "whole model"),
        (["bare", "out"], "neither a checkpoint of a FineTuner nor a folder"),
        (["{checkpoint}", "out", "--dtype", "bfloat16"], "--dtype"),
        (["{checkpoint}", "out", "--merge", "--dtype", "int8"], "--dtype must be one of"),
        (["{checkpoint}", "out", "--device", "abacus"], "--device must be a device of torch"),
        (["other.ckpt", "out"], "not a checkpoint of a FineTuner"),
        (["given.ckpt", "out"], "Add --base NAME"),
        (["drawn.ckpt", "out"], "belong to random weights"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(words, reason, trained, folder, answer):
    run = trained("lora")
    (folder / "taken").mkdir()
    (folder / "bare").mkdir()
    torch.save({"state_dict": {}}, "other.ckpt")
    seed = {"name": None, "init": "given", "seed": 0}
    torch.save(
        {"state_dict": {}, "fastft_base": seed, "hyper_parameters": {"lora": LORA, "init": "pretrained"}}, "given.ckpt"
    )
    torch.save(
        {"state_dict": {}, "fastft_base": seed, "hyper_parameters": {"lora": LORA, "init": "random", "model": "x"}},
        "drawn.ckpt",
    )
    before = sorted(folder.iterdir())
    status, text = answer(["export", *(word.format(checkpoint=run.checkpoint, base=run.base) for word in words)])
    assert status == 1
    assert reason in text
    assert sorted(folder.iterdir()) == before


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(folder, answer, monkeypatch):
    (folder / "lora.ckpt").touch()
    (folder / "notes.txt").write_text("a file")
    monkeypatch.setattr(writing, "open_trained", lambda request: pytest.fail("the model is loaded"))
    status, text = answer(["export", "lora.ckpt", "notes.txt/out"])
    assert status == 1
    assert f"notes.txt/out cannot be written: {folder / 'notes.txt'} is a file" in text


def test_a_source_that_is_not_there_is_said_to_be_missing(folder, answer):
    status, text = answer(["export", "runs/none.ckpt", "out"])
    assert status == 1
    assert text.startswith("error: OptionError: ")
    assert "runs/none.ckpt" in text
    assert str(folder) in text
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused(trained, folder, answer):
    run = trained("lora")
    content = bytearray(run.checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "bad.ckpt").write_bytes(content)
    status, text = answer(["export", "bad.ckpt", "out"])
    assert status == 1
    # A progress bar of what was loaded may stand before it.
    assert "error: DamagedCheckpointError" in text
    assert [path.name for path in folder.iterdir()] == ["bad.ckpt"]


# What is written is compared with what was trained.


def small_adapted(*, scale=0.3, family="qwen3", targets=("q_proj", "down_proj"), sizes=None, **lora):
    """A model with adapters that do something."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_tiny(family, **sizes or {}), LoraConfig(r=2, target_modules=list(targets), **lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=scale)
    return model.eval()


def spoil_on_save(model, monkeypatch, *, file, spoil):
    """Have one tensor of what a model writes differ from what it holds."""
    save = type(model).save_pretrained

    def save_and_spoil(self, folder, **options):
        save(self, folder, **options)
        tensors = load_file(f"{folder}/{file}")
        spoil(tensors)
        save_file(tensors, f"{folder}/{file}", metadata={"format": "pt"})

    monkeypatch.setattr(type(model), "save_pretrained", save_and_spoil)


def lose_one(tensors):
    tensors.pop(sorted(tensors)[0])


def change_one(tensors):
    tensors[sorted(tensors)[0]].view(-1)[0] += 1e-3


def narrow_one(tensors):
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize("kind", ["adapters", "merged"])
def test_full_disk_is_no_traceback_and_leaves_nothing(kind, tmp_path, monkeypatch):
    def fill(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    model = small_adapted()
    monkeypatch.setattr(model if kind == "adapters" else model.get_base_model(), "save_pretrained", fill)
    write = export.export_adapters if kind == "adapters" else export.export_merged
    with pytest.raises(CheckpointNotSavedError, match=r"out was not written: .*No space left.* Nothing is left"):
        write(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covering
@pytest.mark.parametrize("spoil", [lose_one, change_one, narrow_one])
@pytest.mark.parametrize("kind", ["adapters", "merged"])
def test_what_reads_back_otherwise_is_not_kept(kind, spoil, tmp_path, monkeypatch):
    model = small_adapted()
    if kind == "adapters":
        spoil_on_save(model, monkeypatch, file="adapter_model.safetensors", spoil=spoil)
        with pytest.raises(CheckpointNotSavedError, match="out was not written"):
            export.export_adapters(model, tmp_path / "out", tokenizer=None)
    else:
        spoil_on_save(model.get_base_model(), monkeypatch, file="model.safetensors", spoil=spoil)
        with pytest.raises(CheckpointNotSavedError, match="out was not written"):
            export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []


def merge_twice_as_strong(model):
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["default"] *= 2.0
    return model.base_model.merge_and_unload()


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merge", [lambda model: model.unload(), merge_twice_as_strong])
def test_a_merge_that_loses_or_doubles_the_adapters_is_refused(merge, dtype, tmp_path, monkeypatch):
    model = small_adapted().to(dtype)
    monkeypatch.setattr(type(model), "merge_and_unload", lambda self, **options: merge(self), raising=False)
    with pytest.raises(UnsupportedModelError, match="Merging changed the logits of Qwen3ForCausalLM"):
        export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []


def test_long_sums_of_a_wide_model_in_fp32_do_not_stop_a_merge(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4}
    torch.manual_seed(1)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    model = small_adapted(targets=targets, sizes={**sizes, "num_key_value_heads": 4, "num_hidden_layers": 1})
    # That of the model that is read back.
    model.get_base_model().set_attn_implementation("sdpa")
    assert export.export_merged(model, tmp_path / "out", tokenizer=None).merge_difference < 1e-5


def test_biases_of_adapters_are_merged_only_into_biases(tmp_path):
    model = small_adapted(family="qwen2", lora_bias=True)
    with pytest.raises(UnsupportedModelError, match="lora_bias"):
        export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []
    model = small_adapted(family="qwen2", targets=("q_proj",), lora_bias=True)
    assert export.export_merged(model, tmp_path / "out", tokenizer=None).merge_difference < 1e-5


# Its two hybrid layers share one block of attention, and each has adapters of its own.
SHARED_BLOCK = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_mem_blocks": 1,
    # Without it transformers gives each layer a block.
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("targets", [("q_proj",), ("gate_up_proj", "in_proj")])
def test_adapters_of_a_weight_that_layers_share_are_not_merged(targets, tmp_path):
    model = small_adapted(family="zamba2", targets=targets, sizes=SHARED_BLOCK)
    with pytest.raises(
        UnsupportedModelError, match=rf"layers\.1.*{targets[0]}.*layers\.3.*{targets[0]} share one weight"
    ):
        export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []
    model = small_adapted(family="zamba2", targets=("in_proj",), sizes=SHARED_BLOCK)
    for parameter in model.parameters():
        # Recurrent layers with weights as large as these amplify rounding.
        parameter.data *= 0.3
    assert export.export_merged(model, tmp_path / "out", tokenizer=None).merge_difference < 1e-5


TIED = (
    (["embed_tokens"], {}),
    (["lm_head"], {}),
    (["embed_tokens", "lm_head"], {}),
    (["embed_tokens"], {"ensure_weight_tying": True}),
)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen2_5_vl"])
@pytest.mark.parametrize(("targets", "options"), TIED)
def test_adapters_of_a_tied_embedding_are_merged_into_two_weights(family, targets, options, tmp_path):
    model = small_adapted(
        family=family,
        targets=["q_proj", *targets],
        sizes={"tie_word_embeddings": True},
        init_lora_weights=False,
        **options,
    )
    expected = logits_of(model)
    exported = export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert exported.is_untied
    auto = AutoModelForImageTextToText if family == "qwen2_5_vl" else AutoModelForCausalLM
    stock = auto.from_pretrained(tmp_path / "out", dtype="auto")
    assert not stock.config.get_text_config(decoder=True).tie_word_embeddings
    assert (logits_of(stock) - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.parametrize(("family", "is_kept"), [("gemma2", False), ("gemma3_text", True)])
def test_gguf_without_the_head_of_a_model_is_refused(family, is_kept, folder, answer):
    build_tiny(family, tie_word_embeddings=False).save_pretrained("untied")
    build_tiny(family, tie_word_embeddings=True).save_pretrained("tied")
    status, text = answer(["export", "untied", "out", "--gguf", "f32"])
    assert status == (WITHOUT_GGUF if is_kept else 1)
    assert is_kept or ("drop the head" in text and "No GGUF file yet" not in text)
    status, text = answer(["export", "untied", "out", "--gguf", "f32"])
    assert (status, "drop the head" in text, SCRIPT in text) == (1, not is_kept, is_kept)
    assert AutoModelForCausalLM.from_pretrained("out").lm_head.weight.shape[0] == VOCAB_SIZE
    assert answer(["export", "tied", "other", "--gguf", "f32"])[0] == WITHOUT_GGUF


@pytest.mark.parametrize("words", [["--gguf", "f32"], ["--gguf", "f32", "--ollama"]])
def test_a_second_call_says_how_to_convert_what_the_first_one_left(words, folder, answer):
    build_tiny("qwen3").save_pretrained("base")
    assert answer(["export", "base", "out", *words])[0] == WITHOUT_GGUF
    clone = folder / "clone"
    clone.mkdir()
    (clone / SCRIPT).write_text("import sys\nopen(sys.argv[sys.argv.index('--outfile') + 1], 'wb').write(b'GGUF')\n")
    status, text = answer(["export", "base", "out", *words, "--llama-cpp", "clone"])
    assert status == 1
    command = next(line for line in text.splitlines() if SCRIPT in line)
    subprocess.run(shlex.split(command), check=True)
    assert (folder / "out/out-f32.gguf").read_bytes() == b"GGUF"
    for others in (words, ["--gguf", "f16"] if "--ollama" not in words else ["--ollama"]):
        status, text = answer(["export", "base", "out", *others])
        assert status == 1
        # A Modelfile of another GGUF file is written only with a new folder.
        assert (SCRIPT in text) == (others == ["--gguf", "f16"])


@pytest.mark.slow
def test_command_names_weights_that_are_no_longer_tied(tmp_path, folder, capsys):
    lora = {**LORA, "target_modules": ["q_proj", "embed_tokens"]}
    run = Trained(tmp_path, "lora", tie_word_embeddings=True, lora=lora)
    assert main(["export", str(run.checkpoint), "out", "--merge"]) == 0
    assert "tie_word_embeddings" in capsys.readouterr().out
    stock = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert (logits_of(stock) - run.logits).norm() < 2e-6 * run.logits.norm()


def test_tied_weights_that_no_adapter_changes_stay_tied(tmp_path):
    model = small_adapted(sizes={"tie_word_embeddings": True})
    assert not export.export_merged(model, tmp_path / "out", tokenizer=None).is_untied
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings


def test_refusal_of_a_merge_in_fp32_does_not_name_fp32(tmp_path, monkeypatch):
    model = small_adapted()
    monkeypatch.setattr(type(model), "merge_and_unload", lambda self, **options: self.unload(), raising=False)
    with pytest.raises(UnsupportedModelError, match="Merging changed") as caught:
        export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert "fp32" not in str(caught.value)


def test_another_dtype_is_seen_where_the_values_are_the_same(tmp_path, monkeypatch):
    """Logits would be the same: PEFT widens what it reads."""
    model = small_adapted()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().float()
    spoil_on_save(model, monkeypatch, file="adapter_model.safetensors", spoil=narrow_one)
    with pytest.raises(CheckpointNotSavedError, match=r"bfloat16 .* read"):
        export.export_adapters(model, tmp_path / "out", tokenizer=None)


def test_a_model_that_computes_otherwise_is_not_kept(tmp_path, monkeypatch):
    """Keys, dtypes and values are right; what stands beside them is not."""
    model = small_adapted()
    inner = type(model.get_base_model())
    save = inner.save_pretrained

    def save_and_spoil(self, folder, **options):
        save(self, folder, **options)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))

    monkeypatch.setattr(inner, "save_pretrained", save_and_spoil)
    with pytest.raises(CheckpointNotSavedError, match="with logits that differ by"):
        export.export_merged(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == []


def test_dtype_of_merged_weights_is_the_runs_then_the_files(tmp_path):
    build_tiny("qwen3").to(torch.float16).save_pretrained(tmp_path)
    base = {"model": str(tmp_path), "dtype": "auto"}
    asked = [
        opening.Request(tmp_path, torch.device("cpu"), is_merged=True, dtype=dtype) for dtype in ("auto", "float32")
    ]
    assert opening._merge_dtype(asked[0], base) == "float16"
    assert opening._merge_dtype(asked[0], {**base, "dtype": "float32"}) == "float32"
    assert opening._merge_dtype(asked[0], {**base, "quantization": "nf4"}) == "bfloat16"
    assert opening._merge_dtype(asked[1], {**base, "quantization": "nf4"}) == "float32"


def test_a_place_that_fills_up_meanwhile_is_left_alone(tmp_path, monkeypatch):
    model = small_adapted()
    save = type(model).save_pretrained

    def save_late(self, folder, **options):
        save(self, folder, **options)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(type(model), "save_pretrained", save_late)
    with pytest.raises(export.OptionError, match="is not overwritten"):
        export.export_adapters(model, tmp_path / "out", tokenizer=None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda model, out: export.export_adapters(model, out, tokenizer=None),
        lambda model, out: export.export_merged(model, out, tokenizer=None),
        export.save_adapters,
    ],
)
def test_leftovers_of_a_killed_process_are_removed_by_the_next(write, tmp_path):
    for name in ("out", "other"):
        (tmp_path / f".{name}.0123abcd.part").mkdir()
        (tmp_path / f".{name}.0123abcd.part" / "model.safetensors").write_bytes(b"half")
    model = small_adapted()
    # That of the model that is read back.
    model.get_base_model().set_attn_implementation("sdpa")
    write(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.0123abcd.part", "out"]
