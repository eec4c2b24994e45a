"""Chat templates of model families that TRL ships, on a byte-level tokenizer with their control tokens."""

import re
from pathlib import Path

from tests.packing.conftest import build_tokenizer

_CONTROL = re.compile(r"<\|[A-Za-z0-9_/]+\|>|</?think>|</?tool_call>|</?arg_(?:key|value)>")
# By family: the tokens at which its models stop.
ENDS = {
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "gptoss": ["<|return|>", "<|call|>"],
}


def family_tokenizer(family):
    """Return a tokenizer with a family's template and its end tokens, the first as eos_token."""
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
    tokenizer = build_tokenizer(eos_token=ENDS[family][0])
    tokens = sorted({*_CONTROL.findall(template), *ENDS[family]})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    return tokenizer
