"""Samplers: functions and classes that complete prompts with the model that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fastft.core.errors import DataError, MissingDependencyError, OptionError

if TYPE_CHECKING:
    from lightning_fastft.training.tuner import Tuner


class Sampled(NamedTuple):
    """A completion: token ids, at least one; their log-probabilities under the sampler, or None."""

    input_ids: list[int]
    log_probs: list[float] | None = None


def sample_with_model(
    tuner: Tuner,
    prompts: Sequence[Sequence[int]],
    *,
    num_completions: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
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
    ) -> list[list[Sampled]]:
        """Return completions with vLLM's log-probabilities.

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
                stop_token_ids=None if tuner.answer_end is None else [tuner.answer_end],
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
        generate: Called with a list of prompts, each num_completions times in a row; returns one completion for each,
            without the prompt, and with the end-of-text token where the text ends.

    Raises:
        OptionError: generate is not callable.

    Example:
        >>> sampler = FunctionSampler(lambda prompts: [[len(prompt), 1] for prompt in prompts])
        >>> sampler(None, [[5, 6]], num_completions=1, max_new_tokens=2, temperature=1.0, seed=0)
        [[Sampled(input_ids=[2, 1], log_probs=None)]]
    """

    def __init__(self, generate: Callable[[list[list[int]]], Sequence[Sequence[int]]]) -> None:
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
    ) -> list[list[Sampled]]:
        """Return the function's completions of each prompt.

        Raises:
            DataError: It returned another number of completions.
        """
        repeated = [list(prompt) for prompt in prompts for _ in range(num_completions)]
        written = [Sampled(list(ids)) for ids in self._generate(repeated)]
        if len(written) != len(repeated):
            raise DataError(
                f"The function of FunctionSampler returned {len(written)} completions for {len(repeated)} prompts; it "
                "must return one for each."
            )
        return [written[begin : begin + num_completions] for begin in range(0, len(written), num_completions)]
