"""The assistant's characters are found in templates of all habits, or the row is rejected."""

from collections import Counter

import pytest

from lightning_fastft.errors import DataError
from lightning_fastft.packing import rows
from lightning_fastft.packing.chat import ChatRenderer, read_template
from lightning_fastft.packing.formats import FormatOptions, Formatter
from lightning_fastft.packing.rows import RowRejectedError
from tests.packing.conftest import MARKED, UNMARKED, build_tokenizer

# Leaves the thoughts of earlier turns out, and puts empty ones into the last (the habit of Qwen3).
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Renames the assistant, strips contents, refuses anything but taking turns (the habit of Gemma).
STRICT = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "<|im_start|>{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
# Asks for an answer with an opened thought that finished turns do not have, and ends without a special token.
OPENED = (
    "{% for message in messages %}{{ 'User: ' if message.role == 'user' else 'Bot: ' }}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Bot: <think>{% endif %}"
)
NO_PROMPT = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
# Counts the characters of the whole in front, so that no rendered part is a beginning of it.
HOPELESS = "{{ messages | length }}:{% for message in messages %}{{ message.content | length }} {{ message.content }};{% endfor %}"

TURNS = (("user", "two"), ("assistant", "four"), ("user", "plus"), ("assistant", "five"))


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def render(template, turns, *, loss_on="completion", notes=None, tokenizer=None, **kwargs):
    tokenizer = tokenizer or build_tokenizer(chat_template=template)
    renderer = ChatRenderer(tokenizer, template=template, loss_on=loss_on, notes=Counter() if notes is None else notes)
    rendered = renderer.render(conversation(*turns), **kwargs)
    assert rendered.text == tokenizer.apply_chat_template(conversation(*turns), tokenize=False)
    assert rendered.is_chat
    return [rendered.text[begin:end] for begin, end in rendered.spans]


@pytest.mark.parametrize("template", [MARKED, UNMARKED, NO_PROMPT], ids=["marked", "unmarked", "no prompt"])
def test_answers_and_their_ends_are_found(template):
    assert render(template, TURNS) == ["four<|im_end|>", "five<|im_end|>"]
    assert render(template, (("assistant", "hello"), *TURNS)) == ["hello<|im_end|>", "four<|im_end|>", "five<|im_end|>"]
    (everything,) = render(template, TURNS, loss_on="all")
    assert everything.startswith("<|im_start|>user")
    assert everything.endswith("five<|im_end|>\n")


def test_same_answer_twice_is_found_twice():
    assert render(UNMARKED, (("user", "four"), ("assistant", "four"), ("user", "four"), ("assistant", "four"))) == ["four<|im_end|>"] * 2


def test_turns_that_change_within_the_whole_are_found():
    notes = Counter()
    turns = (("user", "two"), ("assistant", "<think>\nhm\n</think>\n\nfour"), ("user", "plus"), ("assistant", "five"))
    assert render(THINKING, turns, notes=notes) == ["four<|im_end|>", "<think>\n\n</think>\n\nfive<|im_end|>"]
    assert render(THINKING, TURNS) == ["four<|im_end|>", "<think>\n\n</think>\n\nfive<|im_end|>"]
    assert any("no generation marks" in note for note in notes)


def test_strict_template_serves_and_refuses():
    assert render(STRICT, TURNS) == ["four<|im_end|>", "five<|im_end|>"]
    assert render(STRICT, (("user", "two"), ("assistant", " four \n"))) == ["four<|im_end|>"]
    with pytest.raises(RowRejectedError, match="take turns") as caught:
        render(STRICT, (("user", "two"), ("user", "two"), ("assistant", "four")))
    assert caught.value.reason == rows.TEMPLATE_REFUSED


def test_prompt_that_finished_turns_do_not_have_is_no_part_of_them():
    assert render(OPENED, TURNS) == ["four\n", "five\n"]


def test_template_that_hides_its_turns_is_rejected():
    with pytest.raises(RowRejectedError) as caught:
        render(HOPELESS, TURNS)
    assert caught.value.reason == rows.TEMPLATE_UNCLEAR


def test_only_turns_behind_the_context_are_trained():
    assert render(MARKED, TURNS, num_context_turns=2) == ["five<|im_end|>"]
    assert render(UNMARKED, TURNS, num_context_turns=2) == ["five<|im_end|>"]


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_tools_reach_the_template(template):
    tokenizer = build_tokenizer(chat_template="{% if tools %}{{ tools[0].name }}: {% endif %}" + template)
    renderer = ChatRenderer(tokenizer, template=tokenizer.chat_template, loss_on="completion", notes=Counter())
    for tools in ([{"name": "adder"}], '[{"name": "adder"}]'):
        assert renderer.render(conversation(*TURNS), tools=tools).text.startswith("adder: ")
    for tools in ("{", {"name": "adder"}):
        with pytest.raises(RowRejectedError) as caught:
            renderer.render(conversation(*TURNS), tools=tools)
        assert caught.value.reason == rows.WRONG_TYPE


def trained_text(tokenizer, turns):
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512))
    example = formatter.encode([{"messages": conversation(*turns)}], format="messages")[0]
    return tokenizer.decode(example.input_ids[example.is_trained]), example, formatter.notes


def test_marked_template_agrees_with_the_assistant_mask_of_transformers(marked_tokenizer):
    _, example, notes = trained_text(marked_tokenizer, TURNS)
    theirs = marked_tokenizer.apply_chat_template(conversation(*TURNS), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert example.input_ids.tolist() == theirs["input_ids"]
    assert example.is_trained.astype(int).tolist() == theirs["assistant_masks"]
    assert not notes


def test_answer_that_begins_or_ends_with_a_space_is_trained_alone():
    # transformers' own mask loses such turns or trains all that follows them: offsets leave the space out.
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}<s>{{ message.content }}<|im_end|>"
        "{% else %}{% generation %} {{ message.content }}{% endgeneration %}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = build_tokenizer(chat_template=template)
    text, _, notes = trained_text(tokenizer, (("user", "two"), ("assistant", "four "), ("user", "plus"), ("assistant", "five")))
    assert text == " four  five"
    assert "may not learn to stop" in " ".join(notes)


def test_chat_has_the_first_and_last_tokens_of_its_template_only():
    tokenizer = build_tokenizer(chat_template=UNMARKED, bos_token="<s>")
    text, example, _ = trained_text(tokenizer, TURNS)
    assert text == "four<|im_end|>five<|im_end|>"
    assert tokenizer.decode(example.input_ids) == tokenizer.apply_chat_template(conversation(*TURNS), tokenize=False)


def test_template_can_be_chosen(tmp_path):
    tokenizer = build_tokenizer(chat_template=UNMARKED)
    assert read_template(tokenizer, None) == UNMARKED
    assert read_template(tokenizer, MARKED) == MARKED
    (tmp_path / "own.jinja").write_text(MARKED)
    assert read_template(tokenizer, str(tmp_path / "own.jinja")) == MARKED
    with pytest.raises(DataError, match=r"missing\.jinja"):
        read_template(tokenizer, str(tmp_path / "missing.jinja"))
    tokenizer.chat_template = {"default": UNMARKED, "tool_use": MARKED}
    assert read_template(tokenizer, None) == UNMARKED
    assert read_template(tokenizer, "tool_use") == MARKED
