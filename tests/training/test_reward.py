"""RewardTuner: scores of packed completions against each alone, its losses, and what stock transformers reads back."""

import contextlib
import json
import warnings

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from lightning_fastft.core.errors import DataError, OptionError, UnsupportedModelError
from lightning_fastft.packing.collate import collate
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.reward import RewardTuner
from tests.support.packs import assert_close, make_groups, separate
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import quiet_data, quiet_trainer
from tests.support.tuners import CONFIG, LORA, gradients, make_tuner, packed, pairs, step
from tests.support.vision import build_image_tokenizer, build_vision_model


def tiny_tokenizer(**options):
    names = ["<pad>", "</s>", "a", "b", "c", "d"]
    words = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", **options)


def scores_alone(tuner, documents):
    model = tuner.model.get_base_model() if hasattr(tuner.model, "peft_config") else tuner.model
    found = []
    for document in separate(documents):
        hidden = model.model(input_ids=torch.as_tensor(document.input_ids)[None], use_cache=False).last_hidden_state[0]
        scores = model.score(hidden)[:, 0]
        found.append(scores[-1] if tuner.read == "last" else scores[torch.as_tensor(document.labels) != -100].mean())
    return found


@pytest.mark.covering
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"read": "mean"}, {"center_weight": 0.1}, {"loss": "scalar"}], ids=lambda x: "-".join(map(str, x))
)
def test_packed_completions_are_scored_as_each_alone(options, lora):
    documents = pairs()
    if options.get("loss") == "scalar":
        documents = make_groups(((6, 3), (1, 4), (11, 2)))
    tuner = make_tuner(RewardTuner, **options, **({} if lora else {"lora": None}))
    found, ours, _ = step(tuner, documents)
    scores = scores_alone(tuner, documents)
    if options.get("loss") == "scalar":
        truth = sum((score - document.scores[0]) ** 2 for score, document in zip(scores, documents)) / len(documents)
    else:
        terms = [
            -torch.sigmoid(chosen - rejected - (document.scores[0] - document.scores[1])).log()
            + options.get("center_weight", 0.0) * (chosen + rejected) ** 2
            for chosen, rejected, document in zip(scores[::2], scores[1::2], documents)
        ]
        truth = sum(terms) / len(terms)
    truth.backward()
    theirs = gradients(tuner)
    assert_close(found, truth.detach())
    assert_close(ours, theirs, bound=2e-5)
    assert any(name.endswith("score.weight") for name in ours)
    assert tuner.logged.keys() <= tuner.logged_names


def test_scores_are_predicted():
    tuner, documents = make_tuner(RewardTuner), pairs()
    with packed(tuner):
        found = tuner.predict_step(collate(documents), 0)
    assert_close(found, torch.stack(scores_alone(tuner, documents)).detach())


@pytest.mark.parametrize("lora", [True, False])
def test_stock_transformers_reads_the_classifier(tmp_path, lora):
    from peft import PeftModel

    tuner, documents = make_tuner(RewardTuner, **({} if lora else {"lora": None})), pairs()
    truth = torch.stack(scores_alone(tuner, documents)).detach()
    base = tmp_path / "base"
    tuner.save_pretrained(str(tmp_path / "saved"))
    if lora:
        tuner.model.unload().save_pretrained(base)
        classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
        classifier = PeftModel.from_pretrained(classifier, str(tmp_path / "saved"))
    else:
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", pad_token_id=0)
    with torch.no_grad():
        found = [
            classifier.eval()(input_ids=torch.as_tensor(document.input_ids)[None]).logits[0, 0]
            for document in separate(documents)
        ]
    assert_close(torch.stack(found), truth)


@pytest.mark.parametrize("pad", ["<pad>", "</s>"], ids=["a token of its own", "the end"])
@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "whole"])
def test_padding_hides_no_trained_token_from_a_saved_classifier(tmp_path, lora, pad):
    """Many tokenizers pad with the end-of-sequence token, at which a score is trained."""
    tokenizer = tiny_tokenizer(pad_token=pad)
    tuner = make_tuner(RewardTuner, tokenizer=tokenizer, **({} if lora else {"lora": None}))
    base = tuner.model.config
    base.pad_token_id = None
    is_hidden = pad == tokenizer.eos_token
    with pytest.warns(UserWarning, match="before the end") if is_hidden else contextlib.nullcontext():
        tuner.save_pretrained(str(tmp_path / "saved"))
    if lora:
        return
    ids = torch.tensor([[3, 4, 5, tokenizer.eos_token_id]])
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert classifier.config.pad_token_id == (None if is_hidden else tokenizer.pad_token_id)
    hidden = classifier.model(input_ids=ids).last_hidden_state[0, -1]
    assert_close(classifier(input_ids=ids).logits[0], classifier.score(hidden))
    # A configuration of the base's own with the end as padding is corrected too.
    base.pad_token_id = tokenizer.eos_token_id
    with pytest.warns(UserWarning, match="before the end"):
        tuner.save_pretrained(str(tmp_path / "again"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.parametrize("pad", ["<|im_start|>", "<|endoftext|>"], ids=["a token of its own", "the end"])
def test_padding_of_a_model_with_a_tower_is_where_its_classifier_reads_it(tmp_path, pad):
    tokenizer = build_image_tokenizer("gemma3")
    tokenizer.pad_token = pad
    model = build_vision_model("gemma3", tokenizer)
    is_hidden = tokenizer.pad_token_id == tokenizer.eos_token_id
    model.config.text_config.pad_token_id = tokenizer.eos_token_id if is_hidden else None
    tuner = RewardTuner(model, tokenizer=tokenizer, lora=None)
    tuner.configure_model()
    with pytest.warns(UserWarning, match="before the end") if is_hidden else contextlib.nullcontext():
        tuner.save_pretrained(str(tmp_path / "saved"))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert classifier.config.text_config.pad_token_id == (None if is_hidden else tokenizer.pad_token_id)
    ids = torch.tensor([[3, 4, 5, tokenizer.eos_token_id]])
    hidden = classifier.model(input_ids=ids).last_hidden_state[0, -1]
    assert_close(classifier(input_ids=ids).logits[0], classifier.score(hidden))


def test_a_mean_that_no_classifier_reads_is_named(tmp_path):
    with pytest.warns(UserWarning, match="read='mean' is not saved"):
        make_tuner(RewardTuner, read="mean").save_pretrained(str(tmp_path / "saved"))


def test_adapters_that_are_there_already_are_trained_with_a_head():
    from peft import get_peft_model

    model = get_peft_model(build_tiny("qwen3"), LoraConfig(r=4, target_modules=["q_proj"]))
    tuner, documents = make_tuner(RewardTuner, model=model, lora=None), pairs()
    found, ours, _ = step(tuner, documents)
    scores = scores_alone(tuner, documents)
    assert_close(found, -sum(
        torch.sigmoid(chosen - rejected - (document.scores[0] - document.scores[1])).log().detach()
        for chosen, rejected, document in zip(scores[::2], scores[1::2], documents)
    ) / len(documents))  # fmt: skip
    assert {name.split(".")[-2] for name in ours} == {"default", "score"}


def test_a_pack_without_pairs_is_refused():
    tuner = make_tuner(RewardTuner)
    with packed(tuner), pytest.raises(DataError, match="pairs"):
        tuner.training_step(collate(make_groups()), 0)


def classifier(**options):
    from transformers import AutoConfig

    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**CONFIG, num_labels=1, **options))


def test_a_model_with_a_head_of_its_own_is_refused(tmp_path):
    classifier().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
        RewardTuner(classifier())
    tuner = RewardTuner(str(tmp_path), lora=LORA)
    with pytest.raises(UnsupportedModelError, match="Qwen3ForSequenceClassification"):
        tuner.configure_model()


def test_other_tuners_name_the_class_of_a_classifier(tmp_path):
    rows = [{"prompt_ids": [1], "completion_ids": [[2], [3]], "rewards": [1.0, 0.0]}]
    data = quiet_data(rows, max_tokens=16)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3ForSequenceClassification.*AutoModelForCausalLM"):
        quiet_trainer(tmp_path, strategy="fastft").fit(PolicyTuner(classifier()), data)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"loss": "scalar", "center_weight": 0.1}, "center_weight"), ({"loss": "stepwise", "read": "mean"}, "read")],
)
def test_options_that_a_loss_does_not_read_are_refused(options, name):
    with pytest.raises(OptionError, match=f"{name}=.* has no effect"):
        make_tuner(RewardTuner, **options)


def test_adapters_are_saved_without_a_warning_of_exclusions(tmp_path):
    # LORA adapts "all-linear", from which the head is excluded; PEFT reads the folder back onto a base without one.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exclude_modules")
        make_tuner(RewardTuner).save_pretrained(str(tmp_path / "saved"))


def describe_lora(tuner):
    return next(status.reason for status in tuner.statuses() if status.name == "LoRA")


def test_the_table_names_the_head_as_trained_whole_and_no_target():
    for targets in (None, "all-linear"):
        tuner = make_tuner(RewardTuner, lora={"r": 4, "target_modules": targets})
        shown = describe_lora(tuner)
        assert shown.endswith("on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; whole: score")


@pytest.mark.parametrize("heads", [["score"], ["classifier", "score"]], ids=["TRL", "PEFT"])
def test_a_head_in_modules_to_save_is_the_one_that_is_trained(tmp_path, heads):
    lora = LoraConfig(**{**LORA, "modules_to_save": heads})
    tuner = make_tuner(RewardTuner, lora=lora)
    _, found, _ = step(tuner, pairs())
    _, truth, _ = step(make_tuner(RewardTuner), pairs())
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert list(lora.modules_to_save) == heads
    tuner.save_pretrained(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert saved["modules_to_save"] == ["score"]


@pytest.mark.parametrize("heads", [["score"], ["classifier", "score"]], ids=["ours", "PEFT"])
@pytest.mark.parametrize("loss", ["scalar", "stepwise"])
def test_adapters_of_a_reward_model_are_continued_with_their_head(tmp_path, loss, heads):
    tuner = make_tuner(RewardTuner, loss=loss)
    tuner.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": heads}))
    again = RewardTuner(CONFIG, init="random", dtype="float32", loss=loss, adapter=str(tmp_path))
    again.configure_model()
    state, truth = again.state_dict(), tuner.state_dict()
    assert state.keys() == truth.keys()
    assert all(torch.equal(state[name], truth[name]) for name in truth)
    again.save_pretrained(str(tmp_path / "again"))


def test_a_head_of_another_loss_is_not_continued(tmp_path):
    make_tuner(RewardTuner).save_pretrained(str(tmp_path))
    tuner = RewardTuner(CONFIG, init="random", loss="stepwise", adapter=str(tmp_path))
    with pytest.raises(DataError, match=r"1 weight is missing \(bias\).*stepwise"):
        tuner.configure_model()
