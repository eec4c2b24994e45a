"""The model card: what it must not tell."""

import json
import shlex

import pytest
import torch

from lightning_fastft.cli.command_record import CommandRecord
from lightning_fastft.cli.trained.card import Facts, read_facts, render_card
from lightning_fastft.cli.trained.opening import COMMAND_KEY, Request, open_trained
from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.model.run_record import RUN_KEY

WORDS = [
    "fit",
    "--trainer.logger.init_args.api_key",
    "abc123",
    "--trainer.logger={class_path: WandbLogger, init_args: {project: mine, 'password': hunter2}}",
    '--trainer.loggers=[{"token": "hunter3"}]',
    "--data.max_tokens=4096",
]


def test_secrets_of_a_command_are_in_no_checkpoint_and_no_card():
    checkpoint = {}
    CommandRecord(WORDS).on_save_checkpoint(None, None, checkpoint)
    # Checkpoints of earlier versions hold the command as it was given.
    earlier = {COMMAND_KEY: shlex.join(["fastft", *WORDS])}
    cards = [render_card(Facts("base", "adapters", {}, record), title="tuned") for record in (checkpoint, earlier)]
    for text in (checkpoint[COMMAND_KEY], *cards):
        assert not [secret for secret in ("abc123", "hunter2", "hunter3") if secret in text]
        assert "project: mine" in text
        assert "--data.max_tokens=4096" in text


def test_settings_without_an_effect_are_not_shown():
    settings = {"teacher": "/home/me/big", "kind": "forward_kl", "beta": 0.5, "temperature": 1.0, "sft_weight": 0.1}
    shown = render_card(Facts("base", "all weights", {}, {"hyper_parameters": settings}))
    assert [line for line in shown.splitlines() if line.startswith(("| teacher", "| kind", "| sft_weight"))] == [
        "| teacher | big |",
        "| kind | forward_kl |",
        "| sft_weight | 0.1 |",
    ]
    assert "beta" not in shown
    assert "temperature" not in shown


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        ("grpo", {"clip_low", "clip_high"}),
        ("cispo", {"clip_high"}),
        ("sapo", {"sapo_temperature_pos", "sapo_temperature_neg"}),
    ],
)
def test_settings_of_other_policy_losses_are_not_shown(loss, shown):
    named = {"clip_low", "clip_high", "dual_clip", "unbiased_kl", "sapo_temperature_pos", "sapo_temperature_neg"}
    settings = {"loss": loss, **dict.fromkeys(named, 0.3), "dual_clip": None, "unbiased_kl": False}
    text = render_card(Facts("base", "all weights", {}, {"hyper_parameters": settings}))
    assert {name for name in named if name in text} == shown


@pytest.mark.parametrize("options", [{}, {"mask_truncated": False}, {"mask_truncated": True}])
def test_masked_completions_are_named(options):
    rollouts = {"source": "a.jsonl", "prompts": 2, "num_completions": 4, "max_new_tokens": 8, "temperature": 1.0}
    data = {"rollouts": {**rollouts, "sampled_share": 1.0, **options}}
    record = {RUN_KEY: {"data": data, "packs_per_step": 1, "optimizer_steps": 1, "epochs": 1}}
    text = render_card(Facts("base", "adapters", {}, record))
    assert "4 per prompt of at most 8 tokens" in text
    assert ("without an end" in text) is bool(options.get("mask_truncated"))


@pytest.mark.parametrize(("task_type", "auto_class"), [
    ("SEQ_CLS", "AutoModelForSequenceClassification"), ("TOKEN_CLS", "AutoModelForTokenClassification"),
])  # fmt: skip
def test_the_card_of_a_reward_model_loads_its_head(tmp_path, task_type, auto_class):
    adapters, whole = tmp_path / "adapters", tmp_path / "whole"
    for folder, name, config in (
        (adapters, "adapter_config.json", {"task_type": task_type, "base_model_name_or_path": "org/base"}),
        (whole, "config.json", {"architectures": [auto_class.replace("AutoModel", "Qwen3")]}),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(config))
        card = render_card(read_facts(folder), title="scores")
        assert f"{auto_class}.from_pretrained(" in card
        assert "CausalLM" not in card
        assert "text-generation" not in card
    assert "num_labels=1" in render_card(read_facts(adapters), title="scores")


def test_adapters_of_a_reward_model_are_not_merged_without_their_head(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": "SEQ_CLS", "base_model_name_or_path": "b"}))
    with pytest.raises(OptionError, match="head"):
        open_trained(Request(tmp_path, torch.device("cpu"), is_merged=True))
