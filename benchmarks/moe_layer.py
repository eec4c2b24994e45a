r"""Time one layer of experts, with and without LoRA: transformers eager and grouped_mm, the published form, ours.

    python -m benchmarks.moe_layer --out runs/moe_layer
    python -m benchmarks.moe_layer --out runs/moe_layer --shapes gpt-oss-20b --tokens 8192 --loads skewed \
        --adapters lora

The experts modules of Qwen3-30B-A3B and gpt-oss-20b as transformers builds them, bf16, random weights; 8,192 and 16,384
tokens. Routing is that of random logits, or has a bias that sends half of the rows to a tenth of the experts. Without
LoRA the gradients of states and routing weights are computed, with it (r = 16, PEFT's ``target_parameters``, A and B
not zero) those of the adapters too. *Published* is the order by one stable argsort, one bincount and a Python loop over
the experts that have rows.

Every arm is compared before it is timed: output and every gradient against the eager form in fp32 on the same tokens,
cosine at least 0.999 and norm within 2 %; for *ours+fp8*, with frozen experts in e4m3, the limits of the ruler for fp8.
Then 5 warm-up runs and 30 timed ones by CUDA events: p50, p10, p90 of forward and of backward. Peak: memory allocated
in one forward and backward, in addition to earlier allocations. Waits: host syncs in one forward and in one backward
(benchmarks/ruler/measure.py). A further call in the same folder continues where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.results import append_rows
from benchmarks.ruler import judge as judging
from benchmarks.ruler.building import busiest_share, num_busy
from benchmarks.ruler.cases import case_failures, drop_frames, versions
from benchmarks.ruler.measure import HostWaits, StepClock, peak_memory_gib, summarise_ms
from benchmarks.ruler.report import read_records
from benchmarks.ruler.workloads import ATTENTION_MODULES, EXPERT_PARAMETERS
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.moe.install import install_bincount_router, install_fp8_experts

NUM_WARMUP, NUM_RUNS = 5, 30
RANK = 16
# Skewed routing: this share of the rows goes to a tenth of the experts.
SKEWED_SHARE = 0.5
ARMS = ("eager", "grouped_mm", "published", "ours", "ours+fp8")
LOADS = ("balanced", "skewed")
ADAPTERS = ("none", "lora")
PUBLISHED = "fastft_bench_published"
# A model of one layer with a tiny vocabulary: only its experts module is measured.
_SHARED = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 64,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "tiny-qwen3": (
        "qwen3_moe",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 24,
            "num_experts": 20,
            "num_experts_per_tok": 4,
        },
    ),
    "tiny-gpt-oss": (
        "gpt_oss",
        {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 20, "num_experts_per_tok": 4},
    ),
}
_HEADER = ("arm", "fwd ms", "p10", "p90", "bwd ms", "p10", "p90", "n", "GiB", "waits f/b", "min cos", "x eager")


class Case(NamedTuple):
    """One row of the table."""

    shape: str
    num_tokens: int
    load: str
    adapter: str
    arm: str

    @property
    def workload(self) -> str:
        """Return the inputs of the computation, the same for every arm."""
        return (
            f"{self.shape}, {self.num_tokens} tokens, {self.load}, "
            f"{'LoRA r=16 on experts' if self.adapter == 'lora' else 'frozen experts'}"
        )


class Inputs(NamedTuple):
    """The inputs of one layer, and the gradient of its output."""

    x_TD: torch.Tensor
    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    d_y_TD: torch.Tensor


# The published form


def published_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run an experts module of transformers as published: one stable argsort, one bincount, a loop over the experts
    that have rows.

    Rows of an expert are a contiguous slice of the order. The sum is fp32: a token occurs once per expert and experts
    run one after the other.
    """
    num_chosen = top_k_index.shape[1]
    expert_N, weight_N = top_k_index.reshape(-1), top_k_weights.reshape(-1)
    order_N = torch.argsort(expert_N, stable=True)
    token_N = order_N // num_chosen
    counts = torch.bincount(expert_N, minlength=self.num_experts).tolist()
    # Read once: with adapters each access may compute a whole stack.
    gate_up, down = self.gate_up_proj, self.down_proj
    if not self.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    y_TD = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = slice(start, start + count)
        start += count
        columns = hidden_states[token_N[rows]] @ gate_up[expert]
        columns = self._apply_gate(columns + self.gate_up_proj_bias[expert] if self.has_bias else columns)
        out = columns @ down[expert]
        out = out + self.down_proj_bias[expert] if self.has_bias else out
        y_TD.index_add_(0, token_N[rows], out.float() * weight_N[order_N[rows], None].float())
    return y_TD.to(hidden_states.dtype)


def register_published() -> None:
    """Register the published form with transformers as an experts implementation."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(PUBLISHED, published_experts_forward)


# One layer


def make_model(shape: str, *, adapter: str, device: str, dtype: torch.dtype) -> nn.Module:
    """Return a model of one layer whose experts have seeded weights, and adapters if requested.

    Args:
        shape: A key of SHAPES.
        adapter: "none" or "lora".
        device: Device of the model.
        dtype: Dtype of the weights; values are drawn in bf16, so that both dtypes have the same numbers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, differences = SHAPES[shape]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{**_SHARED, **differences}), dtype=dtype
        )
    model.requires_grad_(False)
    if adapter == "lora":
        from peft import LoraConfig, get_peft_model

        parameters = [f"mlp.experts.{name}" for name in EXPERT_PARAMETERS.values()]
        # Some versions of PEFT refuse such a configuration without a linear layer; attention is not measured.
        config = LoraConfig(
            r=RANK,
            lora_alpha=RANK,
            lora_dropout=0.0,
            target_modules=list(ATTENTION_MODULES),
            target_parameters=parameters,
        )
        model = get_peft_model(model, config)
    generator = torch.Generator(device).manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            _draw(parameter, name, generator)
            parameter.requires_grad_("lora_" in name)
        else:
            parameter.requires_grad_(False)
    return model


@torch.no_grad()
def _draw(parameter: torch.Tensor, name: str, generator: torch.Generator) -> None:
    """Fill a parameter so that the columns of every product have a size of about 1, and adapters add a tenth of it."""
    std = 0.1 if "bias" in name else (parameter.shape[-1] if "lora_A" in name else max(parameter.shape[-2:])) ** -0.5
    if "lora_B" in name:
        std = 0.1 * RANK**-0.5
    values = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.bfloat16)
    parameter.copy_(values.mul_(std))


def experts_of(model: nn.Module) -> nn.Module:
    """Return the module that the layer calls: the experts, or the adapters around them."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.model.layers[0].mlp.experts


def make_inputs(shape: str, *, num_tokens: int, load: str, device: str) -> tuple[Inputs, float]:
    """Return seeded inputs in bf16 values (fp32), and the share of rows that the busiest tenth of the experts gets."""
    model_type, config = SHAPES[shape]
    num_experts = config["num_experts" if model_type == "qwen3_moe" else "num_local_experts"]
    generator = torch.Generator(device).manual_seed(5)

    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16).float()

    logits_TE = values(num_tokens, num_experts)
    if load == "skewed":
        logits_TE = skew_logits(logits_TE, num_chosen=config["num_experts_per_tok"])
    top = logits_TE.topk(config["num_experts_per_tok"], dim=-1)
    # Not sorted, because a router need not sort.
    shuffle_TK = torch.rand(top.indices.shape, generator=generator, device=device).argsort(dim=1)
    expert_TK = top.indices.gather(1, shuffle_TK)
    weight_TK = top.values.softmax(dim=-1).gather(1, shuffle_TK).to(torch.bfloat16).float()
    x_TD, d_y_TD = values(num_tokens, config["hidden_size"]), values(num_tokens, config["hidden_size"])
    return Inputs(x_TD, expert_TK, weight_TK, d_y_TD), busiest_share(expert_TK, num_experts)


def skew_logits(logits_TE: torch.Tensor, *, num_chosen: int) -> torch.Tensor:
    """Add the bias to every tenth expert that sends half of the rows there."""
    num_experts = logits_TE.shape[1]
    busy_E = torch.zeros(num_experts, dtype=torch.bool, device=logits_TE.device)
    busy_E[:: max(1, num_experts // num_busy(num_experts))][: num_busy(num_experts)] = True
    low, high = 0.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        share = float(busy_E[(logits_TE + middle * busy_E).topk(num_chosen, dim=-1).indices].float().mean())
        low, high = (middle, high) if share < SKEWED_SHARE else (low, middle)
    return logits_TE + high * busy_E


def set_arm(model: nn.Module, arm: str, patcher: ModelPatcher) -> None:
    """Set the experts implementation of a model for an arm; ours uses what BincountRouter installs."""
    if arm.startswith("ours"):
        install_bincount_router(model, patcher)
        if arm == "ours+fp8":
            is_emulated = next(model.parameters()).device.type == "cpu"
            (experts,) = install_fp8_experts(model, patcher, is_emulated=is_emulated)
            if experts.status().state != "active":
                raise ValueError(experts.status().reason)
            experts.prepare()
        return
    register_published()
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_experts_implementation(PUBLISHED if arm == "published" else arm)


class Layer:
    """Forward and backward of one layer in one arm.

    Args:
        model: A model of make_model with an arm set.
        inputs: Its inputs, in the dtype of the model.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        dtype = next(
            parameter.dtype
            for name, parameter in model.named_parameters()
            if ".experts." in name and "lora_" not in name
        )
        self._experts = experts_of(model)
        self.parameters = judging.trainable_adapters(model)
        self._x = inputs.x_TD.to(dtype, copy=True).requires_grad_()
        self._weight = inputs.weight_TK.to(dtype, copy=True).requires_grad_()
        self._expert, self._d_y = inputs.expert_TK, inputs.d_y_TD.to(dtype)

    def forward(self) -> torch.Tensor:
        """Return the output."""
        return self._experts(self._x, self._expert, self._weight)

    def backward(self, y_TD: torch.Tensor) -> None:
        """Write fresh gradients."""
        for tensor in (self._x, self._weight, *self.parameters.values()):
            tensor.grad = None
        y_TD.backward(self._d_y)

    def results(self) -> dict[str, torch.Tensor]:
        """Return output and gradients of one run, fp32."""
        y_TD = self.forward()
        self.backward(y_TD)
        results = {"output": y_TD.detach(), "d states": self._x.grad, "d routing weights": self._weight.grad}
        results |= {f"d {name}": parameter.grad for name, parameter in self.parameters.items()}
        return {name: tensor.float() for name, tensor in results.items() if tensor is not None}


# Measuring


def measure(layer: Layer, *, arm: str, truth: dict[str, torch.Tensor], num_runs: int, device: str) -> dict[str, Any]:
    """Compare one arm with the truth and time it; a record without "forward" was refused."""
    is_cuda = device == "cuda"
    verdict = judging.judge(layer.results(), truth, device=device, limits=judging.limits_of(arm))
    record: dict[str, Any] = {"verdict": verdict.to_dict(), "reason": verdict.reason}
    if not verdict.passed:
        return record
    record["waits"] = count_waits(layer, is_cuda=is_cuda)
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 2**30 if is_cuda else 0.0
    layer.backward(layer.forward())
    record["peak_gib"] = peak_memory_gib(is_cuda=is_cuda)["allocated"] - before
    for _ in range(NUM_WARMUP):
        layer.backward(layer.forward())
    clock = StepClock(is_cuda=is_cuda)
    clock.mark()
    for _ in range(num_runs):
        y_TD = layer.forward()
        clock.mark()
        layer.backward(y_TD)
        clock.mark()
    spans = clock.read_ms()
    record["forward"], record["backward"] = summarise_ms(spans[::2]), summarise_ms(spans[1::2])
    return record


def count_waits(layer: Layer, *, is_cuda: bool) -> tuple[int, int]:
    """Return the host syncs of one forward and of one backward; zeros on a CPU."""
    with HostWaits(is_cuda=is_cuda) as forward:
        y_TD = layer.forward()
    with HostWaits(is_cuda=is_cuda) as backward:
        layer.backward(y_TD)
    return forward.count, backward.count


def run_group(cases: Sequence[Case], *, num_runs: int, device: str, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure the arms of one workload, all on the same weights; an arm that fails does not stop the others."""
    first = cases[0]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs, share = make_inputs(first.shape, num_tokens=first.num_tokens, load=first.load, device=device)
    truth = _truth(first, inputs, device=device)
    for case in cases:
        model = make_model(case.shape, adapter=case.adapter, device=device, dtype=dtype)
        patcher = ModelPatcher()
        record: dict[str, Any] = {**case._asdict(), "busiest_tenth": share, "versions": versions()}
        try:
            set_arm(model, case.arm, patcher)
            record |= measure(Layer(model, inputs), arm=case.arm, truth=truth, num_runs=num_runs, device=device)
        except case_failures() as error:
            record["reason"] = f"{type(error).__name__}: {str(error)[:300]}"
            drop_frames(error)
        finally:
            patcher.undo()
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        write(record)


def _truth(case: Case, inputs: Inputs, *, device: str) -> dict[str, torch.Tensor]:
    """Return output and gradients of the eager form in fp32, on the host, so that they use no device memory."""
    model = make_model(case.shape, adapter=case.adapter, device=device, dtype=torch.float32)
    set_arm(model, "eager", ModelPatcher())
    return {name: tensor.cpu() for name, tensor in Layer(model, inputs).results().items()}


# The table


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    raw = options.out / "raw.jsonl"
    deadline = time.monotonic() + options.budget_s
    command = "python -m benchmarks.moe_layer " + " ".join(sys.argv[1:])

    def write(record: dict[str, Any]) -> None:
        with raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        append_rows(result_rows(record, command=command), path=options.out / "rows.csv")
        print(f"case: {_case(record).workload}, {record['arm']}: {record['reason'] or 'measured'}", flush=True)

    for cases in all_groups(options):
        done = {_case(record) for record in read_records(raw)}
        left = [case for case in cases if case not in done]
        if left and time.monotonic() < deadline:
            run_group(left, num_runs=options.runs, device=options.device, write=write)
    table = render_table(read_records(raw))
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, rows.csv and table.txt")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16_384])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=list(ADAPTERS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no workload is started after this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


def all_groups(options: argparse.Namespace) -> Iterable[list[Case]]:
    """Return the cases by workload, in the order of the table."""
    for shape in options.shapes:
        for num_tokens in options.tokens:
            for load in options.loads:
                for adapter in options.adapters:
                    yield [Case(shape, num_tokens, load, adapter, arm) for arm in options.arms]


def _case(record: dict[str, Any]) -> Case:
    return Case(*(record[name] for name in Case._fields))


def result_rows(record: dict[str, Any], *, command: str) -> list[dict[str, Any]]:
    """Return the rows of one measured case for results.csv; none for one that was refused or failed."""
    if record["reason"]:
        return []
    packages = record["versions"]
    shared = {
        "benchmark": "moe_layer",
        "workload": _case(record).workload,
        "system": record["arm"],
        "command": command,
        "device": packages.get("device", "cpu"),
        "version": "; ".join(
            f"{name} {packages[name]}"
            for name in ("lightning_fastft", "torch", "transformers", "peft")
            if name in packages
        ),
    }
    rows = []
    for part in ("forward", "backward"):
        times = record[part]
        rows.append(
            {
                **shared,
                "metric": part,
                "value": times["median"],
                "unit": "ms",
                "p10": times["p10"],
                "p90": times["p90"],
                "n": times["n"],
            }
        )
    rows += [
        {**shared, "metric": f"host waits {part}", "value": count, "unit": "per pass", "n": 1}
        for part, count in zip(("forward", "backward"), record["waits"])
    ]
    rows.append(
        {**shared, "metric": "peak above inputs and weights", "value": record["peak_gib"], "unit": "GiB", "n": 1}
    )
    rows.append(
        {
            **shared,
            "metric": "rows of the busiest tenth of the experts",
            "value": record["busiest_tenth"],
            "unit": "1",
            "n": 1,
        }
    )
    return rows


def render_table(records: Sequence[dict[str, Any]]) -> str:
    """Return one table: a block for each workload, with the gain of forward and backward together over eager."""
    lines = []
    for workload in dict.fromkeys(_case(record).workload for record in records):
        group = [record for record in records if _case(record).workload == workload]
        timed = [record for record in group if not record["reason"]]
        eager = next((_total_ms(record) for record in timed if record["arm"] == "eager"), None)
        rows = [_HEADER, *(_row(record, eager) for record in timed)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines.append(f"{workload}; busiest tenth of the experts: {group[0]['busiest_tenth']:.0%} of the rows")
        lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        lines += [f"  no row: {record['arm']}: {record['reason'][:240]}" for record in group if record["reason"]]
    return "\n".join(lines)


def _total_ms(record: dict[str, Any]) -> float:
    return record["forward"]["median"] + record["backward"]["median"]


def _row(record: dict[str, Any], eager: float | None) -> tuple[str, ...]:
    spans = [f"{record[part][name]:.3f}" for part in ("forward", "backward") for name in ("median", "p10", "p90")]
    return (
        record["arm"],
        *spans,
        str(record["forward"]["n"]),
        f"{record['peak_gib']:.2f}",
        "/".join(str(count) for count in record["waits"]),
        f"{record['verdict']['worst_cosine'][1]:.5f}",
        f"{eager / _total_ms(record):.2f}" if eager else "-",
    )


if __name__ == "__main__":
    raise SystemExit(main())
