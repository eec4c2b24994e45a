"""RolloutDataModule(mask_truncated=True): completions without an end are not trained, and count in their group."""

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.collate import collate
from lightning_fastft.training.data.rollouts import make_rollout
from lightning_fastft.training.samplers import Sampled
from tests.training.test_rollouts import CONFIG, character_tokenizer, make_parts, train

END, OTHER = 1, 5
# Completions of each prompt, by the last token.
ENDED, MIXED, CUT = [[4, 4, END], [4, END]], [[4, END], [4, 4, OTHER]], [[OTHER], [4, OTHER]]


def sampler_of(*groups):
    return lambda tuner, prompts, **options: [[Sampled(ids) for ids in group] for group in groups]


def run(tmp_path, *groups, max_tokens=512, **tuner_options):
    seen = []
    tuner, data = make_parts(
        sampler=sampler_of(*groups), rewards=lambda *, completion_ids, **columns: [float(len(ids)) for ids in completion_ids],
        num_completions=2, prompts_per_round=len(groups), max_new_tokens=3, max_tokens=max_tokens, mask_truncated=True,
        tuner_options={"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1), **tuner_options},
    )  # fmt: skip
    own_step = tuner.training_step

    def step(batch, batch_idx):
        seen.append(batch)
        return own_step(batch, batch_idx)

    tuner.training_step = step
    before = {}
    tuner.on_train_start = lambda: before.update({name: value.clone() for name, value in tuner.state_dict().items()})
    trainer = train(tmp_path, tuner, data, max_steps=1, log_every_n_steps=1)
    moved = any(not torch.equal(value, before[name]) for name, value in tuner.state_dict().items())
    return seen, {name: float(value) for name, value in trainer.logged_metrics.items()}, moved


# Tokens of completions with an end: 3 + 2 + 2.
@pytest.mark.parametrize(("loss", "num_items"), [("dapo", 7), ("cispo", 7), ("grpo", 6), ("sapo", 6)])
def test_completions_without_an_end_have_no_labels(tmp_path, loss, num_items):
    (batch,), logged, moved = run(tmp_path, ENDED, MIXED, CUT, loss=loss)
    assert batch.context.num_items == num_items
    completions = batch.context.completions
    assert sorted(completions.count_C.tolist()) == [0, 0, 0, 2, 2, 3]
    assert sorted(completions.scores) == [1, 2, 2, 2, 3, 3]
    assert logged["train_truncated_share"] == pytest.approx(3 / 6)
    assert logged["train_length"] == pytest.approx(7 / 3)
    assert logged["train_reward"] == pytest.approx(13 / 6)
    assert moved


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_a_round_without_an_end_changes_nothing(tmp_path, loss, ratio):
    (batch,), logged, moved = run(tmp_path, CUT, CUT, loss=loss, ratio=ratio)
    assert batch.context.num_labelled == 0
    assert logged["train_truncated_share"] == 1
    assert "train_length" not in logged
    assert not moved


def test_log_probabilities_before_a_round_of_several_steps_are_of_the_labelled_tokens(tmp_path):
    seen, _, moved = run(tmp_path, MIXED, ENDED, MIXED, max_tokens=18)
    assert moved
    for batch in seen:
        completions = batch.context.completions
        assert int((completions.old_log_prob_R != 0).sum()) == completions.num_rows


def test_rewards_of_masked_completions_count_in_their_group():
    tuner, _ = make_parts()
    group = [Sampled([4, END]), Sampled([4, OTHER]), Sampled([4, OTHER])]
    kept, masked = (
        collate([make_rollout([6, 7], group, [1.0, 0.0, 0.5], end_ids=ends)], num_items=3).context.completions
        for ends in (None, [END])
    )
    assert kept.num_trained == 3
    assert masked.num_trained == 1
    assert torch.equal(tuner.advantages(kept), tuner.advantages(masked))


@pytest.mark.parametrize(("groups", "has_signal"), [((MIXED, CUT), True), ((CUT, CUT), False), ((CUT, ENDED), False)])
def test_unequal_rewards_are_a_signal_where_a_completion_is_trained(groups, has_signal):
    scores = {id(ENDED): [1.0, 1.0]}
    documents = [
        make_rollout([6, 7], list(map(Sampled, group)), scores.get(id(group), [0.0, 1.0]), end_ids=[END])
        for group in groups
    ]
    tuner, _ = make_parts()
    assert tuner.has_signal(collate(documents, num_items=3)) is has_signal


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    config = {**CONFIG, "eos_token_id": None}
    tuner, data = make_parts(config=config, mask_truncated=True, tuner_options={"tokenizer": tokenizer})
    with pytest.raises(OptionError, match="mask_truncated"):
        train(tmp_path, tuner, data, max_steps=1)
