"""A packed batch refuses a transformers model without packed attention, also without a Trainer; other code may read it."""

import copy
import pickle

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader

import lightning_fastft
from lightning_fastft import PackedTraining
from lightning_fastft.core.errors import ContextError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.training.fine_tuner import FineTuner
from tests.patches.test_rotary import LIMIT, longrope
from tests.support.packs import make_batch
from tests.support.tiny_models import HYBRIDS, MORE_DENSE, MORE_MOE, TINY, VOCABULARY, build_tiny
from tests.support.training_parts import quiet_trainer

WITHOUT_SDPA = {"gemma2", "gpt_oss"}
# Refused when they are prepared.
NEVER_PACKED = {"llama4_text", "minimax_m3_vl_text"}
NAMES = sorted({**TINY, **MORE_DENSE, **MORE_MOE, **HYBRIDS})
QUICK = {"qwen3", "mistral_windowed", "gemma3_text", "mixtral", "lfm2", "nemotron_h", "llama4_text"}
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.fault]) for name in NAMES]


@pytest.mark.covering
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_unprepared_model_is_refused(name, attention):
    model = build_tiny(name, attention="eager" if name in WITHOUT_SDPA else attention)
    with pytest.raises(ContextError, match="without packed attention"):
        model(**make_batch())


def test_a_hybrid_that_asks_for_packed_attention_alone_is_answered_with_the_fabric():
    lightning_fastft.register()
    with pytest.raises(ContextError, match="FastFTFabric; a model without recurrent layers may also"):
        build_tiny("lfm2", attention="fastft")(**make_batch())


@pytest.mark.parametrize("name", [param for param in FAMILIES if param.values[0] not in NEVER_PACKED])
def test_a_prepared_model_is_not_refused(name):
    model = build_tiny(name)
    install_packed_training(model, ModelPatcher())
    # The auxiliary loss reads the mask, behind the attention.
    asked = {"output_router_logits": True} if name in ("mixtral", "qwen3_moe") else {}
    assert model(**make_batch(), **asked).loss.isfinite()


@pytest.mark.parametrize("attention", ["flex_attention", "eager"])
def test_adapters_and_block_masks_are_refused(attention):
    model = get_peft_model(build_tiny("qwen3", attention=attention), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ContextError, match="without packed attention"):
        model(**make_batch())


@pytest.mark.parametrize("change", [lambda mask: mask, lambda mask: mask.bool(), lambda mask: mask.clone()[:, :]])
def test_a_changed_batch_is_refused(change):
    batch = pickle.loads(pickle.dumps(copy.deepcopy(make_batch())))
    batch = pickle.loads(pickle.dumps(copy.deepcopy({**batch})))
    with pytest.raises(ContextError, match="without packed attention"):
        build_tiny("qwen3")(**{**batch, "attention_mask": change(batch["attention_mask"])})


@pytest.mark.parametrize("pad_to", [None, 16])
def test_one_document_alone_needs_no_preparation(pad_to):
    assert build_tiny("qwen3")(**make_batch((9,), pad_to=pad_to)).loss.isfinite()


def test_a_prepared_model_without_the_context_is_refused():
    model, batch = build_tiny("qwen3"), make_batch()
    install_packed_training(model, ModelPatcher())
    with pytest.raises(ContextError, match=r"model\(\*\*batch\)"):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def test_an_unprepared_model_after_a_prepared_one_is_refused():
    teacher, batch = build_tiny("qwen3"), make_batch()
    install_packed_training(teacher, ModelPatcher())
    teacher(**batch)
    with pytest.raises(ContextError, match="without packed attention"):
        build_tiny("qwen3")(**batch)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "zamba2"])
def test_mixers_beside_packed_attention_are_refused(name):
    lightning_fastft.register()
    model = build_tiny(name)
    model.set_attn_implementation("fastft")
    with pytest.raises(ContextError, match="without packed attention"):
        model(**make_batch())


@pytest.mark.parametrize("longest", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_angles_of_the_longest_document_are_refused(longest, is_prepared):
    lightning_fastft.register()
    model = build_tiny(
        "phi3", head_dim=8, sliding_window=None, rope_parameters=longrope(4), original_max_position_embeddings=LIMIT
    )
    model.set_attn_implementation("fastft")
    if is_prepared:
        install_packed_training(model, ModelPatcher())
    batch = make_batch((3, longest))
    if is_prepared or longest == LIMIT:
        assert model(**batch).loss.isfinite()
    else:
        with pytest.raises(UnsupportedModelError, match="longrope"):
            model(**batch)


class BagOfWords(nn.Module):
    """No attention, so documents cannot see each other; it counts its tokens by the mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch, **keywords):
        logits = self.head(self.embedding(input_ids) * attention_mask[..., None])
        loss = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum") / num_items_in_batch
        return loss, attention_mask.sum().item(), (attention_mask == 1).all()


def test_code_outside_transformers_reads_the_mask():
    loss, num_tokens, is_whole = BagOfWords()(**make_batch())
    loss.backward()
    assert num_tokens == 29
    assert is_whole


def test_a_loader_of_ones_own_under_a_strategy_of_lightning(tmp_path):
    def fit(**options):
        module = FineTuner(build_tiny("qwen3"), dtype="float32", learning_rate=1e-3, warmup_steps=0)
        trainer = quiet_trainer(tmp_path, max_steps=2, **options)
        trainer.fit(module, DataLoader([make_batch(), make_batch(seed=1)], batch_size=None))
        return trainer.global_step

    with pytest.raises(ContextError, match="without packed attention"):
        fit()
    assert fit(callbacks=[PackedTraining()]) == 2
