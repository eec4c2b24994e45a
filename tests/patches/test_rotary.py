"""longrope and dynamic rotary scaling: packed documents on both sides of the limit against each document alone."""

import copy
import pickle

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.patches.rotary import install_document_rotary
from tests.support.host_waits import count_host_waits
from tests.support.packs import assert_close, make_batch, make_documents, run_one_by_one, run_packed, take_gradients
from tests.support.tiny_models import VOCABULARY, build_tiny

LIMIT = 8
LENGTHS = (5, 20, 8, 1, 9, 13)
MIXED = {"both": LENGTHS, "short": (5, 8, 1), "long": (20, 9, 13)}


def longrope(half_width, **more):
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(half_width)],
        "long_factor": [2.0 + i for i in range(half_width)],
    }
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": LIMIT,
        **factors,
        **more,
    }


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build_minicpm3():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "minicpm3",
        **SIZES,
        num_hidden_layers=2,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        rope_parameters=longrope(4, factor=4.0),
        dim_model_base=32,
        scale_emb=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def build_granite_swa():
    """The model holds a list of rotary embeddings, one for each base of its layers; the one beside it is not used."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "granite_swa",
        **SIZES,
        num_hidden_layers=3,
        num_key_value_heads=2,
        sliding_window=5,
        layer_rope_theta=[10000.0, 500.0, 0],
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=longrope(4, factor=4.0),
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


BUILDERS = {
    "phi3": lambda: build_tiny(
        "phi3", head_dim=8, sliding_window=None, rope_parameters=longrope(4), original_max_position_embeddings=LIMIT
    ),
    "llama_dynamic": lambda: build_tiny(
        "llama",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        max_position_embeddings=LIMIT,
    ),
    "qwen3_longrope": lambda: build_tiny("qwen3", rope_parameters=longrope(8, factor=4.0)),
    "phimoe": lambda: build_tiny("phimoe", head_dim=8, rope_parameters=longrope(4, short_mscale=1.1, long_mscale=1.3)),
    "minicpm3": build_minicpm3,
    **({"granite_swa": build_granite_swa} if "granite_swa" in CONFIG_MAPPING else {}),
}


@pytest.mark.covering
@pytest.mark.parametrize("lengths", MIXED.values(), ids=MIXED.keys())
@pytest.mark.parametrize("name", BUILDERS)
def test_each_document_gets_the_angles_it_gets_alone(name, lengths):
    # In training, phimoe draws its experts at random.
    model, documents = BUILDERS[name]().train(name != "phimoe"), make_documents(lengths)
    batch, patcher = make_batch(lengths), ModelPatcher()
    # The step after a longer pack: nothing of it may stay.
    install_packed_training(model, patcher, checkpointing=OffloadCheckpointing("recompute"))
    run_packed(model, make_batch((40, 3)))
    take_gradients(model)
    batch.context.output_logits = True
    loss, logits = run_packed(model, batch)
    gradients = take_gradients(model)
    patcher.undo()
    loss_alone, logits_alone = run_alone(BUILDERS[name], model, documents, num_items=batch.context.num_items)
    assert_close(loss, loss_alone)
    assert_close(logits, logits_alone)
    assert_close(gradients, take_gradients(model), bound=2e-5)


def run_alone(build, model, documents, *, num_items):
    """One document at a time, with rotary embeddings that saw no document before (transformers' "dynamic"
    remembers the longest one).
    """
    total, logits = 0.0, []
    for document in documents:
        fresh = build().model
        for name in {"rotary_emb", "rotary_embs"} & {*dict(fresh.named_children())}:
            setattr(model.model, name, fresh.get_submodule(name))
        loss, of_document = run_one_by_one(model, [document], num_items=num_items)
        total += loss
        logits.append(of_document)
    return total, torch.cat(logits)


def build_gemma3(**scaling):
    """Angles that depend on length in the layers without a window alone."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    parameters = {"sliding_attention": plain, "full_attention": {**plain, **scaling}}
    return build_tiny("gemma3_text", rope_parameters=parameters, max_position_embeddings=LIMIT)


@pytest.mark.parametrize(
    "build", [BUILDERS["llama_dynamic"], lambda: build_gemma3(rope_type="dynamic", factor=4.0)], ids=["llama", "gemma3"]
)
def test_a_document_that_runs_alone_does_not_remember_longer_ones(build):
    model, documents, batch = build(), make_documents(LENGTHS), make_batch(LENGTHS)
    install_packed_training(model, patcher := ModelPatcher(), attention="one_by_one")
    # A longer document of an earlier pack, too.
    model(**make_batch((40, 3)))
    loss, logits = run_packed(model, batch)
    gradients = take_gradients(model)
    patcher.undo()
    loss_alone, logits_alone = run_alone(build, model, documents, num_items=batch.context.num_items)
    assert_close(loss, loss_alone)
    assert_close(logits, logits_alone)
    assert_close(gradients, take_gradients(model), bound=2e-5)


@pytest.mark.parametrize("name", ["phi3", "llama_dynamic"])
def test_forward_without_a_context_and_undo_are_the_models_own(name):
    model, plain = BUILDERS[name]().eval(), BUILDERS[name]().eval()
    ids = torch.randint(3, VOCABULARY, (2, 12))
    patcher = ModelPatcher()
    statuses = install_packed_training(model, patcher).statuses
    assert [status.state for status in statuses if status.name == "rotary scaling"] == ["active"]
    model(**make_batch(LENGTHS))
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    patcher.undo()
    assert "forward" not in vars(model.model.rotary_emb)
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks


def test_plain_positions_are_left_alone():
    model = build_tiny("llama")
    names = [status.name for status in install_packed_training(model, ModelPatcher()).statuses]
    assert "rotary scaling" not in names
    assert "forward" not in vars(model.model.rotary_emb)


@pytest.mark.parametrize("name", ["phi3", "llama_dynamic", "minicpm3"])
def test_angles_of_documents_take_no_host_sync(name):
    model = BUILDERS[name]()
    install_packed_training(model, ModelPatcher())
    # Frequencies of longrope are made once in a run.
    model(**make_batch(LENGTHS))
    batch = make_batch(LENGTHS)
    with count_host_waits() as waits:
        model(**batch).loss.backward()
    assert waits.total == 0, waits.origin


@pytest.mark.usefixtures("unprepared_models")
def test_an_installed_model_can_be_copied_and_pickled():
    model = BUILDERS["phi3"]()
    install_document_rotary(model, ModelPatcher())
    batch = make_batch(LENGTHS)
    truth = model(**batch).loss
    assert torch.equal(copy.deepcopy(model)(**batch).loss, truth)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch).loss, truth)


def test_a_replaced_rotary_forward_is_refused():
    model = BUILDERS["phi3"]()
    model.model.rotary_emb.forward = lambda x, position_ids: None
    with pytest.raises(UnsupportedModelError, match="replaced"):
        install_packed_training(model, patcher := ModelPatcher())
    patcher.undo()
