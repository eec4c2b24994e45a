"""A Modelfile for Ollama: exactly the chat template, or a refusal."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lightning_fastft.cli.trained.modelfile import read_turns, write_modelfile
from lightning_fastft.core.errors import UnsupportedModelError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A system message where none is given, as Qwen2.5 has it.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
# Mistral's brackets: no prompt, an end-of-text token after each answer, a token that begins the text.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% else %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}"
)
# Phi's bars: an end-of-text token where no answer follows.
BARS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
TRIMMED = CHATML.replace("m['content']", "m['content'][1:]")
NUMBERED = CHATML.replace("m['role'] + '\n'", "m['role'] + loop.index0|string + '\n'")
BRACED = CHATML.replace("'<|im_start|>' +", "'<|{' + '{|>' +")
TALK = [
    {"role": "system", "content": "Rhyme."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Why?"},
    {"role": "user", "content": "Bye"},
]


def tokenizer_with(template):
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, BRACKETS, BARS])
def test_turns_render_as_the_template(template):
    tokenizer = tokenizer_with(template)
    turns = read_turns(tokenizer)
    for talk in (TALK, TALK[1:], TALK[1:2]):
        if talk[0]["role"] in turns.around:
            right = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            assert turns.render(talk) == right.removeprefix("<s>")
    assert ("system" in turns.around) == (template is not BRACKETS)


@pytest.mark.parametrize("template", [TRIMMED, NUMBERED, BRACED])
def test_what_go_cannot_say_is_refused(template):
    with pytest.raises(UnsupportedModelError, match="Export without --ollama"):
        read_turns(tokenizer_with(template))


def test_file_has_template_and_parameters(tmp_path):
    settings = {"eos_token_id": [0, 2], "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    path = write_modelfile(tmp_path, gguf=tmp_path / "a.gguf", tokenizer=tokenizer_with(DEFAULT_SYSTEM))
    assert path.read_text() == (
        'FROM ./a.gguf\nTEMPLATE """{{ if not .System }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}'
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
        '<|im_start|>assistant\n"""\n'
        'PARAMETER stop "<unk>"\nPARAMETER stop "</s>"\n'
        "PARAMETER temperature 0.6\nPARAMETER top_k 20\nPARAMETER repeat_penalty 1.1\n"
    )


def test_tokenizer_without_a_template_takes_plain_text(tmp_path):
    path = write_modelfile(tmp_path, gguf=tmp_path / "a.gguf", tokenizer=tokenizer_with(None))
    assert 'TEMPLATE """{{ .Prompt }}"""' in path.read_text()
