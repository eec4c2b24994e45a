"""PreferenceTuner: losses and gradients of packed pairs against each completion alone, references, data and resume."""

import copy
import csv
import math
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.hf.lora import adapters_off
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training import losses
from lightning_fastft.training.losses import PREFERENCE_LOSSES
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.preference import PreferenceTuner
from tests.support.packs import assert_close, make_groups
from tests.support.tiny_models import VOCABULARY
from tests.support.training_parts import quiet_data, quiet_trainer
from tests.support.tuners import CONFIG, LORA, gradients, make_tuner, packed, pairs, rows_alone, step

PAIRED = [loss for loss in PREFERENCE_LOSSES if loss != "kto"]
OPTIONS = {
    "sigmoid_norm": {"beta": 5.0, "label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.1},
    "simpo": {"beta": 2.0},
    "orpo": {"beta": 0.3},
}


def pair_losses_alone(tuner, documents):
    """The loss of each pair by the formulas as the papers write them, from completions one at a time."""
    ours = rows_alone(tuner.model, documents)
    with torch.no_grad(), adapters_off(tuner.model):
        theirs = rows_alone(tuner.model, documents)
    found = []
    for number in range(len(documents)):
        (chosen, _), (rejected, _) = ours[2 * number : 2 * number + 2]
        (ref_chosen, _), (ref_rejected, _) = theirs[2 * number : 2 * number + 2]
        found.append(pair_loss(tuner, chosen, rejected, ref_chosen, ref_rejected))
    return found


def pair_loss(tuner, chosen, rejected, ref_chosen, ref_rejected):
    """The loss of one pair from log-probabilities of its tokens."""
    beta, noise, sigmoid = tuner.beta, tuner.label_smoothing, torch.sigmoid
    ratios = chosen.sum() - ref_chosen.sum(), rejected.sum() - ref_rejected.sum()
    ratio = ratios[0] - ratios[1]
    odds = [p / (1 - p) for p in (chosen.double().mean().exp(), rejected.double().mean().exp())]
    mean_ratio = (chosen - ref_chosen).mean() - (rejected - ref_rejected).mean()
    return {
        "sigmoid_norm": lambda: (
            -(1 - noise) * sigmoid(beta * mean_ratio).log() - noise * sigmoid(-beta * mean_ratio).log()
        ),
        "sigmoid": lambda: -(1 - noise) * sigmoid(beta * ratio).log() - noise * sigmoid(-beta * ratio).log(),
        "hinge": lambda: (1 - beta * ratio).clamp(min=0),
        "ipo": lambda: (mean_ratio - 1 / (2 * beta)) ** 2,
        "robust": lambda: (
            -((1 - noise) * sigmoid(beta * ratio).log() - noise * sigmoid(-beta * ratio).log()) / (1 - 2 * noise)
        ),
        "apo_zero": lambda: 1 - sigmoid(beta * ratios[0]) + sigmoid(beta * ratios[1]),
        "apo_down": lambda: sigmoid(beta * ratios[0]) + 1 - sigmoid(beta * ratio),
        "simpo": lambda: -sigmoid(beta * (chosen.mean() - rejected.mean()) - tuner.gamma).log(),
        "cpo": lambda: -sigmoid(beta * (chosen.sum() - rejected.sum())).log() - chosen.mean(),
        "orpo": lambda: -chosen.mean() - beta * sigmoid((odds[0] / odds[1]).log()).log(),
    }[tuner.loss]()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora": LORA, "reference": "adapters_off"}, "adapters off"),
        ({"lora": LORA, "reference": "stored"}, "stored on the host"),
        ({"reference": AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))}, "second model .*Qwen3"),
        ({"lora": LORA, "loss": "orpo"}, None),
    ],
)
def test_the_status_table_has_the_reference_that_the_loss_reads(options, reason):
    tuner = PreferenceTuner(CONFIG, init="random", dtype="float32", **options)
    assert tuner.statuses() == []
    tuner.configure_model()
    found = [status for status in tuner.statuses() if status.name == "reference"]
    assert len(found) == (reason is not None)
    assert all(status.state == "active" and re.search(reason, status.reason) for status in found)


def test_a_loss_without_a_formula_is_refused():
    with pytest.raises(OptionError, match="kto"):
        losses.preference_loss(torch.zeros(1), torch.zeros(1), loss="kto", beta=0.1)


@pytest.mark.covering
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("loss", PAIRED)
def test_packed_pairs_are_computed_as_each_completion_alone(loss, shares_prompts):
    tuner, documents = make_tuner(PreferenceTuner, loss=loss, **OPTIONS.get(loss, {})), pairs()
    found, ours, _ = step(tuner, documents, shares_prompts=shares_prompts)
    truth = sum(pair_losses_alone(tuner, documents)) / len(documents)
    truth.backward()
    theirs = gradients(tuner)
    assert_close(found, truth.detach().float(), bound=1e-5)
    assert_close(ours, theirs, bound=2e-5)
    assert all("lora" in name for name in ours)


@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
def test_accumulated_packs_give_the_gradient_of_one_pack(loss):
    tuner, documents = make_tuner(PreferenceTuner, loss=loss), pairs()
    _, whole, _ = step(tuner, documents)
    parts = [step(tuner, part, num_items=len(documents)) for part in (documents[:1], documents[1:])]
    assert_close({name: parts[0][1][name] + parts[1][1][name] for name in whole}, whole)


def test_metrics_are_those_of_the_pairs():
    tuner, documents = make_tuner(PreferenceTuner), pairs()
    step(tuner, documents)
    sums = [row.sum() for row, _ in rows_alone(tuner.model, documents)]
    with adapters_off(tuner.model):
        theirs = [row.sum() for row, _ in rows_alone(tuner.model, documents)]
    reward = [0.1 * float(one - other) for one, other in zip(sums, theirs)]
    chosen, rejected = reward[::2], reward[1::2]
    expected = {
        "reward_chosen": sum(chosen) / 4,
        "reward_rejected": sum(rejected) / 4,
        "reward_margin": (sum(chosen) - sum(rejected)) / 4,
        "reward_accuracy": sum(one > other for one, other in zip(chosen, rejected)) / 4,
        "log_prob_chosen": float(sum(sums[::2])) / 4,
    }
    for name, value in expected.items():
        assert tuner.logged[f"train_{name}"] == pytest.approx(value, rel=1e-4), name
    assert {f"train_{name}" for name in expected} < tuner.logged_names
    assert tuner.logged.keys() <= tuner.logged_names


def test_kto_weighs_labels_against_the_divergence_of_mismatched_completions():
    documents = [
        document._replace(scores=(float(number % 2), 0.0))
        for number, document in enumerate(pairs(((5, 3, 4), (2, 4, 3))))
    ]
    tuner = make_tuner(PreferenceTuner, loss="kto", desirable_weight=1.5)
    found, ours, _ = step(tuner, documents)
    sums = [row.sum() for row, _ in rows_alone(tuner.model, documents)]
    with torch.no_grad(), adapters_off(tuner.model):
        theirs = [row.sum() for row, _ in rows_alone(tuner.model, documents)]
    ratios = [one - other for one, other in zip(sums, theirs)]
    baseline = (ratios[1] + ratios[3]).detach().div(2).clamp(min=0)
    undesirable = 1 - torch.sigmoid(0.1 * (baseline - ratios[0]))
    desirable = 1.5 * (1 - torch.sigmoid(0.1 * (ratios[2] - baseline)))
    truth = (undesirable + desirable) / 2
    truth.backward()
    assert_close(found, truth.detach())
    assert_close(ours, gradients(tuner), bound=2e-5)


def test_rewards_of_labelled_completions_are_means_over_those_of_a_label(tmp_path):
    documents = [
        document._replace(scores=(label, 0.0))
        for document, label in zip(pairs(((5, 3, 4), (2, 4, 3), (6, 5, 2), (3, 3, 3))), (1.0, 0.0, 0.0, 0.0))
    ]
    tuner = PreferenceTuner(CONFIG, init="random", dtype="float32", lora=LORA, loss="kto", reference="adapters_off")
    found = []
    for parts in ([documents], [documents[:1], documents[1:]]):
        loader = DataLoader([collate(part) for part in parts], batch_size=None)
        trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy())
        found += trainer.validate(tuner, loader, verbose=False)
    for name in ("val_reward_chosen", "val_reward_rejected"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5), name


@pytest.mark.parametrize(("label", "missing"), [(0.0, "train_reward_chosen"), (1.0, "train_reward_rejected")])
def test_a_pack_with_one_label_logs_no_reward_of_the_other(label, missing):
    tuner = make_tuner(PreferenceTuner, loss="kto")
    step(tuner, [document._replace(scores=(label, 0.0)) for document in pairs(((5, 3, 4), (2, 4, 3)))])
    assert tuner.logged_names - {missing} >= tuner.logged.keys() >= {"train_loss", "train_divergence"}


def test_a_step_with_one_label_repeats_no_reward_of_an_earlier_step(tmp_path):
    """Lightning gives loggers the last value of a name again and again, until the end of the epoch."""
    documents = [document._replace(scores=(float(place % 2), 0.0)) for place, document in enumerate(pairs())]
    packs = [collate(part, num_items=len(part)) for part in (documents[:2], documents[2:3], documents[3:])]
    tuner = PreferenceTuner(CONFIG, init="random", dtype="float32", lora=LORA, loss="kto", reference="adapters_off")
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        tmp_path, strategy=FastFTStrategy(), logger=logger, log_every_n_steps=1, max_steps=3, max_epochs=1
    )
    trainer.fit(tuner, DataLoader(packs, batch_size=None))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    names = ("train_reward_chosen", "train_reward_rejected")
    assert [[bool(row[name]) for name in names] for row in rows] == [[True, True], [False, True], [True, False]]


@pytest.mark.parametrize("is_named", [False, True], ids=["one set", "named sets"])
@pytest.mark.parametrize(("label", "there", "missing"), [(0.0, "rejected", "chosen"), (1.0, "chosen", "rejected")])
def test_a_validation_with_one_label_logs_no_reward_of_the_other(tmp_path, label, there, missing, is_named):
    documents = [document._replace(scores=(label, 0.0)) for document in pairs()]
    both = [document._replace(scores=(float(place % 2), 0.0)) for place, document in enumerate(documents)]
    sets = {
        name: DataLoader([collate(part) for part in (found[:1], found[1:])], batch_size=None)
        for name, found in (("one", documents), ("both", both))
    }
    tuner = PreferenceTuner(CONFIG, init="random", dtype="float32", lora=LORA, loss="kto", reference="adapters_off")
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy())
    trainer.validate(tuner, sets if is_named else sets["one"], verbose=False)
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert not any(math.isnan(value) for value in logged.values()), logged
    ending = "/one" if is_named else ""
    assert {f"val_loss{ending}", f"val_reward_{there}{ending}"} <= logged.keys()
    assert f"val_reward_{missing}{ending}" not in logged
    if is_named:
        assert {f"val_reward_{kind}{end}" for kind in ("chosen", "rejected") for end in ("", "/both")} <= logged.keys()
        # All four rows of one set have the label, and two of the other.
        weighted = (4 * logged[f"val_reward_{there}/one"] + 2 * logged[f"val_reward_{there}/both"]) / 6
        assert logged[f"val_reward_{there}"] == pytest.approx(weighted, rel=1e-5)


def test_the_base_without_adapters_draws_no_dropout():
    def model():
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = AutoConfig.for_model("phi", vocab_size=VOCABULARY, resid_pdrop=0.3, embd_pdrop=0.3, **sizes)
        return AutoModelForCausalLM.from_config(config).train()

    own = make_tuner(PreferenceTuner, model=model())
    copied = make_tuner(PreferenceTuner, model=model(), reference=copy.deepcopy(own.model).unload())
    found = []
    for tuner in (own, copied):
        torch.manual_seed(1)
        tuner.train()
        found.append(step(tuner, pairs())[:2])
        assert all(module.training for module in tuner.model.modules())
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_a_second_model_is_the_reference_and_is_not_saved():
    other = make_tuner(PreferenceTuner).model.merge_and_unload()
    tuner, documents = make_tuner(PreferenceTuner, reference=other), pairs()
    found, _, _ = step(tuner, documents)
    sums = [row.sum() for row, _ in rows_alone(tuner.model, documents)]
    theirs = [row.sum().detach() for row, _ in rows_alone(other, documents)]
    ratios = [one - two for one, two in zip(sums, theirs)]
    truth = sum(-torch.sigmoid(0.1 * (one - two)).log() for one, two in zip(ratios[::2], ratios[1::2])) / 4
    assert_close(found, truth.detach())
    assert not other.training
    assert all("lora" in name for name in tuner.state_dict())
    assert all(not parameter.requires_grad for parameter in other.parameters())


def test_a_reference_of_other_tokens_is_refused(tmp_path):
    own, same, other = tokenizer_of_words(), tokenizer_of_words(), tokenizer_of_words(first=1)
    same.add_tokens(["new"])
    for name, tokenizer in (("same", same), ("other", other)):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    # A token that was reserved in the reference.
    renamed = tokenizer_of_words(last="<tool>")
    for tokenizer, name in ((own, "same"), (same, "same"), (renamed, "same"), (own, "other")):
        tuner = PreferenceTuner(
            CONFIG, init="random", dtype="float32", tokenizer=tokenizer, reference=str(tmp_path / name)
        )
        if name == "same":
            tuner.configure_model()
            continue
        with pytest.raises(OptionError, match="is number 1 of the model and number"):
            tuner.configure_model()


def test_disabled_adapters_leave_flags_and_gradients_as_they_were():
    tuner = make_tuner(PreferenceTuner)
    trained = {name for name, parameter in tuner.named_parameters() if parameter.requires_grad}
    with adapters_off(tuner.model):
        assert {name for name, parameter in tuner.named_parameters() if parameter.requires_grad} == trained
        base = rows_alone(tuner.model, pairs())[0][0]
    with tuner.model.disable_adapter():
        assert torch.equal(base, rows_alone(tuner.model, pairs())[0][0])
    assert not torch.equal(base, rows_alone(tuner.model, pairs())[0][0])


def test_frozen_adapters_are_part_of_the_reference(tmp_path):
    """The first loss compares a model with itself."""
    make_tuner(PreferenceTuner).model.save_pretrained(str(tmp_path))
    tuner = make_tuner(PreferenceTuner, frozen_adapters=[str(tmp_path)])
    trained = [parameter for name, parameter in tuner.named_parameters() if "lora_B.default" in name]
    with torch.no_grad():
        for parameter in trained:
            parameter.zero_()
    found, ours, _ = step(tuner, pairs())
    assert float(found) == pytest.approx(math.log(2), rel=1e-6)
    assert all(".default." in name for name in ours)
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(std=0.15)
    assert abs(float(step(tuner, pairs())[0]) - math.log(2)) > 1e-3


def test_a_reference_that_the_loss_does_not_read_is_refused():
    second = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    unread = "reference='{}' has no effect: only {} reads it"
    for reference, shown in (("stored", "stored"), ("some/model", "some/model"), (second, "Qwen3ForCausalLM")):
        with pytest.raises(OptionError, match=unread.format(shown, "a loss with a reference model")):
            PreferenceTuner(CONFIG, init="random", lora=LORA, loss="orpo", reference=reference)
    with pytest.raises(OptionError, match=unread.format("Qwen3ForCausalLM", "a kl_weight above 0")):
        PolicyTuner(CONFIG, init="random", lora=LORA, reference=second)


def test_adapters_that_begin_with_an_effect_need_a_reference_by_name(tmp_path):
    model = make_tuner(PreferenceTuner).model
    model.save_pretrained(str(tmp_path))
    random_b = {"init": "random", "lora": {"r": 2, "init_lora_weights": False}}
    for source, options in ((CONFIG, {"init": "random", "adapter": str(tmp_path)}), (model, {}), (CONFIG, random_b)):
        with pytest.raises(OptionError, match="effect from the start"):
            PreferenceTuner(source, **options)
        assert PreferenceTuner(source, loss="simpo", **options).needs_reference is False
        assert PreferenceTuner(source, reference="adapters_off", **options).reference == "adapters_off"
    fresh = get_peft_model(copy.deepcopy(model.unload()), LoraConfig(r=2, target_modules=["q_proj"]))
    assert PreferenceTuner(fresh).reference == "adapters_off"


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_base_weights_that_are_trained_need_another_reference(bias):
    """Disabled adapters leave trained biases of the base as they are, and the reference would move with them."""
    config = {**CONFIG, "attention_bias": True}
    lora = {"r": 4, "target_modules": ["q_proj"], "bias": bias}
    with pytest.raises(OptionError, match=r"would change with .*q_proj.*bias.*'stored'"):
        PreferenceTuner(config, init="random", lora=lora).configure_model()
    PreferenceTuner(config, init="random", lora=lora, reference="stored").configure_model()
    PreferenceTuner(config, init="random", lora=lora, loss="orpo").configure_model()
    # A model without biases trains none.
    PreferenceTuner(CONFIG, init="random", lora=lora).configure_model()


def test_log_probabilities_are_predicted():
    tuner, documents = make_tuner(PreferenceTuner), pairs()
    with packed(tuner):
        found = tuner.predict_step(collate(documents), 0)
    assert_close(found, torch.stack([row.sum() for row, _ in rows_alone(tuner.model, documents)]).detach())


def tokenizer_of_words(*, first=0, last=f"w{VOCABULARY - 1}"):
    """A tokenizer with the words in their order; or with those from the first one on first, or another last one."""
    words = [*(f"w{index}" for index in range(VOCABULARY - 1)), last]
    words = words[:1] + words[1 + first :] + words[1 : 1 + first]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1")


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        ("abcd", [1, 2, 3, 0]),
        # Rows that were made of pairs: good and bad completions are compared with good and bad ones of the next prompt.
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aaabcc", [3, 3, 3, 4, 0, 1]),
        # The last rows have the prompt of the first one.
        ("abbaa", [1, 3, 4, 1, 2]),
        # There is no other prompt.
        ("aaa", [1, 2, 0]),
    ],
)
def test_mismatched_completions_are_of_another_prompt(tmp_path, prompts, others):
    rows = [
        {"prompt": f"w{ord(letter) - 70} w2", "completion": f" w{40 + number}" * (1 + number), "label": number % 2 == 0}
        for number, letter in enumerate(prompts)
    ]
    data = quiet_data(rows, tokenizer=tokenizer_of_words(), max_tokens=32)
    tuner = PreferenceTuner(CONFIG, init="random", dtype="float32", lora=LORA, loss="kto", reference="adapters_off")
    quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_steps=1).fit(tuner, data)
    subset = data.subset("train")
    for number, other in enumerate(others):
        document = subset[number]
        assert document.segment_lengths[1:] == (number + 2, other + 2)
        assert document.input_ids[-other - 2 :].tolist() == [40 + other] * (other + 1) + [1]
        assert subset.length_N[number] == len(document.input_ids) + 1


def test_predictions_of_labelled_rows_are_of_no_other_completions(tmp_path):
    """In training KTO gives each row the completion of another one."""
    rows = [{"prompt": f"w{row} w2", "completion": f" w{row} w3", "label": row % 2 == 0} for row in range(5, 9)]
    data = quiet_data(None, predict_paths=rows, tokenizer=tokenizer_of_words(), max_tokens=32)
    tuner = PreferenceTuner(CONFIG, init="random", dtype="float32", lora=LORA, loss="kto", reference="adapters_off")
    found = quiet_trainer(tmp_path, strategy=FastFTStrategy()).predict(tuner, datamodule=data)
    assert torch.cat(found).shape == (len(rows),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"loss": "robust"}, "label_smoothing"),
        ({"gamma": 1.0}, "gamma=1.0 has no effect: only loss='simpo'"),
        ({"loss": "simpo", "desirable_weight": 2.0}, "desirable_weight=2.0 has no effect: only loss='kto'"),
        ({"undesirable_weight": 0.0}, "undesirable_weight=0.0 has no effect"),
        ({"lora": None}, "stored"),
        ({"lora": None, "reference": "adapters_off"}, "adapters"),
        ({"lora": {**LORA, "init_lora_weights": "pissa"}}, "'pissa' would be the base without"),
        ({"lora": {**LORA, "init_lora_weights": "olora"}, "reference": "adapters_off"}, "reference='stored'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        make_tuner(PreferenceTuner, **options)


def test_a_pack_without_pairs_is_refused():
    tuner = make_tuner(PreferenceTuner)
    with packed(tuner), pytest.raises(DataError, match="pairs"):
        tuner.training_step(collate(make_groups()), 0)
    with packed(tuner), pytest.raises(DataError, match="completions"):
        tuner.training_step(collate([pairs()[0]._replace(segment_lengths=())]), 0)


def test_log_of_one_minus_exp_is_exact_near_zero_and_far_below():
    value = torch.tensor([-1e-6, -0.5, -0.7, -30.0], dtype=torch.float64, requires_grad=True)
    found = losses._log1m_exp(value)
    assert torch.allclose(found, torch.log(-torch.expm1(value.detach())), rtol=1e-12)
    found.sum().backward()
    assert value.grad.isfinite().all()
