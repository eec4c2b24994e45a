"""A tokenizer that needs no hub: byte-level BPE of 300 tokens, with and without generation marks in its chat
template.
"""

import pytest

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(*, chat_template=None, eos_token="<|endoftext|>", bos_token=None):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["what is two plus two", "two plus two is four", "the answer is four", "user assistant system"], trainer
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if bos_token is not None:
        front = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, tokenizer.token_to_id(bos_token))]
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, front])
    names = {"eos_token": eos_token, "bos_token": bos_token}
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: value for name, value in names.items() if value is not None}
    )
    built.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    built.chat_template = chat_template
    return built


@pytest.fixture(scope="session")
def marked_tokenizer():
    return build_tokenizer(chat_template=MARKED)


@pytest.fixture(scope="session")
def unmarked_tokenizer():
    return build_tokenizer(chat_template=UNMARKED)


@pytest.fixture(scope="session")
def plain_tokenizer():
    return build_tokenizer()
