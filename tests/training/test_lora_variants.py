"""Every variant of LoRA trains what transformers and PEFT train, document by document, and is saved, resumed and merged
as the adapter of the base that it was given.
"""

import copy
import json
from typing import NamedTuple

import bitsandbytes
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.cli.command import main
from lightning_fastft.core.errors import DataError, OptionError, ResumeError
from lightning_fastft.packing.collate import Document, collate
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.model.neftune import embedding_noise
from tests.support.fine_tuners import CONFIG
from tests.support.packs import assert_close, run_one_by_one, take_gradients
from tests.support.training_parts import VOCAB_SIZE, quiet_data, quiet_trainer

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ALL}
UNTIED = {**CONFIG, "intermediate_size": 128, "tie_word_embeddings": False, "initializer_range": 0.15}


class Variant(NamedTuple):
    lora: dict
    is_fused: bool = True
    has_lazy_head: bool = True
    base: str = "untied"


VARIANTS = {
    "rslora": Variant({"use_rslora": True}),
    "patterns": Variant({"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6}, "alpha_pattern": {"v_proj": 3}}),
    "pissa": Variant({"init_lora_weights": "pissa"}),
    "pissa with patterns and rslora": Variant(
        {"init_lora_weights": "pissa_niter_4", "use_rslora": True, "rank_pattern": {"q_proj": 2}}
    ),
    "olora": Variant({"init_lora_weights": "olora"}),
    "dora": Variant({"use_dora": True}),
    "dora of pissa": Variant({"use_dora": True, "init_lora_weights": "pissa"}),
    "lora_bias": Variant({"lora_bias": True}, is_fused=False),
    "modules_to_save": Variant({"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tokens": Variant({"trainable_token_indices": {"embed_tokens": [3, 5, 9]}}),
    "head": Variant({"target_modules": [*ALL, "embed_tokens", "lm_head"]}, has_lazy_head=False),
    "tied tokens": Variant({"trainable_token_indices": {"embed_tokens": [3, 5, 9]}}, base="tied"),
    "tied modules_to_save": Variant({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, base="tied"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of two base models: one with a head of its own, one whose head is the embedding."""
    folders = {}
    for name, config in (("untied", UNTIED), ("tied", {**UNTIED, "tie_word_embeddings": True})):
        torch.manual_seed(0)
        folders[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folders[name])
    return folders


def make_documents():
    """Documents for two full packs."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, VOCAB_SIZE, length) for length in (7, 12, 9, 7, 12, 9)]
    return [Document(row, row.copy()) for row in ids]


class Look(pl.Callback):
    """Keep the weights at the start of the training, and the gradients and loss of the first optimizer step."""

    def __init__(self):
        self.losses = []
        self.gradients = None

    def on_train_start(self, trainer, pl_module):
        self.start = {name: tensor.detach().clone() for name, tensor in pl_module.model.named_parameters()}
        self.table = {status.name: status for status in trainer.strategy.statuses()}

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.gradients is None:
            self.gradients = {
                name: parameter.grad.clone()
                for name, parameter in pl_module.model.named_parameters()
                if parameter.grad is not None
            }


def train(base, tmp_path, *, lora=None, seed=5, max_steps=2, callbacks=(), ckpt_path=None, **options):
    """Train on windows of two packs, one window an epoch; return the module, what was seen, and the trainer.

    The checkpoint after the first window is kept.
    """
    pl.seed_everything(seed, verbose=False)
    options = {"dtype": "float32", "learning_rate": 2e-2, "scheduler": "constant", "warmup_share": 0.0, **options}
    module, look = FineTuner(base, tokenizer=None, lora=lora, **options), Look()
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = quiet_trainer(
        tmp_path,
        strategy="fastft",
        max_steps=max_steps,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        callbacks=[look, FusedKernels(), keep, *callbacks],
    )
    rows = [{"input_ids": document.input_ids.tolist()} for document in make_documents()]
    data = quiet_data(rows, max_tokens=28)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, look, trainer


def open_base(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_trains_as_peft_does_and_is_reloaded_and_resumed(name, bases, tmp_path):
    variant = VARIANTS[name]
    base, lora = bases[variant.base], {**LORA, **variant.lora}
    module, look, _ = train(base, tmp_path, lora=lora)

    assert look.table["fused layers"].state == ("active" if variant.is_fused else "refused")
    assert look.table["loss head"].state == ("active" if variant.has_lazy_head else "inactive")

    # Stock transformers and PEFT from the same weights, each document alone.
    plain = get_peft_model(open_base(base), LoraConfig(**copy.deepcopy(lora))).train()
    with torch.no_grad():
        for parameter_name, parameter in plain.named_parameters():
            parameter.copy_(look.start[parameter_name])
    documents = make_documents()
    num_items = sum(len(document.input_ids) - 1 for document in documents)
    total = float(run_one_by_one(plain, documents, num_items=num_items)[0])
    assert sum(look.losses[:2]) == pytest.approx(total, rel=1e-5)
    assert_close(look.gradients, take_gradients(plain), bound=2e-5)
    # An initialisation changes no output.
    assert_close(logits(plain), logits(open_base(base)), bound=1e-5)

    trained = logits(module.model)
    assert (trained - logits(open_base(base))).norm() > 0.05 * trained.norm()
    module.save_pretrained(str(tmp_path / "adapter"))
    assert_close(logits(PeftModel.from_pretrained(open_base(base), str(tmp_path / "adapter"))), trained)

    resumed, _, _ = train(base, tmp_path, lora=lora, ckpt_path=tmp_path / "epoch=0.ckpt")
    for parameter_name, expected in module.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(parameter_name), expected), parameter_name


def test_pissa_is_exported_as_an_adapter_of_the_base_and_merged(bases, tmp_path):
    module, _, _ = train(bases["untied"], tmp_path, lora={**LORA, "init_lora_weights": "pissa"})
    trained = logits(module.model)
    for words in ([], ["--merge"]):
        out = tmp_path / f"out{len(words)}"
        assert main(["export", str(tmp_path / "epoch=1.ckpt"), str(out), *words]) == 0
        found = open_base(str(out)) if words else PeftModel.from_pretrained(open_base(bases["untied"]), str(out))
        assert_close(logits(found), trained)
    # Signs of singular vectors are no difference, another part of the base is.
    state = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    module.on_load_checkpoint(state)
    for numbers in state["fastft_base"]["initial"].values():
        numbers[0] += 0.1
    with pytest.raises(ResumeError, match="another part of the base"):
        module.on_load_checkpoint(state)


def test_adapters_go_on_from_a_folder_beside_frozen_ones(bases, tmp_path):
    base = bases["untied"]
    first, _, _ = train(base, tmp_path, lora={**LORA, "use_rslora": True, "rank_pattern": {"q_proj": 2}})
    first.save_pretrained(str(tmp_path / "first"))
    second, look, _ = train(base, tmp_path, adapter=str(tmp_path / "first"))
    for name, expected in first.model.named_parameters():
        assert torch.equal(look.start[name], expected), name
    assert look.table["fused layers"].state == "active"
    second.save_pretrained(str(tmp_path / "second"))
    assert_close(logits(PeftModel.from_pretrained(open_base(base), str(tmp_path / "second"))), logits(second.model))

    third, look, _ = train(base, tmp_path, lora=LORA, frozen_adapters=[str(tmp_path / "first")])
    assert "several adapters" in look.table["fused layers"].reason
    assert "other adapters: 1" in look.table["LoRA"].reason
    plain = PeftModel.from_pretrained(open_base(base), str(tmp_path / "first"), adapter_name="frozen0")
    plain.add_adapter("default", LoraConfig(**LORA))
    plain.base_model.set_adapter(["default", "frozen0"])
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(look.start[name])
        parameter.requires_grad_("default" in name)
    documents = make_documents()
    run_one_by_one(plain.train(), documents, num_items=sum(len(document.input_ids) - 1 for document in documents))
    assert_close(look.gradients, take_gradients(plain), bound=2e-5)
    for name, parameter in third.model.named_parameters():
        if "default" not in name:
            assert torch.equal(parameter, look.start[name]), name
    third.save_pretrained(str(tmp_path / "third"))
    assert not (tmp_path / "third" / "frozen0").exists()
    again = FineTuner.load_from_checkpoint(tmp_path / "epoch=1.ckpt")
    again.configure_model()


def test_adapters_of_another_base_are_refused_by_name(bases, tmp_path):
    get_peft_model(open_base(bases["tied"]), LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(OptionError, match=r"trained on .*tied.*accept_other_base"):
        FineTuner(bases["untied"], adapter=str(tmp_path / "adapter"), dtype="float32").configure_model()
    module = FineTuner(bases["untied"], adapter=str(tmp_path / "adapter"), dtype="float32", accept_other_base=True)
    module.configure_model()
    content = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    content.popitem()
    save_file(content, tmp_path / "adapter" / "adapter_model.safetensors")
    for options in (
        {"adapter": str(tmp_path / "adapter")},
        {"lora": LORA, "frozen_adapters": [str(tmp_path / "adapter")]},
    ):
        with pytest.raises(DataError, match=r"1 weights are missing in it, such as .*lora_"):
            FineTuner(bases["tied"], dtype="float32", accept_other_base=True, **options).configure_model()


def test_loftq_makes_up_for_what_nf4_loses(bases, tmp_path):
    base, lora = bases["untied"], {**LORA, "lora_alpha": 16}
    options = {"quantization": "nf4", "dtype": "float32"}
    module, look, _ = train(
        base, tmp_path, lora={**lora, "init_lora_weights": "loftq"}, max_steps=1, learning_rate=0.0, **options
    )
    assert look.table["fused layers"].state == "active"
    assert look.table["LoRA"].reason.endswith("; loftq")
    plain = FineTuner(base, lora=lora, **options)
    plain.configure_model()
    dense = open_base(base)
    for name, layer in module.model.named_modules():
        if hasattr(layer, "lora_A"):
            weight = dense.get_submodule(name.removeprefix("base_model.model.")).weight
            quantised = layer.get_base_layer().weight
            held = bitsandbytes.functional.dequantize_4bit(quantised.data, quantised.quant_state)
            lost = weight - held
            values = torch.linalg.svdvals(lost)[LORA["r"] :]
            assert_close((weight - held - layer.get_delta_weight("default")).norm(), values.norm(), bound=1e-4)
    module.save_pretrained(str(tmp_path / "adapter"))
    with open(tmp_path / "adapter" / "adapter_config.json") as file:
        assert json.load(file)["init_lora_weights"] is True


@pytest.mark.slow(seconds=5)
def test_eva_takes_the_directions_of_the_first_packs(bases, tmp_path):
    lora = {**LORA, "r": 2, "init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    module, look, _ = train(bases["untied"], tmp_path, lora=lora)
    ranks = {name: value.shape[0] for name, value in look.start.items() if "lora_A" in name}
    assert len(set(ranks.values())) > 1
    assert sum(ranks.values()) <= 2 * 14
    assert look.table["LoRA"].reason.endswith("; eva")
    directions = [value for name, value in look.start.items() if "lora_A" in name]
    for a_RD in directions:
        assert_close(a_RD @ a_RD.T, torch.eye(len(a_RD)), bound=1e-4)
    module.save_pretrained(str(tmp_path / "adapter"))
    trained = logits(module.model)
    assert_close(logits(PeftModel.from_pretrained(open_base(bases["untied"]), str(tmp_path / "adapter"))), trained)
    # A checkpoint holds the ranks, so that no data is needed.
    again = FineTuner.load_from_checkpoint(tmp_path / "epoch=1.ckpt", map_location="cpu")
    again.configure_model()
    assert {name: value.shape[0] for name, value in again.model.named_parameters() if "lora_A" in name} == ranks
    with pytest.raises(OptionError, match="PackedDataModule"):
        FineTuner(bases["untied"], lora=lora, dtype="float32").configure_model()


def test_lora_plus_has_pefts_groups_and_survives_a_resume(bases, tmp_path):
    base, lora = bases["untied"], {**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}
    options = {"lora": lora, "loraplus_lr_ratio": 8.0, "scheduler": "linear", "weight_decay": 0.1}
    module, _, trainer = train(base, tmp_path, **options)
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    ours = {
        names[id(parameter)]: group for group in trainer.optimizers[0].param_groups for parameter in group["params"]
    }
    theirs = create_loraplus_optimizer(module.model, torch.optim.AdamW, lr=2e-2, loraplus_lr_ratio=8.0)
    expected = {names[id(parameter)]: group["lr"] for group in theirs.param_groups for parameter in group["params"]}
    assert {name: group["initial_lr"] for name, group in ours.items()} == expected
    # The schedule moves all groups alike.
    assert len({round(group["lr"] / group["initial_lr"], 9) for group in ours.values()}) == 1
    resumed, _, _ = train(base, tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    for name, value in module.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), value), name


def test_neftune_is_drawn_by_document_and_resumed(bases, tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            # Called after the hook of the noise is in place, so it sees the noise.
            layer = pl_module.model.get_base_model().model.layers[0]
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(args[0].detach()), with_kwargs=True
            )

    base, options = bases["untied"], {"lora": LORA, "neftune_noise_alpha": 5.0}
    module, _, _ = train(base, tmp_path, callbacks=[Watch()], **options)
    embedding = module.model.get_input_embeddings()
    assert not embedding._forward_hooks
    data_ids = [document.input_ids for document in make_documents()]
    scaled = []
    rows = {tuple(ids): embedding(torch.as_tensor(ids)).detach() for ids in data_ids}
    lengths = []
    for packed in seen[:2]:
        # Find the order of the documents by their first rows: the noise is far smaller than the weights differ.
        place = 0
        while place < packed.shape[1]:
            ids = min(
                rows,
                key=lambda ids: (packed[0, place] - rows[ids][0]).norm() + (packed[0, place + 1] - rows[ids][1]).norm(),
            )
            noise = packed[0, place : place + len(ids)] - rows[ids]
            scaled.append(noise * (len(ids) * noise.shape[1]) ** 0.5 / 5.0)
            lengths.append(len(ids))
            place += len(ids)
    assert sorted(lengths) == sorted(len(ids) for ids in data_ids)
    for noise in scaled:
        assert 0.9 < float(noise.abs().max()) <= 1.001
        assert float(noise.std()) == pytest.approx(1 / 3**0.5, rel=0.1)
    assert not torch.equal(seen[0], seen[2])

    # The noise is that of the checkpoint's seed, like all other random numbers of a resumed run.
    with pytest.warns(UserWarning, match="seed_everything"):
        resumed, _, _ = train(base, tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt", seed=8, **options)
    for name, value in module.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), value), name


def test_noise_follows_the_length_of_each_document_and_its_seeds():
    embedding = torch.nn.Embedding(VOCAB_SIZE, 16)
    batch = collate(make_documents()[:2])

    with embedding_noise(embedding, batch, alpha=3.0, seeds=(1, 2)):
        one = embedding(batch["input_ids"]).detach()
    with embedding_noise(embedding, batch, alpha=3.0, seeds=(1, 2)):
        same = embedding(batch["input_ids"]).detach()
    with embedding_noise(embedding, batch, alpha=3.0, seeds=(1, 3)):
        other = embedding(batch["input_ids"]).detach()
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    added = (one - embedding(batch["input_ids"]).detach())[0].abs()
    assert 0.9 * 3.0 / (7 * 16) ** 0.5 < float(added[:7].max()) <= 3.0 / (7 * 16) ** 0.5
    assert 0.9 * 3.0 / (12 * 16) ** 0.5 < float(added[7:].max()) <= 3.0 / (12 * 16) ** 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {"init_lora_weights": "corda"}}, "preprocess_corda"),
        ({"lora": {"init_lora_weights": "lora_ga"}}, "preprocess_loraga"),
        ({"lora": {"init_lora_weights": "mica"}}, "frozen factors"),
        ({"lora": {"init_lora_weights": "pissa"}, "quantization": "nf4"}, "loftq"),
        ({"lora": {"init_lora_weights": "olora"}, "adapter_dtype": "bfloat16"}, "float32"),
        ({"lora": {"init_lora_weights": "loftq"}}, "quantization='nf4'"),
        ({"lora": {"init_lora_weights": "eva", "use_dora": True}}, "use_dora"),
        ({"loraplus_lr_ratio": 4.0}, "give lora"),
        ({"lora": {}, "loraplus_lr_ratio": 0.5}, "loraplus_lr_ratio"),
        ({"lora": {}, "neftune_noise_alpha": -1.0}, "neftune_noise_alpha"),
        ({"lora": {}, "adapter": "folder"}, r"--model\.lora null"),
        ({"adapter": "nowhere"}, "adapter_config.json"),
        ({"frozen_adapters": ["nowhere"]}, "give lora"),
        ({"lora": {}, "frozen_adapters": "nowhere"}, "list of folders"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        FineTuner(UNTIED, init="random", **options)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank_pattern": {"q_prj": 4}}, r"rank_pattern has 'q_prj'.*nearest: q_proj"),
        ({"alpha_pattern": {"layers.0.v_prj": 4}}, r"alpha_pattern .*nearest: v_proj"),
        ({"modules_to_save": ["lm_hed"]}, r"modules_to_save has 'lm_hed'.*nearest: lm_head"),
        ({"target_modules": "q_proj, v_proj"}, r"Write \[q_proj, v_proj\]"),
        ({"init_lora_weights": "pisa"}, r"Did you mean pissa\?"),
        ({"init_lora_weights": "PiSSA"}, r"Did you mean pissa\?"),
    ],
)  # fmt: skip
def test_names_that_peft_ignores_are_refused(lora, message):
    with pytest.raises(OptionError, match=message):
        FineTuner(UNTIED, init="random", lora=lora).configure_model()


@pytest.mark.parametrize("name", ["layers.7.q_proj", r".*\.q_pr.*", "self_attn.q_proj"])
def test_names_of_other_depths_and_patterns_are_left_to_peft(name):
    FineTuner(UNTIED, init="random", lora={"r": 2, "rank_pattern": {name: 4}}).configure_model()


@pytest.mark.parametrize("copied", ["embed_tokens", "lm_head"])
def test_tied_embeddings_that_were_trained_apart_are_exported_apart(bases, tmp_path, copied):
    module, _, _ = train(bases["tied"], tmp_path, lora={**LORA, "modules_to_save": [copied]}, max_steps=1)
    trained = logits(module.model)
    assert main(["export", str(tmp_path / "epoch=0.ckpt"), str(tmp_path / "adapters")]) == 0
    assert_close(logits(PeftModel.from_pretrained(open_base(bases["tied"]), str(tmp_path / "adapters"))), trained)
    assert main(["export", str(tmp_path / "epoch=0.ckpt"), str(tmp_path / "out"), "--merge"]) == 0
    assert_close(logits(open_base(str(tmp_path / "out"))), trained)
