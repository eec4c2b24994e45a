"""Tokenizers for worker processes, which find their classes here."""

import sys

had_torch = "torch" in sys.modules
from transformers import PreTrainedTokenizerFast  # noqa: E402

# Older versions of transformers import torch with their tokenizers.
brought_torch = "torch" in sys.modules and not had_torch


class LightTokenizer(PreTrainedTokenizerFast):
    """Refuse to serve in a process that has imported torch, unless it is the one of the tests."""

    def __call__(self, *arguments, **options):
        assert "pytest" in sys.modules or brought_torch or "torch" not in sys.modules
        return super().__call__(*arguments, **options)


class HeavyTokenizer(PreTrainedTokenizerFast):
    """Use the package, as a tokenizer of somebody's own may."""

    def __call__(self, *arguments, **options):
        from lightning_fastft import FineTuner

        assert FineTuner.__name__ == "FineTuner"
        return super().__call__(*arguments, **options)


def as_class(tokenizer, kind):
    tokenizer.__class__ = kind
    return tokenizer
