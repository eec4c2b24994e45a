"""The model card: what it must not tell."""

import shlex

from lightning_fastft.cli.command_record import CommandRecord
from lightning_fastft.cli.trained.card import Facts, render_card
from lightning_fastft.cli.trained.opening import COMMAND_KEY

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
