"""Generation of a batch equals that of each prompt alone, and leaves model and tokenizer as they were."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.generation import generate_texts
from tests.support.tiny_models import VOCABULARY, build_tiny

CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", chat_template=CHAT)


@pytest.mark.parametrize("name", ["llama", "mistral_windowed", "gpt_oss"])
def test_batch_equals_each_prompt_alone_and_restores_every_mode(name, tokenizer):
    model = build_tiny(name).train()
    model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    prompts = ["w5", "w7 w8 w9 w10 w11 w12 w13", "w20 w21"]

    def write(some):
        return generate_texts(model, tokenizer=tokenizer, prompts=some, max_new_tokens=6, do_sample=False)

    together = write(prompts)
    assert together == [write([prompt])[0] for prompt in prompts]
    assert len(set(together)) == 3
    assert [module.training for module in model.modules()] == modes
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, "right")
    ids = torch.tensor([[7, 8, 9, 10, 11, 12, 13]])
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model.eval()(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    written = ids[0, 7:].tolist()
    assert together[1] == tokenizer.decode(
        written[: written.index(2)] if 2 in written else written, skip_special_tokens=True
    )


def test_modes_are_restored_after_an_error(tokenizer):
    model = build_tiny("llama").train()
    with pytest.raises(ValueError, match="no_such_option"):
        generate_texts(model, tokenizer=tokenizer, prompts=["w5"], max_new_tokens=2, no_such_option=1)
    assert all(module.training for module in model.modules())


def test_conversations_go_through_the_chat_template(tokenizer):
    model = build_tiny("llama")
    chat = generate_texts(
        model, tokenizer=tokenizer, prompts=[[{"role": "user", "content": "w5 w6"}]], max_new_tokens=4, do_sample=False
    )
    assert chat == generate_texts(model, tokenizer=tokenizer, prompts=["w5 w6 w9"], max_new_tokens=4, do_sample=False)


def test_impossible_prompts_are_refused(tokenizer):
    model = build_tiny("llama")
    with pytest.raises(OptionError, match="a list"):
        generate_texts(model, tokenizer=tokenizer, prompts="w5", max_new_tokens=2)
    with pytest.raises(OptionError, match="Prompt 1 has no token"):
        generate_texts(model, tokenizer=tokenizer, prompts=["w5", ""], max_new_tokens=2)
    assert generate_texts(model, tokenizer=tokenizer, prompts=[], max_new_tokens=2) == []
