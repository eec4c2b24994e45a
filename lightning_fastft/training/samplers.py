"""Samplers: functions and classes that complete prompts with the model that trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.errors import DataError, MissingDependencyError, OptionError

if TYPE_CHECKING:
    from lightning_fastft.training.tuner import Tuner

# Options of transformers' generate and of vLLM's SamplingParams with one meaning, and their limits.
SAMPLING_LIMITS = {"top_p": (1e-6, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (1e-3, 1e3)}
SAMPLING_OPTIONS = ("top_k", *SAMPLING_LIMITS)


class Sampled(NamedTuple):
    """A completion.

    Args:
        input_ids: Token ids, at least one.
        log_probs: Their log-probabilities under the sampler, or None; 0 where another than the model wrote.
        is_trained: Whether the model wrote each token. Others, such as the results of tools, are read and not trained.
            None: it wrote all.
    """

    input_ids: list[int]
    log_probs: list[float] | None = None
    is_trained: list[bool] | None = None


def check_sampling_options(options: Mapping[str, Any] | None, *, sampler: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a sampling, checked: top_p, top_k, min_p and repetition_penalty, those that were given.

    Raises:
        OptionError: One has another name, a value that is not allowed, or is not taken by the sampler.

    Example:
        >>> check_sampling_options({"top_p": 0.9, "top_k": 20}, sampler=sample_with_model)
        {'top_p': 0.9, 'top_k': 20}
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"sampling_options must be a dict, got {options!r} ({type(options).__name__}).")
    checked: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name not in SAMPLING_OPTIONS:
            raise OptionError(
                f"sampling_options has {name!r}; it takes {', '.join(SAMPLING_OPTIONS)}. The others are options of "
                "RolloutDataModule."
            )
        if name == "top_k":
            checked[name] = check_int(f"sampling_options[{name!r}]", value, low=0)
        else:
            low, high = SAMPLING_LIMITS[name]
            checked[name] = float(check_float(f"sampling_options[{name!r}]", value, low=low, high=high))
    _refuse_untaken(sampler, checked, what="sampler")
    return checked


def takes_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether a function takes a keyword; False where Python does not know its signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _refuse_untaken(function: Callable[..., Any], options: Mapping[str, Any], *, what: str) -> None:
    untaken = [name for name in options if not takes_keyword(function, name)]
    if untaken:
        name = getattr(function, "__name__", type(function).__name__)
        raise OptionError(
            f"sampling_options has {', '.join(untaken)}, which the {what} {name} does not take by name, so it would "
            "have no effect. Add it to its keywords, or remove it from sampling_options."
        )


def sample_with_model(
    tuner: Tuner,
    prompts: Sequence[Sequence[int]],
    *,
    num_completions: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    **sampling_options: Any,
) -> list[list[Sampled]]:
    """Sample with transformers' ``generate`` in the process of the training: simple, and slow for large models."""
    from lightning_fastft.hf.generation import sample_completions

    if tuner.is_sharded:
        raise OptionError(
            "sample_with_model cannot sample from a model that is sharded: ranks write texts of different lengths. Use "
            "strategy='fastft' or 'fastft_ddp', or another sampler."
        )
    groups = sample_completions(
        tuner.model,
        tokenizer=tuner.tokenizer,
        prompts=prompts,
        num_completions=num_completions,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        more_ends=() if tuner.answer_end is None else (tuner.answer_end,),
        **sampling_options,
    )
    return [[Sampled(ids) for ids in group] for group in groups]


class VllmSampler:
    """Sample with vLLM in the process of the training; the adapters are handed over by file before each round.

    Args:
        model: Name or folder of the base, as vLLM takes it.
        max_lora_rank: Largest rank of the adapters: 1, 8, 16, 32, 64, 128, 256, 320 or 512.
        gpu_memory_utilization: Share of the GPU's memory for vLLM.
        engine_options: Further arguments of ``vllm.LLM``.

    Raises:
        MissingDependencyError: vLLM is not installed.

    Source:
        docs.vllm.ai, vllm.LLM, vllm.SamplingParams and vllm.lora.request, v0.10 to v0.22; run with
        v0.32 (tests/training/test_vllm.py).
    """

    def __init__(
        self,
        model: str,
        *,
        max_lora_rank: int = 64,
        gpu_memory_utilization: float = 0.3,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import vllm
        except ImportError as error:
            raise MissingDependencyError("VllmSampler needs vLLM: pip install vllm.") from error
        self._vllm = vllm
        self._max_lora_rank = max_lora_rank
        self._engine = vllm.LLM(
            model=model,
            enable_lora=True,
            max_lora_rank=max_lora_rank,
            gpu_memory_utilization=gpu_memory_utilization,
            # By default vLLM returns log-probabilities at temperature 1.
            logprobs_mode="processed_logprobs",
            **(engine_options or {}),
        )
        self._num_rounds = 0

    def __call__(
        self,
        tuner: Tuner,
        prompts: Sequence[Sequence[int]],
        *,
        num_completions: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        **sampling_options: Any,
    ) -> list[list[Sampled]]:
        """Return completions with vLLM's log-probabilities, which are those of its distribution after all options.

        Raises:
            OptionError: The tuner has no adapters, they are sharded or active beside others, or their rank is above
                max_lora_rank.
            UnsupportedModelError: vLLM would not read a part of the adapters.
        """
        from vllm.lora.request import LoRARequest

        from lightning_fastft.hf.export import save_adapters

        self._check_adapters(tuner)
        self._num_rounds += 1
        options = [
            # Each completion of each prompt draws from a seed of its own: vLLM adds the number of the completion.
            self._vllm.SamplingParams(
                n=num_completions, max_tokens=max_new_tokens, temperature=temperature, logprobs=0,
                seed=seed % 2**62 + place * num_completions, detokenize=False,
                stop_token_ids=None if tuner.answer_end is None else [tuner.answer_end], **sampling_options,
            )
            for place in range(len(prompts))
        ]  # fmt: skip
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with TemporaryDirectory(prefix="fastft-adapters-") as folder:
            # Every rank writes for its own engine.
            save_adapters(tuner.model, Path(folder) / "adapters", initial=tuner.initial_adapters)
            # A new number for new adapters: vLLM keeps those of earlier numbers.
            request = LoRARequest(f"round-{self._num_rounds}", self._num_rounds, str(Path(folder) / "adapters"))
            results = self._engine.generate(inputs, options, use_tqdm=False, lora_request=request)
        return [
            [
                Sampled(
                    list(output.token_ids),
                    [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)],
                )
                for output in result.outputs
            ]
            for result in results
        ]

    def _check_adapters(self, tuner: Tuner) -> None:
        from lightning_fastft.hf.read_back import check_for_vllm

        if not tuner.has_adapters:
            raise OptionError("VllmSampler hands adapters over, and all weights are trained: give the tuner lora.")
        if tuner.is_sharded:
            raise OptionError(
                "VllmSampler cannot hand over adapters that are sharded. Use strategy='fastft' or 'fastft_ddp', or "
                "another sampler."
            )
        if len(tuner.model.active_adapters) > 1:
            raise OptionError(
                "VllmSampler hands over the trained adapters alone, and others are active beside them "
                "(frozen_adapters), so the samples would be of another model. Merge those into the base first: fastft "
                "export --merge."
            )
        rank = check_for_vllm(tuner.model, is_doubled=tuner.initial_adapters is not None)
        if rank > self._max_lora_rank:
            raise OptionError(
                f"The adapters need max_lora_rank={rank}, and VllmSampler has {self._max_lora_rank}: give "
                f"VllmSampler(..., max_lora_rank={rank})."
            )


class FunctionSampler:
    """Sample with a plain function from prompts to completions, both as token ids.

    The function controls temperature and seed; a completion of more than max_new_tokens is refused.

    Args:
        generate: Called with a list of prompts, each num_completions times in a row, and with the ``sampling_options``
            of the ``RolloutDataModule`` as keywords; returns one completion for each, without the prompt, and with the
            end-of-text token where the text ends.

    Raises:
        OptionError: generate is not callable.

    Example:
        >>> sampler = FunctionSampler(lambda prompts: [[len(prompt), 1] for prompt in prompts])
        >>> sampler(None, [[5, 6]], num_completions=1, max_new_tokens=2, temperature=1.0, seed=0)
        [[Sampled(input_ids=[2, 1], log_probs=None, is_trained=None)]]
    """

    def __init__(self, generate: Callable[..., Sequence[Sequence[int]]]) -> None:
        if not callable(generate):
            raise OptionError(f"generate must be a function, got {generate!r} ({type(generate).__name__}).")
        self._generate = generate

    def __call__(
        self,
        tuner: Tuner | None,
        prompts: Sequence[Sequence[int]],
        *,
        num_completions: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        **sampling_options: Any,
    ) -> list[list[Sampled]]:
        """Return the function's completions of each prompt.

        Raises:
            DataError: It returned another number of completions.
            OptionError: It does not take a sampling option that was given.
        """
        _refuse_untaken(self._generate, sampling_options, what="function of FunctionSampler")
        repeated = [list(prompt) for prompt in prompts for _ in range(num_completions)]
        written = [Sampled(list(ids)) for ids in self._generate(repeated, **sampling_options)]
        if len(written) != len(repeated):
            raise DataError(
                f"The function of FunctionSampler returned {len(written)} completions for {len(repeated)} prompts; it "
                "must return one for each."
            )
        return [written[begin : begin + num_completions] for begin in range(0, len(written), num_completions)]
