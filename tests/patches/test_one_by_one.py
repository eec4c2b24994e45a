"""attention="one_by_one": each document of a pack through the whole model, with the model's own attention."""

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.lora import add_adapters, parse_lora
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import assert_close, make_batch, make_documents, run_one_by_one, run_packed, take_gradients
from tests.support.tiny_models import VOCABULARY
from tests.support.training_parts import quiet_data


def tiny_bloom():
    config = AutoConfig.for_model("bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_family_without_the_interface_is_exact(is_adapted):
    model = tiny_bloom()
    if is_adapted:
        lora = parse_lora({"r": 2, "init_lora_weights": False})
        model = add_adapters(model, lora=lora, adapter_dtype=torch.float32)
    keys, batch = list(model.state_dict()), make_batch()
    installed = install_packed_training(
        model, patcher := ModelPatcher(), checkpointing=OffloadCheckpointing(), attention="one_by_one"
    )
    assert {status.state for status in installed.statuses} == {"inactive"}
    loss, logits = run_packed(model, batch)
    gradients = take_gradients(model)
    assert batch.context.num_reads == 1
    patcher.undo()
    assert list(model.state_dict()) == keys
    expected, expected_logits = run_one_by_one(model, make_documents(), num_items=batch.context.num_items)
    assert_close(logits, expected_logits)
    assert_close(loss, expected)
    assert_close(gradients, take_gradients(model))


def test_labels_of_the_callers_own_cross_no_border():
    """labels = input_ids also labels the first token of each document and the pad tail."""
    model, batch = tiny_bloom().train(), make_batch()
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(), attention="one_by_one")
    inside = batch["input_ids"].clone()
    inside[0, batch.context.start_S1[:-1]] = -100
    inside[0, batch.context.num_real_tokens :] = -100
    keywords = {**dict(batch.items()), "num_items_in_batch": None}
    expected = model(**{**keywords, "labels": inside}).loss
    assert torch.equal(model(**{**keywords, "labels": batch["input_ids"].clone()}).loss, expected)
    planned = model(**{**keywords, "labels": inside, "num_items_in_batch": 3.0}).loss
    torch.testing.assert_close(expected, planned * 3.0 / int((inside != -100).sum()))


def test_without_a_context_the_model_is_its_own():
    model, ids = tiny_bloom().eval(), torch.arange(3, 12)[None]
    expected = model(input_ids=ids).logits
    install_packed_training(model, ModelPatcher(), attention="one_by_one")
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 11)


def test_inputs_beside_a_packed_batch_are_refused():
    model = tiny_bloom()
    install_packed_training(model, ModelPatcher(), attention="one_by_one")
    with pytest.raises(UnsupportedModelError, match="inputs_embeds"):
        model(**make_batch(), inputs_embeds=torch.zeros(1, 29, 32))


def test_positions_of_the_callers_own_are_refused():
    model, batch = tiny_bloom(), make_batch(pad_to=40)
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(), attention="one_by_one")
    with pytest.raises(UnsupportedModelError, match="position_ids"):
        model(**{**dict(batch.items()), "position_ids": batch["position_ids"] * 3})
    assert model(**{**dict(batch.items()), "position_ids": None}).loss == model(**batch).loss


def test_a_refusal_names_the_option_and_the_option_trains():
    rows = [{"input_ids": document.input_ids.tolist()} for document in make_documents((5, 11, 8))]
    data = quiet_data(rows, max_tokens=32)
    options = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    tuner = FineTuner(tiny_bloom(), lora={"r": 2}, warmup_share=0.0)
    with pytest.raises(UnsupportedModelError, match="attention='one_by_one'"):
        pl.Trainer(strategy=FastFTStrategy(), **options).fit(tuner, data)
    before = [value.clone() for value in tuner.parameters() if value.requires_grad]
    pl.Trainer(strategy=FastFTStrategy(attention="one_by_one"), **options).fit(tuner, data)
    assert any(
        not torch.equal(one, two) for one, two in zip(before, (v for v in tuner.parameters() if v.requires_grad))
    )


def test_an_unknown_choice_is_refused():
    with pytest.raises(OptionError, match="one_by_one"):
        FastFTStrategy(attention="alone")
