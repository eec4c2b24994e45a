"""``fastft plan``: a plan for a named GPU from a config alone, and an answer where something is missing."""

import json
import re

import pytest

from lightning_fastft.cli.plan import run_plan
from lightning_fastft.core.errors import OptionError
from tests.support.sizes import sizes

CONFIG = sizes(model_type="llama", vocab=32_000, width=1024, inner=4096, layers=6, heads=8, key_heads=2)


@pytest.fixture
def plan(folder, capsys):
    """Return a function that runs the command for a small model and returns what it printed."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = [
        "--config",
        "qlora_qwen3_14b",
        "--model.model",
        "config.json",
        "--model.init",
        "random",
        "--data.paths",
        "nowhere.jsonl",
    ]

    def run(*more: str) -> str:
        assert run_plan([*words, *more]) == 0
        return capsys.readouterr().out

    return run


def test_a_named_gpu_is_a_simulation_from_published_rates(plan):
    text = plan("--gpu", "rtx-4090")
    assert "RTX 4090: simulation from published rates (NVIDIA Ada GPU Architecture" in text
    assert "llama: LoRA r=16 on a base in NF4, packs of 8,192 tokens, documents of 1,024" in text
    assert "0-5                         kept: nothing is recomputed" in text
    assert "device memory over the step" in text
    assert "weights, gradients and optimizer: 0." in text
    assert re.search(r"step of the optimizer: 0\.\d ms\n", text)
    assert "ms; a run makes it once in 4 packs, and the figures below in each\n" in plan(
        "--gpu", "4090", "--trainer.accumulate_grad_batches", "4"
    )
    assert re.fullmatch(r"recompute all +[\d,]+ tokens/s in [\d.]+ GiB, [\d,]+ ms a pack", text.splitlines()[-3])
    assert "more than the budget" not in text


def test_budgets_and_overrides_are_followed(plan):
    roomy, tight = (
        plan("--gpu", "4090", "--vram-gib", "24"),
        plan("--gpu", "4090", "--vram-gib=1", "--host-gib", "1", "--document-tokens", "500"),
    )
    assert "budgets: 1.0 GiB of device memory for everything (--vram-gib), 1.0 GiB of host memory (--host-gib)" in tight
    assert "documents of 500" in tight
    assert "rest recomputed" in " ".join(tight.split())
    assert [line.endswith("(more than the budget)") for line in tight.splitlines()[-3:]] == [False, True, False]
    assert "host memory       0.00 GiB" not in tight
    assert "rest recomputed" not in " ".join(roomy.split())
    assert "packs of 2,048 tokens, documents of 2,048" in plan(
        "--gpu", "4090", "--data.max_tokens", "2048", "--document-tokens", "9999"
    )
    assert "every weight" in plan("--gpu", "4090", "--model.lora", "null", "--model.quantization", "null")


def test_tasks_take_the_passes_and_the_logits_that_they_read(folder, capsys):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = ["--model.model", "config.json", "--model.init", "random", "--data.paths", "nowhere.jsonl", "--gpu", "4090"]

    def step_ms(config, *more):
        assert run_plan(["--config", config, *words, *more]) == 0
        return float(re.search(r"predicted step +([\d.,]+) ms", capsys.readouterr().out)[1].replace(",", ""))

    assert run_plan(["--config", "dpo_qwen3_8b", *words]) == 0
    assert "reference: one more forward, with the adapters off, counts as head" in capsys.readouterr().out
    orpo = step_ms("dpo_qwen3_8b", "--model.loss", "orpo")
    # A forward takes half of the time of a backward by inputs, and so a third of the step.
    assert 1.25 < step_ms("dpo_qwen3_8b") / orpo < 1.55
    # A score reads one row of each document.
    assert step_ms("reward_qwen3_8b") < 0.9 * orpo


def test_moments_on_the_host_are_copied_in_each_step(plan):
    words = ["--gpu", "H100", "--model.lora", "null", "--model.quantization", "null", "--model.dtype", "bfloat16"]
    words += ["--model.optimizer", "lightning_fastft.optim.FusedAdamW", "--model.optimizer.offload"]
    assert ", which copies 1.17 GiB of moments from host memory and back" in plan(*words, "1")
    # They are part of the host's memory, of which activations get the rest.
    with pytest.raises(OptionError, match=r"keeps 1\.2 GiB of moments in host memory, and --host-gib is 1\.0"):
        plan(*words, "1", "--host-gib", "1")
    few, many = (
        float(
            re.search(r"host memory +([\d.]+) GiB pinned", plan(*words, "1", "--vram-gib", "2", "--host-gib", size))[1]
        )
        for size in ("1.2", "64")
    )
    assert few <= 1.2 - 1.17 < many
    here, there = (
        float(re.search(r"predicted step +([\d.,]+) ms", plan(*words, share))[1].replace(",", "")) for share in "01"
    )
    # Two moments in fp32 of 157 million weights, at about 50 GB/s.
    assert 22 < there - here < 30


@pytest.mark.parametrize(
    "optimizer", ["torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Muon", "lightning_fastft.optim.FusedAdamW"]
)
def test_optimizers_whose_step_is_simulated_need_no_remark(plan, optimizer):
    assert "cannot be simulated" not in plan("--gpu", "H100", "--model.optimizer", optimizer)


def test_the_state_of_the_optimizer_is_planned(plan):
    pytest.importorskip("bitsandbytes")
    words = ["--gpu", "H100", "--model.lora", "null", "--model.quantization", "null", "--model.dtype", "bfloat16"]
    words += ["--allow-import", "bitsandbytes", "--model.optimizer"]

    def recomputed_gib(name):
        return float(re.search(r"recompute all .* in ([\d.]+) GiB", plan(*words, name))[1])

    plain, wide, narrow, paged = map(
        recomputed_gib,
        ("torch.optim.SGD", *(f"bitsandbytes.optim.{name}" for name in ("AdamW", "AdamW8bit", "PagedAdamW"))),
    )
    # 157 million weights.
    num_gib = 0.157e9 / 2**30
    assert wide - plain == pytest.approx(8 * num_gib, abs=0.11)
    assert narrow - plain == pytest.approx(2 * num_gib, abs=0.11)
    assert paged == pytest.approx(plain, abs=0.11)


def test_paged_moments_on_the_host_are_said_to_be_the_most(plan):
    pytest.importorskip("bitsandbytes")
    words = ["--gpu", "H100", "--model.lora", "null", "--model.quantization", "null", "--model.dtype", "bfloat16"]
    words += ["--allow-import", "bitsandbytes", "--model.optimizer"]
    assert "from host memory and back, at most: the driver" in plan(*words, "bitsandbytes.optim.PagedAdamW")
    offloaded = plan(*words, "lightning_fastft.optim.FusedAdamW", "--model.optimizer.offload", "1")
    assert "from host memory and back" in offloaded
    assert "at most" not in offloaded


def test_an_optimizer_that_is_counted_otherwise_is_said_to_be(plan):
    pytest.importorskip("bitsandbytes")
    words = ["--gpu", "H100", "--allow-import", "bitsandbytes", "--model.optimizer"]
    text = plan(*words, "bitsandbytes.optim.LAMB")
    assert "optimizer: a step of LAMB cannot be simulated here; memory and time are those of AdamW" in text


def test_an_optimizer_that_refuses_the_parameters_is_refused_as_in_a_run(plan):
    words = ["--gpu", "H100", "--model.lora", "null", "--model.quantization", "null"]
    with pytest.raises(OptionError, match="Muon only supports 2D"):
        plan(*words, "--model.optimizer", "torch.optim.Muon")


def test_a_falling_schedule_of_a_schedule_free_optimizer_is_refused_as_in_a_run(plan):
    pytest.importorskip("schedulefree")
    words = ["--gpu", "H100", "--allow-import", "schedulefree", "--model.optimizer", "schedulefree.AdamWScheduleFree"]
    with pytest.raises(
        OptionError, match="scheduler='cosine' lowers the learning rate, and AdamWScheduleFree averages"
    ):
        plan(*words)
    assert "keep all" in plan(*words, "--model.scheduler", "constant")


def test_a_folder_that_is_missing_is_named(folder):
    words = ["--config", "qlora_qwen3_14b", "--data.paths", "nowhere.jsonl", "--gpu", "4090"]
    with pytest.raises(OptionError, match=r"no folder or file '\./models/llama'"):
        run_plan([*words, "--model.model", "./models/llama"])


def test_tiles_are_planned_where_nothing_else_fits(plan, folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 65_536}))
    words = ["--gpu", "4090", "--vram-gib", "3"]
    assert "feed-forward blocks: 8 tiles\n" in plan(*words)
    with pytest.raises(OptionError, match="No plan fits"):
        plan(
            *words,
            "--trainer.strategy=lightning_fastft.FastFTStrategy",
            "--trainer.strategy.activations=lightning_fastft.OffloadCheckpointing",
            "--trainer.strategy.activations.mlp_tiles=1",
        )
    assert "tiles" not in plan("--gpu", "4090", "--vram-gib", "24")
    # Blocks of experts do not run in tiles.
    mixture = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(mixture))
    with pytest.raises(OptionError, match="No plan fits"):
        plan("--gpu", "4090", "--vram-gib", "0.1")


def test_unified_memory_says_why_nothing_moves(plan):
    assert "note: DGX Spark (GB10) has unified memory" in plan("--gpu", "spark", "--vram-gib", "2")


def test_what_cannot_be_answered_says_what_to_do(plan, monkeypatch):
    with pytest.raises(OptionError, match=r"3090.*name one of: RTX 4090"):
        plan("--gpu", "3090")
    with pytest.raises(OptionError, match="--vram-gib must be a number, got 'much'"):
        plan("--gpu", "4090", "--vram-gib", "much")
    for number in ("1.5", "nan", "inf", ""):
        with pytest.raises(OptionError, match="--document-tokens"):
            plan("--gpu", "4090", f"--document-tokens={number}")
    with pytest.raises(OptionError, match=r"No plan fits the VRAM budget of 0\.10 GiB"):
        plan("--gpu", "4090", "--vram-gib", "0.1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(OptionError, match=r'no local GPU.*--gpu "RTX 4090"'):
        plan()


def test_the_gpu_here_is_the_default(plan, monkeypatch):
    monkeypatch.setattr("lightning_fastft.cli.plan._device_here", lambda: "NVIDIA H200")
    text = plan()
    assert "H200: the local GPU" in text
    assert "measures its first steps" in text


def test_the_mesh_of_shared_packs_is_said(plan, folder):
    (folder / "mesh.yaml").write_text(
        "trainer: {accelerator: cpu, devices: 2, strategy: {class_path: lightning_fastft.FastFTDDPStrategy, "
        "init_args: {context_parallel: 2}}}"
    )
    text = plan("--gpu", "4090", "--config", "mesh.yaml")
    assert "mesh: 2 devices share each pack, 4,096 tokens each" in text


def activations(**options):
    return f"{{class_path: lightning_fastft.OffloadCheckpointing, init_args: {json.dumps(options)}}}"


def strategy(kind="", **options):
    given = f", init_args: {{activations: {activations(**options)}}}" if options else ""
    return f"trainer: {{strategy: {{class_path: lightning_fastft.FastFT{kind}Strategy{given}}}}}"


@pytest.mark.parametrize(
    ("policy", "treatment", "like"),
    [
        ("recompute", "0-5 input device; rest recomputed", "recompute all"),
        ("keep", "0-5 kept: nothing is recomputed", "keep all"),
        ("offload", "0-4 input host; rest recomputed", ""),
    ],
)
def test_the_policy_of_the_config_is_planned(policy, treatment, like, plan, folder):
    (folder / "policy.yaml").write_text(strategy(policy=policy))
    text = plan("--gpu", "4090", "--config", "policy.yaml")
    assert f"activations: {policy}, as the config says" in text
    assert treatment in " ".join(text.split())
    ends = {line[:15].rstrip(): line[15:] for line in text.splitlines()[-3:]}
    assert not like or ends["this plan"] == ends[like]
    with pytest.raises(OptionError, match=f"--vram-gib has no effect on policy '{policy}'"):
        plan("--gpu", "4090", "--config", "policy.yaml", "--vram-gib", "4")


def test_budgets_and_weights_of_the_config_are_planned(plan, folder):
    (folder / "own.yaml").write_text(strategy(vram_budget=1.0, host_budget=2.0))
    words = ["--gpu", "4090", "--config", "own.yaml"]
    assert "budgets: 1.0 GiB of device memory for everything (--vram-gib), 2.0 GiB of host memory" in plan(*words)
    given = plan(*words, "--vram-gib", "3", "--host-gib", "1")
    assert "budgets: 3.0 GiB of device memory for everything (--vram-gib), 1.0 GiB of host memory" in given
    (folder / "own.yaml").write_text(strategy(weights="stream"))
    assert "weights streamed" in plan(*words)
    (folder / "own.yaml").write_text(strategy(policy="recompute", weights="stream"))
    assert "weights streamed" in plan(*words)
    with pytest.raises(OptionError, match="pinned host memory for frozen weights"):
        plan(*words, "--host-gib", "0.01")


def test_a_plan_that_the_gpu_cannot_hold_is_refused(plan, folder):
    with pytest.raises(OptionError, match=r"budget is 25\.0 GiB, and RTX 4090 has 24"):
        plan("--gpu", "4090", "--vram-gib", "25")
    (folder / "keep.yaml").write_text(strategy(policy="keep"))
    with pytest.raises(OptionError, match=r"Policy 'keep' needs .* of device memory, and there are 8\.00 GiB"):
        plan("--gpu", "4060", "--config", "keep.yaml", "--data.max_tokens", "65536")


def test_the_policy_of_the_config_is_planned_on_a_cluster(plan, folder):
    (folder / "keep.yaml").write_text(strategy(policy="keep"))
    words = ["--gpu", "4060", "--gpus", "2", "--data.max_tokens", "65536"]
    assert "does not fit" not in plan(*words).splitlines()[4]
    assert "does not fit" in plan(*words, "--config", "keep.yaml").splitlines()[4]


def test_weights_and_buffers_of_the_config_are_planned_on_a_cluster(plan, folder):
    words = ["--gpu", "4090", "--gpus", "4", "--nodes", "2", "--config", "own.yaml"]

    def rows(*more, **options):
        """Return speed and memory by strategy."""
        (folder / "own.yaml").write_text(strategy(**options))
        lines = [re.split(" {2,}", line[2:]) for line in plan(*words, *more).split("\n\n")[1].splitlines()[1:]]
        return {name: (int(speed.replace(",", "")), float(memory.split()[0])) for name, speed, _, _, memory, _ in lines}

    auto, resident, streamed = (rows(weights=weights) for weights in ("auto", "resident", "stream"))
    sharded = ["FSDP2, kept gathered", "hybrid sharding, kept gathered", "FSDP2, kept gathered, context parallel 2"]
    assert [name for name in resident if "DDP" not in name] == sharded
    assert resident[sharded[0]] == auto[sharded[0]]
    whole = ["DDP", "DDP, context parallel 2"]
    assert list(streamed) == whole
    assert all(streamed[name][1] < auto[name][1] for name in whole)
    assert "has weights: stream. Strategies with sharded weights refuse it" in plan(*words)
    with pytest.raises(OptionError, match=r'weights="stream" needs .* the host budget is 0\.01 GiB'):
        rows("--host-gib", "0.01", weights="stream")
    offload = {"policy": "offload", "weights": "resident"}
    one, two = (rows("--data.max_tokens", "65536", buffers=buffers, **offload)["DDP"] for buffers in (1, 2))
    assert one < two


def test_the_placement_of_adapters_of_the_config_is_planned_on_a_cluster(plan, folder):
    """Sharded ones take less memory, and no all-reduce that nothing overlaps with."""
    rows = {}
    for adapters in ("replicate", "shard"):
        given = f"{{class_path: lightning_fastft.FastFTFSDPStrategy, init_args: {{adapters: {adapters}}}}}"
        (folder / f"{adapters}.yaml").write_text(f"trainer: {{strategy: {given}}}")
        words = ["--config", f"{adapters}.yaml", "--model.lora.r", "256"]
        lines = plan("--gpu", "4090", "--gpus", "8", *words).splitlines()[4:]
        # Without the mark of the fastest and the reason.
        rows[adapters] = [re.split(" {2,}", line[2:])[:-1] for line in lines]
    for whole, sharded in zip(rows["replicate"], rows["shard"]):
        (name, *_, whole_gib), (*_, sharded_gib) = whole, sharded
        assert name == sharded[0]
        assert (whole == sharded) == name.startswith("DDP")
        assert name.startswith("DDP") or float(whole_gib.split()[0]) > float(sharded_gib.split()[0])


def test_shards_that_are_not_counted_are_said(plan, folder):
    (folder / "shards.yaml").write_text(f"{strategy('FSDP')[:-1]}, accelerator: cpu, devices: 4}}")
    assert "shards of fastft_fsdp are not counted" in plan("--gpu", "4090", "--config", "shards.yaml")
    with pytest.raises(OptionError, match="--gpus 4 counts them"):
        plan("--gpu", "4090", "--config", "shards.yaml", "--vram-gib", "0.1")


def test_links_without_use_are_refused(plan):
    with pytest.raises(OptionError, match="--network has no effect on one node"):
        plan("--gpu", "4090", "--gpus", "2", "--network", "1")
    with pytest.raises(OptionError, match="--node-link has no effect"):
        plan("--gpu", "4090", "--gpus", "2", "--nodes", "2", "--node-link", "1")


def test_a_cluster_is_a_table_of_strategies_with_the_fastest_marked(plan):
    cluster = ["--gpu", "4090", "--gpus", "4", "--nodes", "2", "--trainer.devices", "4"]
    text = plan(*cluster)
    assert "4 x RTX 4090, 2 per node: PCIe 32 GB/s per GPU, Ethernet 12.5 GB/s per node" in text
    rows = {line[2:28].rstrip(): line for line in text.splitlines()[4:]}
    names = ["DDP", "FSDP2", "FSDP2, kept gathered", "hybrid sharding"]
    assert list(rows) == [*names, "DDP, context parallel 2", "FSDP2, context parallel 2"]
    assert [name for name, line in rows.items() if line.startswith("*")] == ["DDP"]
    assert "fastest; compute-bound" in rows["DDP"]
    assert " 32,768 " in rows["DDP"]
    assert " 16,384 " in rows["DDP, context parallel 2"]
    # One GPU per node shares no packs. Slower links, and a step that was measured to be faster than its estimate:
    slow = plan("--gpu", "4090", "--gpus", "2", "--nodes=2", "--network", "0.05", "--step-ms", "100")
    assert "link-bound by the network" in slow.splitlines()[5]
    tight = plan("--gpu", "4090", "--gpus=2", "--nodes=2", "--vram-gib", "0.1")
    assert [line.endswith("does not fit") for line in tight.splitlines()[4:6]] == [True, True]
    assert tight.splitlines()[-1].startswith("Nothing fits: use more GPUs")


def test_a_cluster_says_where_frozen_weights_are_gathered_in_e4m3(plan, folder):
    fused = "{class_path: lightning_fastft.FusedKernels, init_args: {base_compute: fp8}}"
    (folder / "fp8.yaml").write_text(f"trainer: {{callbacks: [{fused}]}}")
    words = ["--config", "fp8.yaml", "--model.quantization", "null"]
    lines = plan("--gpu", "4090", "--gpus", "2", *words).splitlines()[4:]
    assert len(lines) == 5
    assert [", gathered in e4m3" in line for line in lines] == [line[2:7] == "FSDP2" for line in lines]


def test_sharded_nf4_weights_do_not_compute_in_fp8(plan, folder):
    steps = {}
    for base in ("model_dtype", "fp8"):
        fused = f"{{class_path: lightning_fastft.FusedKernels, init_args: {{base_compute: {base}}}}}"
        (folder / "fused.yaml").write_text(f"trainer: {{callbacks: [{fused}]}}")
        lines = plan("--gpu", "4090", "--gpus", "2", "--config", "fused.yaml").splitlines()[4:]
        # Strategy, tokens per second, step.
        steps[base] = [line[2:].partition(" ms")[0] for line in lines]
    same = [line for line in steps["fp8"] if line in steps["model_dtype"]]
    assert len(steps["fp8"]) == 5
    assert same == [line for line in steps["fp8"] if line.startswith("FSDP2")]


def test_options_of_a_cluster_that_cannot_be_answered_say_what_to_do(plan):
    with pytest.raises(OptionError, match="--nodes belongs to a cluster"):
        plan("--gpu", "4090", "--nodes", "2")
    for number in ("0", "1.5", "many"):
        with pytest.raises(OptionError, match="--gpus must be"):
            plan("--gpu", "4090", "--gpus", number)
    with pytest.raises(OptionError, match="--nodes must be"):
        plan("--gpu", "4090", "--gpus", "4", "--nodes", "1.5")
    with pytest.raises(OptionError, match="--gpu needs a value"):
        plan("--gpu=")
    with pytest.raises(OptionError, match="where this run does not fit"):
        plan("--gpu", "4090", "--gpus", "2", "--vram-gib", "0.1", "--step-ms", "5")
