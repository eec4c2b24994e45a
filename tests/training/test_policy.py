"""PolicyTuner: the policy update of packed rollouts against each completion alone."""

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.lora import adapters_off
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.completions import Completions
from lightning_fastft.training.losses import policy_loss
from lightning_fastft.training.policy import PolicyTuner
from tests.support.packs import assert_close, make_groups
from tests.support.tuners import CONFIG, gradients, make_tuner, packed, rows_alone, step

GROUPS = ((6, 3, 9, 4), (1, 4, 2), (11, 2, 1, 5, 3))


def advantages_alone(kind, rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    if kind == "given":
        return rewards
    if kind == "leave_one_out":
        return torch.stack([reward - (rewards.sum() - reward) / (len(rewards) - 1) for reward in rewards])
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + 1e-4) if kind == "normalised" else centred


def surrogate_alone(tuner, row, ratio, advantage):
    """The loss of the tokens of a completion, by cases."""
    if tuner.loss == "sapo":
        sharpness = tuner.sapo_temperature_pos if advantage > 0 else tuner.sapo_temperature_neg
        return -4 / sharpness / (1 + (-sharpness * (ratio - 1)).exp()) * advantage
    top, bottom = 1 + tuner.clip_high, 1 - tuner.clip_low
    if tuner.loss == "cispo":
        return -torch.where(ratio > top, top, ratio).detach() * row * advantage
    if advantage > 0:
        return -torch.where(ratio > top, top, ratio) * advantage
    largest = tuner.dual_clip or float("inf")
    return -torch.where(ratio > largest, largest, torch.where(ratio < bottom, bottom, ratio)) * advantage


def loss_alone(tuner, documents, *, kl_weight=0.0, uses_sampler=True):
    """The loss by the formulas of the papers, from completions one at a time."""
    ours = [row for row, _ in rows_alone(tuner.model, documents)]
    with torch.no_grad(), adapters_off(tuner.model):
        theirs = [row for row, _ in rows_alone(tuner.model, documents)]
    rewards, sampled = [], []
    for document in documents:
        rewards += advantages_alone(tuner.advantage, document.scores).tolist()
        start = document.segment_lengths[0]
        for length in document.segment_lengths[1:]:
            is_known = document.log_probs is not None
            sampled.append(torch.as_tensor(document.log_probs[start : start + length]) if is_known else None)
            start += length
    tokens, means = [], []
    for row, reference, advantage, sampler in zip(ours, theirs, rewards, sampled):
        sampler = row.detach() if sampler is None else sampler
        old = sampler if uses_sampler and tuner.sampler_clip is None else row.detach()
        ratio = (row - old).exp()
        if tuner.ratio == "sequence":
            ratio = (row - old).mean().exp().expand(len(row))
        loss = surrogate_alone(tuner, row, ratio, advantage)
        if tuner.sampler_clip is not None:
            loss = loss * (old - sampler).exp().clamp(max=tuner.sampler_clip)
        distance = reference - row
        loss = loss + kl_weight * (distance.exp() - distance - 1) * (ratio if tuner.unbiased_kl else 1)
        tokens.append(loss.sum())
        means.append(loss.mean())
    if tuner.loss in ("dapo", "cispo"):
        return sum(tokens) / sum(map(len, ours))
    if tuner.loss == "dr_grpo":
        return sum(tokens) / len(tokens) / tuner.max_completion_tokens
    return sum(means) / len(means)


@pytest.mark.covering
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "dapo", "clip_high": 0.28},
        {"loss": "dr_grpo", "max_completion_tokens": 16, "advantage": "centred"},
        {"ratio": "sequence", "clip_low": 0.01, "clip_high": 0.01},
        {"advantage": "leave_one_out"},
        {"advantage": "given", "sampler_clip": 1.2},
        {"kl_weight": 0.3},
        {"kl_weight": 0.3, "unbiased_kl": True},
        {"loss": "cispo", "clip_high": 0.5, "advantage": "given"},
        {"loss": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5, "advantage": "given"},
        {"dual_clip": 1.3, "advantage": "given"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "grpo",
)
def test_packed_rollouts_are_updated_as_each_completion_alone(options, shares_prompts):
    tuner, documents = make_tuner(PolicyTuner, **options), make_groups(GROUPS)
    found, ours, _ = step(tuner, documents, shares_prompts=shares_prompts)
    truth = loss_alone(tuner, documents, kl_weight=options.get("kl_weight", 0.0))
    truth.backward()
    assert_close(found, truth.detach().to(found.dtype))
    assert_close(ours, gradients(tuner), bound=2e-5)


@pytest.mark.parametrize(
    ("options", "gains", "losses"),
    [
        ({}, [-0.5, -0.9, "-1.2", "-1.2"], ["0.8", 0.9, 1.5, 4.0]),
        ({"dual_clip": 3.0}, [-0.5, -0.9, "-1.2", "-1.2"], ["0.8", 0.9, 1.5, "3.0"]),
        # Clipped weights keep a gradient.
        ({"loss": "cispo"}, [1.0, 1.8, "2.4", "2.4"], [-1.0, -1.8, "-2.4", "-2.4"]),
        ({"loss": "sapo", "sapo_temperature_neg": 2.0}, [-1.5101627, -1.9000832, -2.4898373, -3.8102965], [0.5378828, 0.9003320, 1.4621172, 1.9950548]),
    ],
    ids=["clipped", "dual_clip", "cispo", "sapo"],
)  # fmt: skip
def test_ratios_are_clipped_on_the_side_that_the_advantage_asks_for(options, gains, losses):
    """Of ratios 0.5, 0.9, 1.5 and 4 with a log-probability of -2; values in quotes are clipped."""
    log_prob_R = torch.full((8,), -2.0, dtype=torch.float64, requires_grad=True)
    ratio_R = (log_prob_R + 2).exp() * torch.tensor([0.5, 0.9, 1.5, 4.0] * 2, dtype=torch.float64)
    advantage_R = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(4)
    loss_R, is_clipped_R = policy_loss(log_prob_R, ratio_R=ratio_R, advantage_R=advantage_R, **options)
    assert loss_R.tolist() == pytest.approx([float(value) for value in gains + losses], rel=1e-6)
    assert is_clipped_R.tolist() == [isinstance(value, str) for value in gains + losses]
    loss_R.sum().backward()
    truth_R = loss_R.detach()
    if options.get("loss") == "cispo":
        truth_R = truth_R / -2
    elif options.get("loss") == "sapo":
        sharpness_R = torch.where(advantage_R > 0, 1.0, 2.0)
        gate_R = torch.sigmoid(sharpness_R * (ratio_R.detach() - 1))
        truth_R = -4 * gate_R * (1 - gate_R) * ratio_R.detach() * advantage_R
    else:
        truth_R = truth_R * ~is_clipped_R
    assert_close(log_prob_R.grad, truth_R)


@pytest.mark.parametrize("options", [{}, {"ratio": "sequence"}, {"sampler_clip": 1.2}])
def test_known_log_probabilities_count_beside_rollouts_without(options):
    tuner, documents = make_tuner(PolicyTuner, loss="dapo", **options), make_groups(GROUPS)
    documents[1] = documents[1]._replace(log_probs=None)
    found, ours, _ = step(tuner, documents)
    truth = loss_alone(tuner, documents)
    truth.backward()
    assert_close(found, truth.detach().to(found.dtype))
    assert_close(ours, gradients(tuner), bound=2e-5)


def test_without_log_probabilities_the_ratio_is_one():
    documents = [document._replace(log_probs=None) for document in make_groups(GROUPS)]
    tuner = make_tuner(PolicyTuner, clip_low=0.0, clip_high=0.0)
    found, ours, _ = step(tuner, documents)
    truth = loss_alone(tuner, make_groups(GROUPS), uses_sampler=False)
    truth.backward()
    # Ratios are 1, and normalised advantages have a mean of 0.
    assert max(abs(float(found)), abs(float(truth.detach()))) < 1e-6
    assert_close(ours, gradients(tuner), bound=2e-5)


def test_noted_log_probabilities_replace_those_of_the_sampler():
    tuner, documents = make_tuner(PolicyTuner), make_groups(GROUPS)
    batch = collate(documents, num_items=9)
    with packed(tuner):
        tuner.note_old_log_probs(batch)
        loss = tuner.training_step(batch, 0)
    truth = torch.cat([row for row, _ in rows_alone(tuner.model, documents)])
    assert_close(batch.context.completions.old_log_prob_R[: len(truth)], truth.detach())
    # The mean of normalised advantages is 0.
    assert abs(float(loss.detach())) < 1e-5
    assert tuner.logged["train_clip_share"] == 0


def test_metrics_are_those_of_the_rollouts():
    tuner, documents = make_tuner(PolicyTuner, kl_weight=0.1), make_groups(GROUPS)
    step(tuner, documents)
    entropies = [-(x.softmax(-1) * x.log_softmax(-1)).sum(-1) for _, x in rows_alone(tuner.model, documents)]
    assert tuner.logged["train_entropy"] == pytest.approx(float(torch.cat(entropies).detach().mean()), rel=1e-4)
    scores = [score for document in documents for score in document.scores]
    assert tuner.logged["train_reward"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
    lengths = [length for group in GROUPS for length in group[1:]]
    assert tuner.logged["train_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert tuner.logged.keys() <= tuner.logged_names


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_deviations_are_of_groups_and_truncated_completions_have_no_end(shares_prompts):
    config = {**CONFIG, "eos_token_id": 1}
    tuner, documents = make_tuner(PolicyTuner, model=config, init="random"), make_groups((*GROUPS, (4, 1), (2, 3, 1)))
    documents[1] = documents[1]._replace(scores=(0.7, 0.7))
    tuner.answer_end = 2
    assert not {1, 2} & set(documents[0].input_ids)
    # A prompt that ends in one, one in the middle of a completion, and both kinds of ends.
    for number, place, token in ((0, 5, 1), (0, 10, 1), (0, 8, 2), (1, 4, 1), (2, 12, 1), (2, 13, 2), (3, 4, 2)):
        for ids in (documents[number].input_ids, documents[number].labels):
            ids[place] = token if ids[place] != -100 else -100
    step(tuner, documents, shares_prompts=shares_prompts)
    # Ends of 0: 8, 17, 21. Of 1: 4, 6. Of 2: 12, 13, 18, 21.
    assert tuner.logged["train_truncated_share"] == pytest.approx((2 + 1 + 2 + 2) / 12)
    deviations = [torch.tensor(documents[number].scores).std() for number in (0, 2, 4)]
    assert tuner.logged["train_reward_deviation"] == pytest.approx(float(sum(deviations)) / 5, rel=1e-5)
    # A group of one has nothing to compare with.
    assert tuner.logged["train_equal_reward_share"] == pytest.approx(2 / 5)


def test_given_advantages_are_not_described_as_rewards_of_groups():
    tuner = make_tuner(PolicyTuner, advantage="given")
    step(tuner, make_groups(GROUPS))
    assert "train_reward" in tuner.logged
    of_groups = {"train_reward_deviation", "train_equal_reward_share"}
    assert not of_groups & (tuner.logged.keys() | tuner.logged_names)


def test_a_gate_has_no_share_of_clipped_ratios():
    tuner = make_tuner(PolicyTuner, loss="sapo")
    step(tuner, make_groups(GROUPS))
    assert "train_loss" in tuner.logged
    assert "train_clip_share" not in tuner.logged.keys() | tuner.logged_names


def test_completions_are_not_called_truncated_where_no_end_is_known():
    tuner = make_tuner(PolicyTuner)
    step(tuner, make_groups(GROUPS))
    assert tuner.tokenizer is None
    assert "train_truncated_share" not in tuner.logged


def test_a_group_of_equal_rewards_teaches_nothing():
    tuner = make_tuner(PolicyTuner)
    documents = [document._replace(scores=(0.7,) * len(document.scores)) for document in make_groups(GROUPS)]
    _, ours, _ = step(tuner, documents)
    assert all(float(gradient.abs().max()) < 1e-4 for gradient in ours.values())


@pytest.mark.parametrize("advantage", ["normalised", "centred", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1e6 / 3])
def test_equal_rewards_give_exactly_zero(advantage, reward):
    tuner = make_tuner(PolicyTuner, advantage=advantage)
    groups = make_groups([(3, *(2,) * size) for size in (3, 5, 6, 7, 11)])
    documents = [document._replace(scores=(reward,) * len(document.scores)) for document in groups]
    assert not tuner.advantages(collate(documents, num_items=5).context.completions).any()


def test_sums_over_completions_are_exact_and_differentiable():
    completions = Completions(
        num_rows=[2, 1, 3], num_completions=[2, 1], scores=[0.0] * 3, last_tokens=[3, 4, 7], num_padded_rows=8
    )
    value_R = torch.arange(8.0, dtype=torch.float64, requires_grad=True)
    assert completions.sum(value_R).tolist() == [1.0, 2.0, 12.0]
    assert completions.mean(value_R).tolist() == [0.5, 2.0, 4.0]
    assert completions.example_mean(torch.tensor([1.0, 3.0, 5.0])).tolist() == [2.0, 2.0, 5.0]
    value_C = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert completions.spread(value_C).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 0.0, 0.0]
    assert torch.autograd.gradcheck(completions.sum, value_R)
    assert torch.autograd.gradcheck(completions.spread, value_C)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dr_grpo"}, "max_completion_tokens"),
        ({"kl_weight": 0.1, "reference": "stored"}, "stored"),
        ({"kl_weight": 0.1, "lora": None}, "reference"),
        ({"loss": "cispo", "clip_low": 0.1}, "clip_low"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"loss": "sapo", "clip_low": 0.1}, "clip_low"),
        ({"loss": "sapo", "clip_high": 0.28}, "clip_high"),
        ({"sapo_temperature_pos": 1.2}, "sapo_temperature_pos"),
        ({"loss": "cispo", "sapo_temperature_neg": 1.2}, "sapo_temperature_neg"),
        ({"unbiased_kl": True}, "kl_weight"),
        ({"dual_clip": 1.25, "clip_high": 0.28}, "dual_clip"),
        ({"loss": "cispo", "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        make_tuner(PolicyTuner, **options)
