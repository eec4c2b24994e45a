"""Build workloads: draw random weights that behave like trained ones, and write every file that systems read."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ruler.workloads import (
    ADAPTER_SHARE,
    BRANCH_SHARE,
    EXPERT_CODES,
    EXPERT_PARAMETERS,
    GATE_STD,
    ROUTER_GAIN,
    TOKENIZER_WORDS,
    WORKLOADS,
    Pack,
    Workload,
    WorkloadFiles,
    fingerprint,
    lora_config,
    make_packs,
)

# Tokens on which routers are measured.
NUM_ROUTED_TOKENS = 2048


def build(workload: Workload, *, root: Path, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Write the folder of a workload, once, and return the seconds of each part.

    Args:
        workload: What to build.
        root: Folder; needs space for the bf16 weights.
        device: Device on which random weights are drawn.
        dtype: Dtype of the weights: bf16, or fp32 for CPU runs.
    """
    files = WorkloadFiles(root, workload)
    if files.is_built():
        return {"seconds": 0.0}
    files.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if workload.weights_of is not None:
        seconds = build(WORKLOADS[workload.weights_of], root=root, device=device, dtype=dtype)
        _write_tokens(files)
        files.done.write_text(json.dumps(fingerprint(workload)))
        return {**seconds, "seconds": time.perf_counter() - start}
    shapes = _write_model(files, device=device, dtype=dtype)
    model_seconds = time.perf_counter() - start
    _write_tokenizer(files)
    if not workload.is_full:
        _write_adapter(files, shapes)
    _write_tokens(files)
    files.done.write_text(json.dumps(fingerprint(workload)))
    return {"seconds": time.perf_counter() - start, "model_seconds": model_seconds}


def _write_model(files: WorkloadFiles, *, device: str, dtype: torch.dtype) -> dict[str, tuple[int, int, float]]:
    """Draw random weights and save them; return rows, columns and standard deviation of every adapted weight by
    its name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(files.workload.model_type, **files.workload.model_config)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _condition(model, tied=bool(files.workload.model_config["tie_word_embeddings"]))
    if files.workload.num_experts:
        _write_routes(model, is_skewed=files.workload.is_skewed)
        files.routing.write_text(json.dumps(_measure_routing(model, make_packs(files.workload)[0])))
    model.save_pretrained(files.model, max_shard_size="6GB")
    if files.workload.num_experts:
        return _mixture_shapes(model, files.workload)
    return {
        name: (*module.weight.shape, float(module.weight.detach().float().std()))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in files.workload.target_modules
    }  # fmt: skip


@torch.no_grad()
def _condition(model: Any, *, tied: bool) -> None:
    """Scale random weights so that signals and gradients keep their size through the layers, as they do in a trained
    model.

    With a library's default initialisation the branches swamp the residual stream, and rounding grows from layer to
    layer: two correct bf16 systems then have cosines of 0.997 to 0.998 in a deep model, and no judge could tell a fault
    from noise. Scaled like this, the same two agree to 0.9997 (measured on CPU with 16 to 40 layers). Thresholds do not
    change.
    """
    stream = float(model.config.initializer_range) if tied else 1.0
    if hasattr(model.model.layers[0], "post_feedforward_layernorm"):
        _condition_norms(model)
        return
    _set_std(model.model.embed_tokens, stream)
    if not tied:
        _set_std(model.lm_head, model.config.hidden_size**-0.5)
    branch = stream * BRANCH_SHARE / math.sqrt(2 * len(model.model.layers))
    for layer in model.model.layers:
        mlp = layer.mlp
        gains = _mixer_gains(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, branch=branch)
        if hasattr(mlp, "experts"):
            _condition_experts(layer, branch=branch)
        dense = getattr(mlp, "shared_expert", None) if hasattr(mlp, "experts") else mlp
        if dense is not None:
            # The mean square of silu(gate) * up is 0.6 times that of its inputs.
            gains += [(dense.gate_proj, GATE_STD), (dense.up_proj, GATE_STD)]
            gains += [(dense.down_proj, branch / (0.6 * GATE_STD**2))]
        for linear, gain in gains:
            _set_std(linear, gain / math.sqrt(linear.in_features))


def _condition_norms(model: Any) -> None:
    """Scale a model whose branches end in norms (Gemma): the norms set the size of the sums, and heads are normed."""
    # Embeddings are multiplied by the root of the width.
    _set_std(model.model.embed_tokens, model.config.hidden_size**-0.5)
    branch = BRANCH_SHARE / math.sqrt(3 * len(model.model.layers))
    for layer in model.model.layers:
        for name, norm in layer.named_children():
            if name.startswith("post_") and name.endswith("norm"):
                norm.weight.fill_(branch)
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (attention.q_norm, getattr(attention, "k_norm", None)):
            if norm is not None:
                # Scores are products of heads, without a scale.
                norm.weight.fill_(norm.weight.shape[0] ** -0.25)
        for linear in (mlp.gate_proj, mlp.up_proj):
            _set_std(linear, GATE_STD / math.sqrt(linear.in_features))


def _mixer_gains(mixer: Any, *, branch: float) -> list[tuple[Any, float]]:
    """Return the projections of attention, or of the gated delta layer in its place, with the size of their outputs."""
    if hasattr(mixer, "in_proj_qkv"):
        # The output is normed and multiplied by silu(z), whose size is 0.6 times that of z.
        inputs = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        return [*((linear, 1.0) for linear in inputs), (mixer.out_proj, branch / 0.6)]
    # Attention averages values, so its output is smaller than its input; the factor 2 compensates some of it.
    inputs = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    return [*((linear, 1.0) for linear in inputs), (mixer.o_proj, 2.0 * branch)]


def _set_std(module: torch.nn.Module, std: float) -> None:
    module.weight.mul_(std / module.weight.float().std())


def _condition_experts(layer: Any, *, branch: float) -> None:
    """Scale the expert stacks of one layer; draw what gpt-oss adds (biases, sinks), so that nothing is zero that
    a system could drop.
    """
    mlp, is_gpt_oss = layer.mlp, hasattr(layer.mlp, "router")
    router, experts = _router(mlp), mlp.experts
    # gpt-oss stores (experts, inputs, outputs). Its gate, (up + 1) * gate * sigmoid(1.7 gate), scales mean squares by
    # 0.55, silu(gate) * up by 0.6.
    num_inner = experts.down_proj.shape[1 if is_gpt_oss else 2]
    inner = 0.55 if is_gpt_oss else 0.6 * GATE_STD**2
    experts.gate_up_proj.normal_(std=GATE_STD * router.weight.shape[1] ** -0.5)
    # A weighted mean of experts is smaller than each of them; the factor 1.5 compensates this.
    experts.down_proj.normal_(std=1.5 * branch / inner * num_inner**-0.5)
    if is_gpt_oss:
        router.bias.normal_(std=0.1)
        experts.gate_up_proj_bias.normal_(std=0.1 * GATE_STD)
        experts.down_proj_bias.normal_(std=0.1 * branch)
        attention = layer.self_attn
        attention.sinks.normal_()
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.bias.normal_(std=0.1)
        attention.o_proj.bias.normal_(std=0.1 * branch)


def _router(mlp: Any) -> Any:
    return mlp.router if hasattr(mlp, "router") else mlp.gate


@torch.no_grad()
def _write_routes(model: Any, *, is_skewed: bool) -> None:
    """Assign experts to every token id, other ones in each layer: its embedding has their directions, and the routers
    read these.

    Experts are drawn uniformly, or half of each token's experts from a tenth of all.
    """
    generator = torch.Generator().manual_seed(13)
    routers = [_router(layer.mlp) for layer in model.model.layers]
    table = model.model.embed_tokens.weight
    num_experts, num_chosen, width = routers[0].num_experts, routers[0].top_k, table.shape[1]
    num_words = min(TOKENIZER_WORDS, table.shape[0])
    score = torch.rand(num_words, num_experts, generator=generator)
    if is_skewed:
        # Every token has as many of the busy experts as of the others.
        busy = num_busy(num_experts)
        parts = (
            score[:, :busy].topk(num_chosen // 2).indices,
            score[:, busy:].topk(num_chosen - num_chosen // 2).indices + busy,
        )
        expert_WK = torch.cat(parts, dim=1)
    else:
        expert_WK = score.topk(num_chosen).indices
    # In a separate order, so that the busy experts do not always have the small weights.
    expert_WK = expert_WK.gather(1, torch.rand(expert_WK.shape, generator=generator).argsort(dim=1))
    direction_ED = (
        torch.linalg.qr(torch.randn(width, num_experts, generator=generator)).Q.T.contiguous().to(table.device)
    )
    direction_DE = direction_ED.T.to(table.dtype)
    table -= table @ direction_DE @ direction_DE.T
    for strength, expert_W in zip(torch.linspace(*EXPERT_CODES, num_chosen).tolist(), expert_WK.unbind(dim=1)):
        table[:num_words] += (strength * direction_ED[expert_W.to(table.device)]).to(table.dtype)
    for number, router in enumerate(routers):
        router.weight.copy_(ROUTER_GAIN * direction_ED.roll(7 * number, dims=0))


@torch.no_grad()
def _measure_routing(model: Any, pack: Pack) -> dict[str, Any]:
    """Return the share of the busiest tenth of the experts in each layer, on the longest document of a pack."""
    shares: list[float] = []
    handles = [
        _router(layer.mlp).register_forward_hook(
            lambda router, _, outputs: shares.append(busiest_share(outputs[2], router.num_experts))
        )
        for layer in model.model.layers
    ]
    start, end = max(pack.borders(), key=lambda border: border[1] - border[0])
    ids = torch.from_numpy(pack.input_id_T[start:end][:NUM_ROUTED_TOKENS])[None].to(model.device)
    model.model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {
        "busiest_tenth": sum(shares) / len(shares),
        "lowest": min(shares),
        "highest": max(shares),
        "num_tokens": ids.numel(),
    }


def busiest_share(expert_TK: torch.Tensor, num_experts: int) -> float:
    """Return the share of rows that go to the busiest tenth of the experts.

    Example:
        >>> busiest_share(torch.tensor([[0, 1], [0, 2]]), 10)
        0.5
    """
    counts = torch.bincount(expert_TK.reshape(-1), minlength=num_experts)
    return float(counts.topk(num_busy(num_experts)).values.sum() / expert_TK.numel())


def num_busy(num_experts: int) -> int:
    """Return a tenth of the number of experts."""
    return max(1, num_experts // 10)


def _mixture_shapes(model: Any, workload: Workload) -> dict[str, tuple[int, int, float]]:
    """Return rows and columns of B and A for every adapted weight by the name of its wrapper; for stacks, the ranks of
    all experts are added.
    """
    shapes = {
        name: (*module.weight.shape, float(module.weight.detach().float().std()))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in workload.target_modules
    }
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            for wrapper, parameter in EXPERT_PARAMETERS.items():
                _, rows, columns = (stack := getattr(module, parameter).detach()).shape
                if getattr(module, "is_transposed", False):
                    rows, columns = columns, rows
                shapes[f"{name}.{wrapper}".rstrip(".")] = (rows, columns, float(stack.float().std()))
    return shapes


def _write_tokenizer(files: WorkloadFiles) -> None:
    """Write a word tokenizer: peers require one, although every system reads token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    num_words = min(TOKENIZER_WORDS, files.workload.model_config["vocab_size"])
    vocabulary.update({f"w{number}": number for number in range(4, num_words)})
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=32_768,
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(files.model)


def _write_adapter(files: WorkloadFiles, shapes: dict[str, tuple[int, int, float]]) -> None:
    """Write non-zero adapters in PEFT's format; values are exact in bf16, so that bf16 and fp32 adapters hold the
    same numbers.
    """
    from safetensors.torch import save_file

    rank, num_experts = files.workload.lora_rank, files.workload.num_experts
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, (num_rows, num_columns, weight_std) in shapes.items():
        num_ranks = rank * num_experts if ".experts" in name else rank
        a = (torch.rand(num_ranks, num_columns, generator=generator) * 2 - 1) / math.sqrt(num_columns)
        b = torch.randn(num_rows, num_ranks, generator=generator) * (
            ADAPTER_SHARE * weight_std * math.sqrt(num_columns / rank)
        )
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16).float()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16).float()
    files.adapter.mkdir(exist_ok=True)
    save_file(tensors, files.adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    lora_config(files.workload).save_pretrained(files.adapter)


def _write_tokens(files: WorkloadFiles) -> None:
    from safetensors.numpy import save_file

    packs = make_packs(files.workload)
    arrays = {
        "input_id_PT": np.stack([pack.input_id_T for pack in packs]),
        "length_D": np.concatenate([np.asarray(pack.lengths, dtype=np.int64) for pack in packs]),
        "num_documents_P": np.asarray([len(pack.lengths) for pack in packs], dtype=np.int64),
    }
    save_file(arrays, files.tokens)
