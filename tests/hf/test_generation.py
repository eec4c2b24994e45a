"""Generation of a batch equals that of each prompt alone, and leaves model and tokenizer as they were."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.generation import encode_prompt, generate_texts, sample_completions
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.tokens.formatter import Formatter
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


@pytest.mark.parametrize(("added", "begin"), [("$A <eos>", []), ("<bos> $A", [1]), ("<bos> $A <eos>", [1])])
def test_a_text_begins_as_in_training_and_is_not_ended(added, begin, tokenizer):
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.post_processor = processors.TemplateProcessing(single=added, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    ending = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    formatter = Formatter(ending, options=FormatOptions(max_tokens=64))
    (row,) = formatter.encode([{"prompt": "w5 ", "completion": "w7"}], format="prompt_completion")
    assert encode_prompt(ending, "w5 ") == row.input_ids[~row.is_trained].tolist() == [*begin, 5]
    # A text that begins with the token does not get a second one.
    assert encode_prompt(ending, "<bos> w5") == [1, 5]


def test_impossible_prompts_are_refused(tokenizer):
    model = build_tiny("llama")
    with pytest.raises(OptionError, match="a list"):
        generate_texts(model, tokenizer=tokenizer, prompts="w5", max_new_tokens=2)
    with pytest.raises(OptionError, match="Prompt 1 has no token"):
        generate_texts(model, tokenizer=tokenizer, prompts=["w5", ""], max_new_tokens=2)
    assert generate_texts(model, tokenizer=tokenizer, prompts=[], max_new_tokens=2) == []


# What transformers' generate merges into the options that it is given.
UNLIKE_THE_MODEL = {
    "repetition_penalty": 5.0,
    "min_p": 0.5,
    "top_h": 0.3,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.02,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[7], [9]],
    "suppress_tokens": [11],
    "sequence_bias": [[[13], 9.0]],
    "num_beams": 2,
    "stop_strings": ["w5"],
}


@pytest.mark.parametrize(
    ("name", "has_adapters"), [("repetition_penalty", True), *((name, False) for name in UNLIKE_THE_MODEL)]
)
def test_samples_follow_the_models_own_distribution(name, has_adapters, tokenizer):
    def sample(temperature):
        return sample_completions(
            model, tokenizer=tokenizer, prompts=[[5, 6], [7, 8, 7]], num_completions=8, max_new_tokens=12,
            temperature=temperature, seed=1,
        )  # fmt: skip

    base = build_tiny("llama")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])) if has_adapters else base
    truth = sample(1.0)
    setattr(base.generation_config, name, UNLIKE_THE_MODEL[name])
    assert sample(1.0) == truth
    assert getattr(base.generation_config, name) == UNLIKE_THE_MODEL[name]
    # Near a temperature of 0 each token is the model's most likely one.
    ids = torch.tensor([7, 8, 7, *sample(1e-3)[1][0]])
    with torch.no_grad():
        best = model(input_ids=ids[None], use_cache=False).logits[0].argmax(-1)
    assert best[2:-1].tolist() == ids[3:].tolist()


def test_a_repetition_penalty_counts_the_prompt_and_not_its_padding(tokenizer):
    model, prompts = build_tiny("llama"), [[5, 6], [7, 8, 7, 9, 11, 12]]

    def sample(*prompts, penalty=1.0):
        return sample_completions(
            model, tokenizer=tokenizer, prompts=prompts, num_completions=1, max_new_tokens=8, temperature=1e-3, seed=1,
            repetition_penalty=penalty,
        )  # fmt: skip

    # The end-of-text token, which pads, would be the likeliest one after a penalty below 1.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0.5 * model.lm_head.weight[sample(prompts[0])[0][0][0]]
    (alone,), (other,) = (sample(prompt, penalty=0.2) for prompt in prompts)
    assert sample(*prompts, penalty=0.2) == [alone, other]
    theirs = model.generate(
        torch.tensor([prompts[0]]), do_sample=False, max_new_tokens=8, repetition_penalty=0.2, pad_token_id=0
    )
    assert theirs[0, 2:].tolist() == alone[0] != sample(prompts[0])[0][0]
