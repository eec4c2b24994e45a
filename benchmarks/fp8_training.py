r"""Compare losses of a small model with all weights trained, in bf16 and with fp8 products, on real text.

    python -m benchmarks.fp8_training --data gsm8k --tokenizer gpt2_bpe --out runs/fp8_training

A Qwen3 of 8 layers, drawn at random, is trained for 1,000 steps on packs of text, from three seeds (weights and order
of the rows) by five arms: plain transformers with positions that restart at every document; the same with eager
attention, which shows the difference of two correct runs of one seed; ours through FineTuner, FastFTStrategy,
FusedKernels and Trainer; ours with ``base_compute="fp8"`` (without a GPU emulated in plain PyTorch); and a control,
ours with half the learning rate. All arms train bf16 weights with fp32 masters (on a CPU fp32 weights), with the same
AdamW and clipping; the learning rate rises over a tenth of the steps and falls to a tenth of its peak as a cosine.
Bars: the mean of the last 50 losses, and the loss of rows of the test set after the last step, by transformers' own
layers in every arm. Averaged over the seeds, their distance from those of plain must be at most the largest difference
between seeds of plain. The control must exceed it: otherwise the bars could not show a fault. Arms may run in separate
processes (``--arms``); the last one prints the verdicts. Data: a folder with train.jsonl and test.jsonl, lines of JSON
with "question" and "answer" (GSM8K); tokenizer: a folder with vocab.json and merges.txt.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.results import append_rows
from benchmarks.training_curves import read_tokenizer
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimization.choice import make_schedule
from lightning_fastft.training.optimizer import FusedAdamW

ARMS = ("plain", "eager", "ours", "fp8", "control")
SCHEDULE: dict[str, Any] = {"warmup_share": 0.1, "end_share": 0.1}
CONTROL_FACTOR = 0.5
NUM_LAST = 50
NUM_TEST_PACKS = 40
MAX_NORM = 1.0
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


class Result(NamedTuple):
    """The result of an arm for one seed.

    Args:
        losses: Loss of every step.
        test_loss: Mean over the packs of the test set after the last step.
    """

    losses: list[float]
    test_loss: float

    @property
    def last_loss(self) -> float:
        """Mean of the last losses."""
        return sum(self.losses[-NUM_LAST:]) / len(self.losses[-NUM_LAST:])


class Recipe(NamedTuple):
    """The shared inputs of the arms of a seed.

    Args:
        folder: Folder of the model in Hugging Face's format.
        packs: A pack for each step.
        test_packs: Packs of the test set.
        learning_rate: Peak learning rate.
        is_cuda: Whether to train on a GPU, in bf16 with fp32 masters; a CPU trains in fp32.
    """

    folder: Path
    packs: list[PackedBatch]
    test_packs: list[PackedBatch]
    learning_rate: float
    is_cuda: bool

    @property
    def device(self) -> str:
        """Type of the device."""
        return "cuda" if self.is_cuda else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def make_optimizer(self, parameters: Any) -> FusedAdamW:
        """Return the optimizer of every arm."""
        return FusedAdamW(parameters, lr=self.learning_rate, weight_decay=0.0, master_weights=self.is_cuda)


def read_documents(path: Path, tokenizer: Any, *, max_tokens: int) -> list[Document]:
    """Return tokenised rows, all of whose tokens are trained, without those longer than a pack."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    documents = []
    for row in rows:
        ids = np.array([*tokenizer(f"{row['question']}\n{row['answer']}")["input_ids"], tokenizer.eos_token_id])
        documents.append(Document(ids, ids))
    return [document for document in documents if len(document.input_ids) <= max_tokens]


def make_packs(documents: Sequence[Document], *, num_packs: int, max_tokens: int, seed: int) -> list[PackedBatch]:
    """Return packs of whole documents, padded to one length, in a shuffled order that repeats."""
    generator = random.Random(seed)
    packs: list[PackedBatch] = []
    current: list[Document] = []
    order: list[int] = []
    while len(packs) < num_packs:
        order = order or generator.sample(range(len(documents)), len(documents))
        document = documents[order.pop()]
        if sum(len(each.input_ids) for each in current) + len(document.input_ids) > max_tokens:
            packs.append(collate(current, pad_to=max_tokens))
            current = []
        current.append(document)
    return packs


def train_plain(recipe: Recipe, *, attention: str) -> Result:
    """Train transformers' own model in a plain loop."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(recipe.folder, dtype=recipe.dtype, attn_implementation=attention)
    model.train().to(recipe.device)
    optimizer = recipe.make_optimizer(model.parameters())
    schedule = LambdaLR(optimizer, make_schedule("cosine", num_steps=len(recipe.packs), warmup_steps=None, **SCHEDULE))
    losses = []
    for pack in recipe.packs:
        loss = plain_loss(model, pack)
        loss.backward()
        optimizer.clip_next(MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return Result([float(loss) for loss in losses], test(model, recipe))


def plain_loss(model: Any, pack: PackedBatch) -> torch.Tensor:
    """Return the loss of transformers' own layers, which separate packed documents by positions that restart."""
    inputs = {name: pack[name].to(model.device) for name in ("input_ids", "position_ids", "labels")}
    loss: torch.Tensor = model(**inputs, use_cache=False).loss
    return loss


@torch.no_grad()
def test(model: Any, recipe: Recipe) -> float:
    """Return the mean loss of the test packs."""
    model.eval().to(recipe.device)
    losses = [float(plain_loss(model, pack)) for pack in recipe.test_packs]
    return sum(losses) / len(losses)


def train_ours(recipe: Recipe, *, base_compute: str) -> Result:
    """Train with FineTuner, as a user does."""
    fused = FusedKernels(base_compute=base_compute)
    tuner = FineTuner(
        str(recipe.folder),
        dtype=str(recipe.dtype).removeprefix("torch."),
        optimizer=recipe.make_optimizer,
        scheduler="cosine",
        warmup_share=SCHEDULE["warmup_share"],
        min_learning_rate_share=SCHEDULE["end_share"],
    )
    record = _Losses()
    trainer = Trainer(
        accelerator="gpu" if recipe.is_cuda else "cpu",
        devices=1,
        strategy=FastFTStrategy(activations=OffloadCheckpointing("keep")),
        callbacks=[fused, record],
        max_steps=len(recipe.packs),
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(tuner, train_dataloaders=torch.utils.data.DataLoader(recipe.packs, batch_size=None))  # type: ignore[arg-type]
    inactive = [status for status in fused.status() if status.state != "active"]
    if inactive:
        raise ValueError(f"What was asked for did not run: {inactive}")
    # The run is over, so the model is transformers' own again.
    return Result([float(loss) for loss in record.losses], test(tuner.model, recipe))


class _Losses(Callback):
    """Store the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())


def judge(results: Mapping[str, Sequence[Result]]) -> tuple[list[str], bool]:
    """Return a line for each arm and figure, and whether all bars are met."""
    lines, are_met = [], True
    for name in ("last_loss", "test_loss"):
        plain = [getattr(result, name) for result in results["plain"]]
        spread = max(plain) - min(plain)
        shown = ", ".join(f"{loss:.4f}" for loss in plain)
        lines.append(f"{name}: plain {shown}; the seeds are {spread:.4f} apart")
        for arm in results:
            if arm == "plain":
                continue
            values = [getattr(result, name) for result in results[arm]]
            apart = sum(values) / len(values) - sum(plain) / len(plain)
            is_met = (abs(apart) <= spread) is not (arm == "control")
            are_met &= is_met
            shown = ", ".join(f"{loss:.4f}" for loss in values)
            lines.append(f"{'met' if is_met else 'MISSED'}: {name}: {arm} {shown}; on average {apart:+.4f} from plain")
    return lines, are_met


def result_rows(results: Mapping[str, Sequence[Result]], *, command: str, device: str) -> list[dict[str, Any]]:
    """Return rows for results.csv: the mean and the spread over the seeds of each arm."""
    rows: list[dict[str, Any]] = []
    for name, title in (("last_loss", f"mean of the last {NUM_LAST} losses"), ("test_loss", "test loss")):
        for arm, each in results.items():
            values = [getattr(result, name) for result in each]
            shared = {
                "benchmark": "fp8_training",
                "workload": f"qwen3 of 8 layers, every weight, {len(each[0].losses)} steps",
                "system": arm,
                "version": f"torch {torch.__version__.partition('+')[0]}",
                "n": len(values),
                "unit": "nats",
                "command": command,
                "device": device,
            }
            rows += [
                {**shared, "metric": metric, "value": value}
                for metric, value in (
                    (title, sum(values) / len(values)),
                    (f"{title}, seeds apart", max(values) - min(values)),
                )
            ]
    return rows


def make_recipe(options: argparse.Namespace, folder: Path, *, seed: int) -> Recipe:
    """Write the model of a seed, and pack its text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = read_tokenizer(options.tokenizer)
    trained, tested = (
        read_documents(options.data / name, tokenizer, max_tokens=options.max_tokens)
        for name in ("train.jsonl", "test.jsonl")
    )
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{"vocab_size": -(-len(tokenizer) // 64) * 64, **MODEL})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Recipe(
        folder,
        make_packs(trained, num_packs=options.steps, max_tokens=options.max_tokens, seed=seed),
        make_packs(tested, num_packs=min(NUM_TEST_PACKS, options.steps), max_tokens=options.max_tokens, seed=0),
        options.learning_rate,
        options.device == "cuda",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the losses, and print the verdicts if every arm has run; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for ARM_SEED.json, verdicts.txt and rows.csv")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    fp8 = "fp8" if options.device == "cuda" else "fp8_reference"
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            recipe = make_recipe(options, Path(folder), seed=seed)
            for arm in options.arms:
                factor = CONTROL_FACTOR if arm == "control" else 1.0
                given = recipe._replace(learning_rate=factor * recipe.learning_rate)
                compute = fp8 if arm == "fp8" else "model_dtype"
                attention = {"plain": "sdpa", "eager": "eager"}.get(arm)
                result = (
                    train_ours(given, base_compute=compute)
                    if attention is None
                    else train_plain(given, attention=attention)
                )
                (options.out / f"{arm}_{seed}.json").write_text(json.dumps(result._asdict()), encoding="utf-8")
                print(f"{arm}, seed {seed}: last {result.last_loss:.4f}, test {result.test_loss:.4f}", flush=True)
    files = {arm: [options.out / f"{arm}_{seed}.json" for seed in range(options.seeds)] for arm in ARMS}
    if not all(file.exists() for each in files.values() for file in each):
        return 0
    results = {
        arm: [Result(**json.loads(file.read_text(encoding="utf-8"))) for file in each] for arm, each in files.items()
    }
    lines, are_met = judge(results)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    command = "python -m benchmarks.fp8_training " + " ".join(sys.argv[1:] if arguments is None else arguments)
    append_rows(result_rows(results, command=command, device=device), path=options.out / "rows.csv")
    (options.out / "verdicts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return int(not are_met)


if __name__ == "__main__":
    sys.exit(main())
