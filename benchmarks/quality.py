r"""Fine-tune one small model on real text by four systems: validation loss and exact match over wall time.

    python -m benchmarks.quality --data ../shared/data/gsm8k --tokenizer ../shared/data/gpt2_bpe --out runs/quality

A Qwen3 of 50 million weights is trained from scratch on the text of every second row of GSM8K. Then every system
fine-tunes it with LoRA on the answers of the other rows, for a whole epoch, once per seed. A seed draws the adapters
and the order of the documents, so that all systems start from the same numbers and train the same packs with the same
optimizer (AdamW, 32 bits), constant learning rate and clipping. Packs are full: the last document of a pack is cut.
Each system runs at its fastest setting, in its own process, by the ruler's arms (benchmarks/ruler/arms). Adapters are
copied during training; this time does not count, while compilation and recordings do. Afterwards plain transformers +
PEFT evaluates all copies on the test set: mean loss of the answer's tokens, and the share of rows whose final number is
predicted token by token, given the worked solution. A model of this size solves no problem alone, so generated answers
would not be informative.

In OUT: raw.jsonl, log.txt, curves.csv, quality.svg, rows.csv (columns of results.csv: the end of each curve).
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

if sys.argv[1:2] == ["arm"] and '"system": "unsloth"' in " ".join(sys.argv):
    # Unsloth patches torch and transformers on import, so it must be imported first.
    import unsloth  # noqa: F401

import torch

from benchmarks.results import append_rows
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, base_dtype, versions
from benchmarks.ruler.driver import run_arms
from benchmarks.ruler.judge import load_adapter, trainable_adapters
from benchmarks.ruler.report import read_records
from benchmarks.ruler.workloads import IGNORED_LABEL, Pack, Workload, WorkloadFiles, lora_config

# The fastest setting of each system on a model that fits.
MODES: Mapping[str, str] = {"ours": "keep+graphs", "unsloth": "off", "trl": "keep+liger", "plain": "keep"}
NUM_SEEDS = 3
NUM_COPIES = 6
# Tokens of a row of text for training the base.
_BASE_ROW = 512
_SIZES: Mapping[str, dict[str, int]] = {
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    # For tests on a CPU.
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
}
_COLOURS = {"ours": "#1f6f8b", "unsloth": "#e0a458", "trl": "#7a9e4f", "plain": "#8a8f94"}


class Example(NamedTuple):
    """One row of the data, tokenised: question, worked solution, final number and end of text.

    Args:
        ids: Token ids.
        answer: Index at which the answer begins.
        final: Index at which the final number begins.
    """

    ids: list[int]
    answer: int
    final: int


class LabelledPack(Pack):
    """A pack with its own labels."""

    def __init__(self, *, input_id_T: np.ndarray, lengths: Sequence[int], label_T: np.ndarray) -> None:
        super().__init__(input_id_T=input_id_T, lengths=lengths)
        self._label_T = label_T

    def label_T(self, share: float) -> np.ndarray:
        """Return the labels, independent of the share."""
        return self._label_T


def make_workload(size: str, *, max_tokens: int, learning_rate: float) -> Workload:
    """Return the workload of one size of model."""
    sizes = _SIZES[size]
    config = {
        **sizes,
        "vocab_size": 50_304,
        "num_key_value_heads": sizes["num_attention_heads"] // 2,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return Workload(
        f"gsm8k-{size}", "qwen3", config, None, max_tokens=max_tokens, lora_rank=32, lora_alpha=64,
        learning_rate=learning_rate,
    )  # fmt: skip


class QualityFiles(WorkloadFiles):
    """The files of one seed: the shared base, and its own adapters and packs."""

    def __init__(self, root: Path, workload: Workload, *, seed: int = 0) -> None:
        super().__init__(root, workload)
        self.seed = seed
        self.adapter = self.folder / f"adapter{seed}"
        self.examples = self.folder / "examples.json"
        self.about = self.folder / "workload.json"

    def read_examples(self, split: str) -> list[Example]:
        """Return the tokenised rows of "train" or "test"."""
        return [Example(*row) for row in json.loads(self.examples.read_text())[split]]

    def read_packs(self) -> list[Pack]:
        """Return the packs of an epoch in the order of the seed."""
        # The base was trained on the others.
        examples = self.read_examples("train")[1::2]
        random.Random(self.seed).shuffle(examples)
        return list(fill_packs(examples, max_tokens=self.workload.max_tokens))

    def copy_path(self, system: str, step: int) -> Path:
        """Return the file of a system's adapters after this many steps."""
        return self.folder / "copies" / f"{system}-{self.seed}-{step}.safetensors"


def read_rows(path: Path, tokenizer: Any) -> list[Example]:
    """Return the tokenised rows of a file of GSM8K."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        worked, _, number = row["answer"].rpartition("####")
        question, solution, final = (
            tokenizer(text)["input_ids"] for text in (row["question"] + "\n", worked + "####", " " + number.strip())
        )
        ids = [*question, *solution, *final, tokenizer.eos_token_id]
        examples.append(Example(ids, len(question), len(question) + len(solution)))
    return examples


def fill_packs(examples: Sequence[Example], *, max_tokens: int) -> Iterator[LabelledPack]:
    """Yield packs of exactly max_tokens: documents in order, the last one of a pack cut; an incomplete pack is dropped.

    Example:
        >>> examples = [Example([1, 2, 3], 1, 2), Example([4, 5, 6], 1, 2)]
        >>> [(pack.lengths, pack.label_T(1.0).tolist()) for pack in fill_packs(examples, max_tokens=5)]
        [([3, 2], [-100, 2, 3, -100, 5])]
    """
    ids: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    for example in examples:
        length = min(len(example.ids), max_tokens - len(ids))
        ids += example.ids[:length]
        labels += [IGNORED_LABEL] * min(example.answer, length) + example.ids[example.answer : length]
        lengths.append(length)
        if len(ids) == max_tokens:
            yield LabelledPack(input_id_T=np.array(ids), lengths=lengths, label_T=np.array(labels))
            ids, labels, lengths = [], [], []


class CurveRecorder(CaseRecorder):
    """Copy the adapters of a case while it trains; stop when its packs are used up.

    A case of num_steps trains one more step, with any warm-up.
    """

    @property
    def num_packs(self) -> int:
        """Steps of the run."""
        return self.case.num_steps + 1

    def pack_at(self, step: int) -> Pack:
        """Return the pack of a step; loaders also request packs after the last one."""
        return self._packs[step % self.num_packs]

    @property
    def copied_steps(self) -> list[int]:
        """Steps after which adapters are copied, more of them while losses fall fast."""
        shares = [(number / NUM_COPIES) ** 2 for number in range(1, NUM_COPIES + 1)]
        return sorted({0, *(max(1, round(share * self.num_packs)) for share in shares)})

    def batch_arrived(self, batch: Any = None) -> None:
        """Start the clock with the first batch."""
        if self.step == 0:
            self._run_start = time.perf_counter()
            self.record["curve"], self._losses = [], list[torch.Tensor]()

    def backward_done(self, model: torch.nn.Module, *, loss: torch.Tensor | None = None) -> None:
        """Store the loss; copy the initial adapters."""
        self._model = model
        if loss is not None:
            self._losses.append(loss)
        if self.step == 0:
            self._copy()

    def step_done(self) -> bool:
        """Copy the adapters after some steps; return True at the end of the epoch."""
        self.step += 1
        if self.step in self.copied_steps:
            self._copy()
        if self.step < self.num_packs:
            return False
        self.record["losses"] = [round(float(loss), 5) for loss in self._losses]
        self.release()
        return True

    def _copy(self) -> None:
        from safetensors.torch import save_file

        with self.not_counted():
            seconds = time.perf_counter() - self._run_start - self._not_counted_s if self.step else 0.0
            assert isinstance(self._files, QualityFiles)
            path = self._files.copy_path(self.case.system, self.step)
            path.parent.mkdir(exist_ok=True)
            save_file(
                {
                    name: value.detach().float().cpu().contiguous()
                    for name, value in trainable_adapters(self._model).items()
                },
                path,
            )
        self.record["curve"].append([self.step, seconds])


def build(files: QualityFiles, *, data: Path, tokenizer: Path, num_steps: int, device: str) -> float:
    """Tokenise the rows, train the base on half of them, and draw adapters for every seed; return the base's loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.ruler.building import _write_tokenizer
    from benchmarks.training_curves import read_tokenizer

    files.folder.mkdir(parents=True, exist_ok=True)
    files.about.write_text(json.dumps(vars(files.workload)))
    words = read_tokenizer(tokenizer)
    rows = {split: read_rows(data / f"{split}.jsonl", words) for split in ("train", "test")}
    files.examples.write_text(json.dumps(rows))
    config = AutoConfig.for_model("qwen3", **files.workload.model_config)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(device)
    text = [token for example in rows["train"][::2] for token in example.ids]
    loss = _train_base(model, torch.tensor(text), num_steps=num_steps, device=device)
    model.to(base_dtype(is_cuda=device == "cuda")).save_pretrained(files.model)
    _write_tokenizer(files)
    for seed in range(NUM_SEEDS):
        _write_adapter(QualityFiles(files.folder.parent, files.workload, seed=seed), model)
    return loss


def _train_base(model: Any, token_N: torch.Tensor, *, num_steps: int, device: str) -> float:
    """Train all weights on running text; return the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=device == "cuda")
    row_length = min(_BASE_ROW, len(token_N) // 2)
    generator, losses = torch.Generator().manual_seed(0), []
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=num_steps + 1, pct_start=0.1)
    for _ in range(num_steps):
        begin_B = torch.randint(len(token_N) - row_length, (16 if device == "cuda" else 2,), generator=generator)
        ids_BT = torch.stack([token_N[begin : begin + row_length] for begin in begin_B.tolist()]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(1, num_steps // 10) :]).mean())


def _write_adapter(files: QualityFiles, model: Any) -> None:
    """Write the adapters of a seed as PEFT draws them: A at random, B zero."""
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(files.seed), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in files.workload.target_modules:
            num_rows, num_columns = module.weight.shape
            a = (torch.rand(files.workload.lora_rank, num_columns, generator=generator) * 2 - 1) / math.sqrt(
                num_columns
            )
            # Exact in bf16, so that bf16 and fp32 adapters start from equal values.
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16).float()
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(num_rows, files.workload.lora_rank)
    files.adapter.mkdir(exist_ok=True)
    save_file(tensors, files.adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    lora_config(files.workload).save_pretrained(files.adapter)


@torch.no_grad()
def evaluate(model: Any, examples: Sequence[Example], *, device: str, batch_size: int = 32) -> tuple[float, float]:
    """Return the mean loss of the answers' tokens, and the share of rows with a correctly predicted final number.

    Args:
        model: Model of plain transformers + PEFT.
        examples: Examples of the test set.
        device: "cuda" or "cpu".
        batch_size: Rows of a padded batch.
    """
    model.eval()
    ordered = sorted(examples, key=lambda example: len(example.ids))
    losses, num_answer, num_exact = (
        torch.zeros((), dtype=torch.float64, device=device),
        0,
        torch.zeros((), device=device),
    )
    for begin in range(0, len(ordered), batch_size):
        rows = ordered[begin : begin + batch_size]
        longest = max(len(row.ids) for row in rows)
        ids_BT = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows], device=device)
        place_T = torch.arange(longest, device=device)
        length_B, answer_B, final_B = (
            torch.tensor(values, device=device)[:, None]
            for values in ([len(row.ids) for row in rows], [row.answer for row in rows], [row.final for row in rows])
        )
        logits_BTV = model(input_ids=ids_BT, attention_mask=(place_T < length_B).long(), use_cache=False).logits[:, :-1]
        is_answer_BT = ((place_T >= answer_B) & (place_T < length_B))[:, 1:]
        is_final_BT = ((place_T >= final_B) & (place_T < length_B))[:, 1:]
        target_BT = ids_BT[:, 1:]
        loss_N = torch.nn.functional.cross_entropy(
            logits_BTV[is_answer_BT].float(), target_BT[is_answer_BT], reduction="none"
        )
        losses += loss_N.double().sum()
        num_answer += loss_N.numel()
        num_exact += ((logits_BTV.argmax(-1) == target_BT) | ~is_final_BT).all(dim=1).sum()
    return float(losses) / num_answer, float(num_exact) / len(ordered)


def evaluate_all(
    records: Sequence[Mapping[str, Any]], *, files: QualityFiles, num_rows: int, device: str
) -> list[dict[str, Any]]:
    """Return a row for every copy of every case: system, seed, step, seconds, loss, exact match."""
    from safetensors.torch import load_file

    from benchmarks.ruler.arms.plain import load_model

    model, examples = load_model(files, device=device, attention="sdpa"), files.read_examples("test")[:num_rows]
    rows = []
    for record in records:
        if "error" in record:
            continue
        own = QualityFiles(files.folder.parent, files.workload, seed=seed_of(record))
        for step, seconds in record.get("curve", ()):
            load_adapter(model, load_file(own.copy_path(record["system"], step)))
            loss, exact = evaluate(model, examples, device=device)
            rows.append(
                {"system": record["system"], "mode": record["mode"], "seed": own.seed, "step": step, "seconds": round(seconds, 3),
                 "loss": round(loss, 5), "exact": round(exact, 4)}
            )  # fmt: skip
    return rows


def seed_of(record: Mapping[str, Any]) -> int:
    """Return the seed of a case."""
    return int(str(record["repeat"]).rpartition(" ")[2])


def summarise(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each system: the end of its curves, over the seeds."""
    lines = []
    for system in dict.fromkeys(row["system"] for row in curves):
        ends = list({row["seed"]: row for row in curves if row["system"] == system}.values())
        losses, exact, seconds = (np.array([row[name] for row in ends]) for name in ("loss", "exact", "seconds"))
        lines.append(
            f"{system} {ends[0]['mode']}: {ends[0]['step']} steps in {seconds.mean():.1f} s; loss {losses.mean():.4f} "
            f"({losses.min():.4f} to {losses.max():.4f}), exact {exact.mean():.1%} ({exact.min():.1%} to {exact.max():.1%})"
        )
    return lines


def result_rows(curves: Sequence[Mapping[str, Any]], *, command: str, workload: Workload) -> list[dict[str, Any]]:
    """Return rows for results.csv: the end of every curve."""
    about = versions()
    shared = {
        "benchmark": "quality",
        "workload": workload.name,
        "version": f"torch {about['torch']}; transformers {about['transformers']}",
        "command": command,
        "device": about.get("device", "cpu"),
    }
    ends = {(row["system"], row["seed"]): row for row in curves}.values()
    return [
        {**shared, "system": f"{row['system']} {row['mode']}, seed {row['seed']}", "metric": metric, "value": row[name],
         "unit": unit, "n": row["step"]}
        for row in ends
        for metric, name, unit in (
            ("validation loss", "loss", "1"),
            ("exact match", "exact", "1"),
            ("training time", "seconds", "s"),
        )
    ]  # fmt: skip


def draw(curves: Sequence[Mapping[str, Any]], *, title: str, path: Path) -> None:
    """Draw validation loss and exact match over wall time, a line for each seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "quality"
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2),
        ("loss", "exact"),
        ("validation loss of the answers", "final number exact, given the solution"),
    ):
        labelled = set()
        for system, seed in dict.fromkeys((row["system"], row["seed"]) for row in curves):
            own = [row for row in curves if (row["system"], row["seed"]) == (system, seed)]
            axes.plot(
                [row["seconds"] for row in own], [row[name] for row in own], color=_COLOURS[system], linewidth=1.2,
                marker=".", label=None if system in labelled else f"{system} ({own[0]['mode']})",
            )  # fmt: skip
            labelled.add(system)
        axes.set_xlabel("seconds of training, compilation included")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    deadline = time.monotonic() + options.budget_s
    workload = make_workload(options.size, max_tokens=options.max_tokens, learning_rate=options.learning_rate)
    files, out = QualityFiles(options.root, workload), options.out
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    loss = build(
        files, data=options.data, tokenizer=options.tokenizer, num_steps=options.base_steps, device=options.device
    )
    print(f"base: loss {loss:.3f} after {options.base_steps} steps, {time.perf_counter() - start:.0f} s", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    num_packs = min(len(files.read_packs()), options.steps or 10**9)
    raw = out / "raw.jsonl"
    template = Case(workload.name, "", "", optimizer="adamw_fused", num_warmup=1, num_steps=num_packs - 1)
    arms = [
        [replace(template, system=system, mode=MODES[system], repeat=f"seed {seed}") for seed in range(options.seeds)]
        for system in options.systems
    ]
    # Time for the evaluation, also if the last system fails.
    left = deadline - time.monotonic() - options.evaluation_s
    run_arms(
        arms, root=options.root, raw=raw, log=out / "log.txt", device=options.device, budget_seconds=left,
        arm_seconds=left, module="benchmarks.quality",
    )  # fmt: skip
    records = read_records(raw)
    for record in records:
        if "error" in record or "curve" not in record:
            print(f"no curve: {record['title']}: {record.get('error') or record['reason']}", flush=True)
    start = time.perf_counter()
    curves = evaluate_all(records, files=files, num_rows=options.test_rows, device=options.device)
    print(f"evaluated {len(curves)} copies in {time.perf_counter() - start:.0f} s", flush=True)
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["system", "mode", "seed", "step", "seconds", "loss", "exact"])
        writer.writeheader()
        writer.writerows(curves)
    title = (
        f"Qwen3 of {options.size} size trained from scratch (loss {loss:.2f}), then LoRA on GSM8K, {num_packs} steps"
    )
    draw(curves, title=title, path=out / "quality.svg")
    (out / "rows.csv").unlink(missing_ok=True)
    command = "python -m benchmarks.quality " + " ".join(words)
    append_rows(result_rows(curves, command=command, workload=workload), path=out / "rows.csv")
    print("\n".join(summarise(curves)), flush=True)
    return 0 if {row["system"] for row in curves} == set(options.systems) else 1


def _arm(options: argparse.Namespace) -> int:
    from importlib import import_module

    cases = [Case(**case) for case in json.loads(options.cases)]
    arm = import_module(f"benchmarks.ruler.arms.{cases[0].system}")
    workload = Workload(**json.loads((options.root / cases[0].workload / "workload.json").read_text()))
    for case in cases:
        files = QualityFiles(options.root, workload, seed=seed_of(vars(case)))
        arm.run([case], files=files, log=CaseLog(options.raw), device=options.device, recorder=CurveRecorder)
    return 0


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_arm = words[:1] == ["arm"]
    parser.add_argument("--root", type=Path, default=Path("runs/weights"), help="folder for the model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    if is_arm:
        parser.add_argument("--cases", required=True)
        parser.add_argument("--raw", type=Path, required=True)
        return _arm(parser.parse_args(words[1:]))
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with vocab.json and merges.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--size", default="small", choices=list(_SIZES))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, help="packs of the fine-tuning; by default a whole epoch")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--test-rows", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument(
        "--evaluation-s", type=float, default=35.0, help="seconds of the budget reserved for the evaluation"
    )
    return _run(parser.parse_args(words), words)


if __name__ == "__main__":
    sys.exit(main())
