"""VllmSampler against a stand-in with the documented signatures of vLLM, which accepts no other argument."""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import FunctionSampler, VllmSampler
from tests.support.packs import assert_close
from tests.support.training_parts import quiet_trainer
from tests.support.tuners import make_tuner
from tests.training.test_rollouts import CONFIG, SUMS, character_tokenizer

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@dataclass(kw_only=True)
class SamplingParams:
    """Fields of vllm.SamplingParams that a user sets, and its own checks."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list | None = None
    stop_token_ids: list | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self):
        LLM.params.append(self)
        # As a signed 64-bit number with room for the numbers of the completions.
        assert self.seed is None or 0 <= self.seed < 2**63 - 2**32
        assert self.n >= 1
        assert self.max_tokens >= 1


@dataclass
class LoRARequest:
    """Fields of vllm.lora.request.LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict | None = None

    def __post_init__(self):
        assert self.lora_int_id >= 1
        assert self.lora_path


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple
    cumulative_logprob: float | None
    logprobs: list | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list
    outputs: list


class LLM:
    """vllm.LLM: arguments of the engine that the sampler and the tests name."""

    latest = None
    params = []

    def __init__(
        self, model, *, gpu_memory_utilization=0.9, enable_lora=False, max_lora_rank=16, max_model_len=None,
        logprobs_mode="raw_logprobs",
    ):  # fmt: skip
        assert max_lora_rank in (1, 8, 16, 32, 64, 128, 256, 320, 512)
        assert enable_lora
        self.arguments = {"model": model, "max_model_len": max_model_len, "logprobs_mode": logprobs_mode}
        self.adapters, self.seeds, self.requests = [], [], []
        LLM.latest = self

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None, priority=None):
        assert len(sampling_params) == len(prompts)
        assert lora_request.lora_int_id not in [request.lora_int_id for request in self.requests]
        self.requests.append(lora_request)
        # Adapters are read when their number is met for the first time.
        folder = Path(lora_request.lora_path)
        assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
        self.adapters.append(load_file(folder / "adapter_model.safetensors"))
        return [self._complete(prompt, params) for prompt, params in zip(prompts, sampling_params, strict=True)]

    def _complete(self, prompt, params):
        assert prompt.keys() == {"prompt_token_ids"}
        outputs = []
        for index in range(params.n):
            seed = params.seed + index
            self.seeds.append(seed)
            ids = tuple(2 + (seed + place) % 5 for place in range(params.max_tokens))
            ends = [place for place, token in enumerate(ids) if token in (params.stop_token_ids or ())]
            ids = ids[: ends[0] + 1] if ends else ids
            # Only the sampled token, as with logprobs=0.
            steps = [{token: Logprob(-0.5 - place, rank=1)} for place, token in enumerate(ids)]
            outputs.append(CompletionOutput(index, "", ids, None, steps if params.logprobs == 0 else None, "length"))
        return RequestOutput(prompt["prompt_token_ids"], outputs)


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch):
    package = types.ModuleType("vllm")
    package.LLM, package.SamplingParams = LLM, SamplingParams
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = LoRARequest
    for name, module in {
        "vllm": package,
        "vllm.lora": types.ModuleType("vllm.lora"),
        "vllm.lora.request": request,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


def sample(sampler, tuner, prompts=((5, 6), (5, 6), (7,)), **changes):
    options = {"num_completions": 2, "max_new_tokens": 3, "temperature": 0.7, "seed": 2**63 - 1, **changes}
    return sampler(tuner, prompts, **options)


def test_completions_come_with_their_log_probabilities_in_order():
    sampler = VllmSampler("base", engine_options={"max_model_len": 64})
    groups = sample(sampler, make_tuner(PolicyTuner, lora=LORA))
    assert [len(group) for group in groups] == [2, 2, 2]
    for group in groups:
        for sampled in group:
            assert len(sampled.input_ids) == 3
            assert sampled.log_probs == [-0.5, -1.5, -2.5]
    # Log-probabilities of the policy at its temperature.
    assert LLM.latest.arguments == {"model": "base", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}


def test_every_completion_draws_from_a_seed_of_its_own():
    sampler, tuner = VllmSampler("base"), make_tuner(PolicyTuner, lora=LORA)
    sample(sampler, tuner)
    assert len(set(LLM.latest.seeds)) == 6
    first = list(LLM.latest.seeds)
    sample(sampler, tuner)
    assert LLM.latest.seeds == first * 2
    sample(sampler, tuner, seed=11)
    assert set(LLM.latest.seeds[12:]).isdisjoint(first)


def test_sampling_options_reach_vllm_by_their_names():
    sampler, tuner = VllmSampler("base"), make_tuner(PolicyTuner, lora=LORA)
    options = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    sample(sampler, tuner, **options)
    found = LLM.params[-3:]
    assert [{name: getattr(each, name) for name in options} for each in found] == [options] * 3
    sample(sampler, tuner)
    assert (LLM.params[-1].top_p, LLM.params[-1].top_k) == (1.0, 0)


def test_the_function_of_a_function_sampler_gets_the_sampling_options():
    seen = []

    def generate(prompts, *, top_p=1.0, **options):
        seen.append({"top_p": top_p, **options})
        return [[1] for _ in prompts]

    sample(FunctionSampler(generate), None, top_p=0.9, min_p=0.1)
    sample(FunctionSampler(generate), None)
    assert seen == [{"top_p": 0.9, "min_p": 0.1}, {"top_p": 1.0}]
    with pytest.raises(OptionError, match=r"top_k, which the function of FunctionSampler <lambda> does not take"):
        sample(FunctionSampler(lambda prompts: [[1] for _ in prompts]), None, top_k=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_p": 0.0}, r"'top_p'\] .* between 1e-06 and 1.0, got 0.0"),
        ({"top_p": 1.5}, "'top_p'"),
        ({"top_p": None}, r"'top_p'\] must be a number, got None"),
        ({"top_k": -1}, r"'top_k'\] must be at least 0, got -1"),
        ({"top_k": 2.0}, r"'top_k'\] must be a whole number"),
        ({"min_p": 1.1}, "'min_p'"),
        ({"repetition_penalty": 0}, "'repetition_penalty'"),
        ({"repetition_penalty": float("nan")}, "'repetition_penalty'"),
        ({"temperature": 0.5}, "has 'temperature'; it takes top_k, top_p, min_p, repetition_penalty"),
        (["top_p"], "must be a dict"),
    ],
)
def test_sampling_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        RolloutDataModule(SUMS, sampling_options=options)


def test_a_sampler_that_does_not_take_an_option_is_refused():
    def sampler(tuner, prompts, *, num_completions, max_new_tokens, temperature, seed, top_p=1.0):
        return []

    RolloutDataModule(SUMS, sampler=sampler, sampling_options={"top_p": 0.9})
    with pytest.raises(OptionError, match=r"min_p, which the sampler sampler does not take"):
        RolloutDataModule(SUMS, sampler=sampler, sampling_options={"top_p": 0.9, "min_p": 0.1})


def test_completions_stop_where_trained_answers_end():
    tuner = make_tuner(PolicyTuner, lora=LORA)
    tuner.answer_end = 4
    found = [sampled.input_ids for group in sample(VllmSampler("base"), tuner, max_new_tokens=7) for sampled in group]
    assert all(ids.index(4) == len(ids) - 1 for ids in found)


def test_each_round_hands_over_the_present_adapters_and_leaves_no_files():
    sampler, tuner = VllmSampler("base"), make_tuner(PolicyTuner, lora=LORA)
    sample(sampler, tuner)
    with torch.no_grad():
        for parameter in tuner.model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    sample(sampler, tuner)
    first, second = LLM.latest.adapters
    assert first.keys() == second.keys()
    assert all(torch.allclose(second[name], first[name] + 1) for name in first)
    assert not any(Path(request.lora_path).exists() for request in LLM.latest.requests)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_changed_their_base_are_handed_over_for_the_original_one(init):
    torch.manual_seed(0)
    tuner = PolicyTuner(
        CONFIG, init="random", dtype="float32", lora={"r": 8, "target_modules": ["q_proj"], "init_lora_weights": init}
    )
    tuner.configure_model()
    layer = tuner.model.get_base_model().model.layers[0].self_attn.q_proj
    initial = tuner.initial_adapters
    name = next(name for name in initial.scales if "layers.0" in name)
    taken = initial.scales[name] * (
        initial.factors[f"{name}.lora_B.default.weight"] @ initial.factors[f"{name}.lora_A.default.weight"]
    )
    with torch.no_grad():
        layer.lora_B["default"].weight.add_(0.5)
    present = layer.get_base_layer().weight + layer.get_delta_weight("default")
    sample(VllmSampler("base"), tuner)
    (found,) = LLM.latest.adapters
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    delta = layer.scaling["default"] * (found[f"{place}.lora_B.weight"] @ found[f"{place}.lora_A.weight"])
    assert found[f"{place}.lora_A.weight"].shape[0] == 16
    assert_close(layer.get_base_layer().weight + taken + delta, present, bound=1e-5)
    with pytest.raises(OptionError, match="max_lora_rank=16"):
        sample(VllmSampler("base", max_lora_rank=8), tuner)


def test_adapters_beside_frozen_ones_are_refused(tmp_path):
    make_tuner(PolicyTuner, lora=LORA).save_pretrained(str(tmp_path / "sft"))
    sampler = VllmSampler("base")
    with pytest.raises(OptionError, match="frozen_adapters"):
        sample(sampler, make_tuner(PolicyTuner, lora=LORA, frozen_adapters=[str(tmp_path / "sft")]))
    assert LLM.latest.requests == []


def test_a_policy_trains_on_its_rollouts(tmp_path):
    sampler = VllmSampler("base")
    tuner = PolicyTuner(
        CONFIG, init="random", dtype="float32", tokenizer=character_tokenizer(), lora=LORA, sampler_clip=2.0,
        learning_rate=1e-2, scheduler="constant", warmup_steps=0,
    )  # fmt: skip
    data = RolloutDataModule(
        SUMS, rewards=lambda *, completions, **_: [float(ord(text[0]) % 3) for text in completions], sampler=sampler,
        num_completions=2, prompts_per_round=4, max_new_tokens=2, max_tokens=128,
    )  # fmt: skip
    quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_steps=3).fit(tuner, data)
    first, *_, last = LLM.latest.adapters
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize(
    ("lora", "error", "message"),
    [
        (None, OptionError, "give the tuner lora"),
        ({**LORA, "r": 65}, OptionError, "max_lora_rank=128"),
        ({**LORA, "use_dora": True}, UnsupportedModelError, "use_dora"),
    ],
)
def test_adapters_that_vllm_cannot_take_are_refused_by_name(lora, error, message):
    sampler = VllmSampler("base")
    with pytest.raises(error, match=message):
        sample(sampler, make_tuner(PolicyTuner, lora=lora))
    assert LLM.latest.requests == []
