"""``fastft demo``: generate data, train with a shipped config, and show the results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fastft.cli.doctor import LastTable
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import CONFIG_FOLDER
from lightning_fastft.core.errors import FastFTError, OptionError
from lightning_fastft.core.files import find_write_obstacle
from lightning_fastft.demo.files import DemoFiles, write_demo_files
from lightning_fastft.demo.generator import Row, final_answer, generate_rows

# Where configs/demo.yaml reads from, in the current folder.
DEMO_FOLDER = Path("runs/demo")
NUM_ANSWERED, NUM_SHOWN = 48, 3
LOSS_MEAN_STEPS = 20

# Runs in a process without lightning_fastft, because the saved model must not need it.
RELOAD_SCRIPT = """
import json, sys, numpy, torch, transformers
folder, device, ids, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True).to(device).eval()
transformers.AutoTokenizer.from_pretrained(folder)
with torch.no_grad():
    logits = model(input_ids=torch.tensor([json.loads(ids)], device=device)).logits
numpy.save(out, logits[0].float().cpu().numpy())
"""


def run_demo(words: Sequence[str]) -> int:
    """Run the demo in the current folder; return 1 if the loss did not fall or the reloaded model differs, else 0.

    Args:
        words: Arguments of ``fastft fit`` in addition to the demo's config, such as ``--trainer.max_steps 50``.

    Raises:
        OptionError: The current folder cannot be written to.
    """
    begin = time.perf_counter()
    if obstacle := find_write_obstacle(DEMO_FOLDER):
        raise OptionError(f"The demo cannot write to {DEMO_FOLDER}: {obstacle}. Run it in another folder.")
    train, validation = generate_rows()
    files = write_demo_files((train, validation), DEMO_FOLDER)
    _say(
        f"Wrote {len(train)} chats to train on and {len(validation)} held out to {DEMO_FOLDER}, with a "
        "tokenizer trained on them."
    )

    curve, table = LossCurve(), LastTable()
    cli = FastFTCLI(["fit", "--config", str(CONFIG_FOLDER / "demo.yaml"), *words], callbacks=[curve, table])
    trained = time.perf_counter()
    loss_text, has_learned = describe_losses(torch.stack(curve.losses).float().cpu())
    result = cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)[0]

    _say("\nAnswers to held-out questions")
    num_right = _show_answers(cli.model, validation)
    folder = files.model.parent / "trained"
    difference, allowed = _reload(cli.model, folder, files)
    _say(f"\nWhat is active, and why not\n{table.text}")
    _say(f"\n{loss_text}")
    _say(
        f"Validation: loss {result['val_loss']:.4f}, perplexity {result['val_perplexity']:.3f}, token accuracy "
        f"{result['val_token_accuracy']:.2%}."
    )
    _say(f"Held-out questions answered right: {num_right} of {NUM_ANSWERED}.")
    _say(
        f"Saved to {folder}; reloaded with plain transformers in a fresh process: largest difference of a logit "
        f"{difference:.1e}."
    )
    _say(f"Took {time.perf_counter() - begin:.0f} s, {trained - begin:.0f} of them until the end of training.")
    return 0 if has_learned and difference <= allowed else 1


class LossCurve(Callback):
    """Losses of the optimizer steps. They stay on the device until the end: no host sync."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self._num_steps = 0
        self._is_inside_step = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss of a micro-batch, which Lightning divided by those of a window, to that of its step."""
        loss = outputs["loss"].detach()
        if self._is_inside_step:
            self.losses[-1] = self.losses[-1] + loss
        else:
            self.losses.append(loss)
        self._is_inside_step = trainer.global_step == self._num_steps
        self._num_steps = trainer.global_step


def describe_losses(loss_S: torch.Tensor) -> tuple[str, bool]:
    """Return a line on the losses of the steps, and whether the last ones are less than half of the first.

    Example:
        >>> describe_losses(torch.tensor([4.0, 2.0, 1.0, 1.0]))[1]
        False
    """
    num_last = min(LOSS_MEAN_STEPS, len(loss_S))
    first, last = float(loss_S[0]), float(loss_S[-num_last:].mean())
    has_learned = last < 0.5 * first
    verdict = "" if has_learned else " The demo asks for less than half of the first, so its exit status is 1."
    means = f"{last:.3f} over the last {num_last} of {len(loss_S)} steps"
    return f"Training loss: {first:.3f} at the first step, {means}.{verdict}", has_learned


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _show_answers(model: Any, rows: list[Row]) -> int:
    """Show a short, a medium and a long question with both answers; return the number of correct answers."""
    by_length = sorted(rows, key=lambda row: len(row["messages"][1]["content"]))
    asked = by_length[:: max(1, len(rows) // NUM_ANSWERED)][:NUM_ANSWERED]
    written = model.generate([row["messages"][:1] for row in asked], max_new_tokens=300, do_sample=False)
    right = [final_answer(text) == final_answer(row["messages"][1]["content"]) for text, row in zip(written, asked)]
    for number in range(NUM_ANSWERED // (2 * NUM_SHOWN), NUM_ANSWERED, NUM_ANSWERED // NUM_SHOWN):
        question, answer = asked[number]["messages"][0]["content"], asked[number]["messages"][1]["content"]
        _say(f"\nQ: {question}\nModel: {written[number]}\nRight: {answer}".replace("\n", "\n  ").strip())
    return sum(right)


def _reload(model: Any, folder: Path, files: DemoFiles) -> tuple[float, float]:
    """Save, reload in plain transformers, and return the largest logit difference and its rounding bound."""
    model.save_pretrained(str(folder))
    network = model.model.eval()
    question = json.loads(files.validation.read_text(encoding="utf-8").partition("\n")[0])["messages"]
    ids = model.tokenizer(model.tokenizer.apply_chat_template(question, tokenize=False))["input_ids"]
    weight = next(network.parameters())
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([ids], device=weight.device)).logits[0].float().cpu().numpy()

    out = folder / "logits.npy"
    command = [sys.executable, "-c", RELOAD_SCRIPT, str(folder), str(weight.device), json.dumps(ids), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own script, no shell
    if done.returncode != 0:
        raise FastFTError(f"Plain transformers could not load {folder}: {done.stderr.strip().splitlines()[-1]}")
    reloaded = np.load(out)
    allowed = 4 * torch.finfo(weight.dtype).eps * float(np.abs(logits).max())
    return float(np.abs(logits - reloaded).max()), allowed
