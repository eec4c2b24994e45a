"""Every turn of a conversation is trained whole, also if its template renders it differently once later ones follow."""

import pytest

from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.packing.tokens.shapes import REASONING_DROPPED
from tests.packing.conftest import UNMARKED, build_tokenizer

CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
)
# Thoughts in front of every turn behind the last question (the habit of Qwen3.5, which opens them in its prompt).
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if ns.last < 0 %}{{ raise_exception('no question') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ (message.content or '') | trim }}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
THINKING, OPENED = THINKING.replace("PROMPT", ""), THINKING.replace("PROMPT", "<think>\n")
# A channel in front of each answer, and calls with thoughts that a later answer removes (the habit of gpt-oss).
CHANNELS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% set ns = namespace(later=false) %}{% for other in messages[loop.index:] %}"
    "{% if other.role == 'assistant' and not other.tool_calls %}{% set ns.later = true %}{% endif %}{% endfor %}"
    "{% if message.tool_calls %}{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if message.thinking and not ns.later %}<|im_start|>assistant thinks {{ message.thinking }}<|im_end|>{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "<|im_start|>assistant to {{ call.name }} {{ call.arguments | tojson }}<|im_end|>"
    "{% else %}<|im_start|>assistant final {{ message.content }}"
    "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endif %}"
    "{% else %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
# No generation prompt, a space in front of the stripped answer (the habit of Llama 2 and Mistral).
SPACED = (
    "{% for message in messages %}{% if message.role == 'user' %}<s>[INST] {{ message.content | trim }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content | trim }}</s>{% endif %}{% endfor %}"
)
# Turns after the last question keep the thoughts in their content, earlier ones lose them (the habit of Qwen3.5).
CONTENT_THOUGHTS = OPENED.replace("<think>\n\n</think>\n\n{% endif %}", "{% endif %}").replace(
    "{{ (message.content or '') | trim }}",
    "{% if loop.index0 > ns.last %}{{ (message.content or '') | trim }}"
    "{% else %}{{ (message.content or '').split('</think>')[-1] | trim }}{% endif %}",
)
# Calls and results of tools are part of one open turn (the habit of Gemma 4).
OPEN_TURN = (
    "{% for message in messages %}{% set before = messages[loop.index0 - 1] if loop.index0 else {'role': ''} %}"
    "{% if message.role == 'tool' %}<result>{{ message.content }}</result>{% else %}"
    "{% if before.role != 'tool' %}<|im_start|>{{ message.role }}\n{% endif %}"
    "{% if message.thinking %}<thought>{{ message.thinking }}</thought>{% endif %}"
    + CALLS
    + "{{ message.content }}{{ '<|im_end|>\n' if not message.tool_calls }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)


def turn(role, content="", **keys):
    return {"role": role, "content": content, **keys}


def calling(content=None, *, count=1, **keys):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": number}}} for number in range(count)]
    return [turn("user", "two"), turn("assistant", content, tool_calls=calls, **keys), turn("tool", "four")]


FIRST, SECOND = '<call>add {"a": 0}</call>', '<call>add {"a": 1}</call>'
MORE = [turn("user", "plus"), turn("assistant", "five")]


def encode(template, messages, *, tokenizer=None):
    tokenizer = tokenizer or build_tokenizer(chat_template=template)
    (example,) = Formatter(tokenizer, options=FormatOptions(max_tokens=512)).encode(
        [{"messages": messages}], format="messages"
    )
    return tokenizer, example


def trained(template, messages, *, tokenizer=None):
    """The texts of the stretches that are trained."""
    tokenizer, example = encode(template, messages, tokenizer=tokenizer)
    assert not isinstance(example, RowRejectedError), example.detail
    texts, last = [], False
    for token, is_trained in zip(example.input_ids.tolist(), example.is_trained.tolist()):
        if is_trained:
            texts = texts if last else [*texts, []]
            texts[-1].append(token)
        last = is_trained
    return [tokenizer.decode(ids) for ids in texts]


@pytest.mark.parametrize("template", [THINKING, OPENED], ids=["thinking", "opened"])
@pytest.mark.parametrize(
    ("content", "count", "shown"),
    [
        ("is", 1, f"is\n{FIRST}"),
        ("is", 2, f"is\n{FIRST}\n{SECOND}"),
        (" is\n", 1, f"is\n{FIRST}"),
        ("", 1, FIRST),
        (None, 2, f"{FIRST}\n{SECOND}"),
    ],
)
def test_tool_calls_of_earlier_turns_are_trained_to_their_end(template, content, count, shown):
    last = "</think>\n\nfive<|im_end|>"
    found = trained(template, [*calling(content, count=count), turn("assistant", "four"), *MORE])
    assert found[:2] == [f"{shown}<|im_end|>", "four<|im_end|>"]
    assert found[2].endswith(last)


def test_calls_whose_thoughts_later_answers_remove_are_trained_whole():
    turns = [*calling(thinking="hm"), turn("assistant", "four"), *calling(thinking="so"), turn("assistant", "five")]
    call = ' to add {"a": 0}<|im_end|>'
    assert trained(CHANNELS, turns) == [call, " final four<|im_end|>", call, " final five<|endoftext|>"]
    assert trained(CHANNELS, turns[:-1])[-1] == ' thinks so<|im_end|><|im_start|>assistant to add {"a": 0}<|im_end|>'


@pytest.mark.parametrize("content", ["four", " four", "four\n", "\n four \n"])
def test_white_space_around_answers_is_no_reason_to_reject(content):
    tokenizer = build_tokenizer(chat_template=SPACED, eos_token="</s>")
    stripped = [turn("user", "two"), turn("assistant", content), *MORE]
    assert trained(SPACED, stripped, tokenizer=tokenizer) == [" four</s>", " five</s>"]
    assert trained(THINKING, stripped)[0] == "four<|im_end|>"


def test_first_word_is_trained_by_tokenizers_that_join_it_with_the_space_before_it():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "▁abcdefghijklmnopqrstuvwxyz[]/INST"
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), *((letter, -9.0) for letter in letters), ("▁four", -2.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>", chat_template=SPACED
    )
    turns = [turn("user", "two"), turn("assistant", "four is")]
    assert trained(SPACED, turns, tokenizer=tokenizer) == [" four is</s>"]
    _, example = encode(SPACED, turns, tokenizer=tokenizer)
    whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    assert example.input_ids.tolist() == whole


def test_parts_of_a_conversation_that_the_template_refuses_are_no_reason_to_reject():
    assert trained(THINKING, [turn("assistant", "hello"), *MORE])[0] == "hello<|im_end|>"


def test_tool_calls_that_the_template_drops_from_a_turn_are_rejected():
    turns = [turn("assistant", "four"), *MORE]
    _, rejected = encode(CHANNELS, [*calling(count=2), *turns])
    assert isinstance(rejected, RowRejectedError)
    assert rejected.reason == rejects.TEMPLATE_DROPS
    assert "turn 1" in rejected.detail
    beside = UNMARKED.replace(
        "{{ message.content }}", "{% if message.content %}{{ message.content }}{% else %}CALLS{% endif %}"
    )
    beside = beside.replace("CALLS", CALLS)
    assert trained(beside, [*calling(), *turns])[0] == f"{FIRST}<|im_end|>"
    _, rejected = encode(beside, [*calling("is"), *turns])
    assert isinstance(rejected, RowRejectedError)
    assert rejected.reason == rejects.TEMPLATE_DROPS


def test_calls_before_the_content_are_rejected_where_only_a_sentinel_finds_them():
    template = OPENED.replace("{{ (message.content or '') | trim }}" + CALLS, CALLS + "{{ message.content }}")
    _, rejected = encode(template, [*calling("is"), turn("assistant", "four"), *MORE])
    assert isinstance(rejected, RowRejectedError)
    assert rejected.reason == rejects.TEMPLATE_UNCLEAR


@pytest.mark.parametrize("is_opened", [True, False])
def test_answers_behind_thoughts_that_the_template_drops_from_the_content_are_found(is_opened):
    thought = "<think>\nhm\n</think>\n\n"
    calls = calling(thought)
    turns = [*calls, turn("assistant", f"{thought}four"), *MORE[:1], turn("assistant", "<think>\nso\n</think>\n\nfive")]
    if not is_opened:
        turns[1]["content"], turns[3]["content"] = "hm\n</think>\n", "hm\n</think>four"
    assert trained(CONTENT_THOUGHTS, turns) == [
        f"\n{FIRST}<|im_end|>",
        "four<|im_end|>",
        "so\n</think>\n\nfive<|im_end|>",
    ]
    _, example = encode(CONTENT_THOUGHTS, turns)
    assert example.notes == (REASONING_DROPPED,)
    _, example = encode(CONTENT_THOUGHTS, turns[4:])
    assert not example.notes


def test_answer_whose_thought_the_template_shows_otherwise_is_rejected():
    template = CONTENT_THOUGHTS.replace(".split('</think>')[-1]", ".split('<think>')[-1] | replace('</think>', ' ')")
    _, rejected = encode(template, [turn("user", "two"), turn("assistant", "<think>hm</think>four"), *MORE])
    assert isinstance(rejected, RowRejectedError)
    assert rejected.reason == rejects.TEMPLATE_UNCLEAR


def test_calls_of_a_template_without_generation_prompt_are_found():
    # Mistral writes no speaker and no content before a call.
    template = SPACED.replace(
        "{% elif message.role == 'assistant' %}",
        "{% elif message.role == 'tool' %}[RESULT]{{ message.content }}{% elif message.tool_calls %}[CALLS]"
        + CALLS
        + "</s>{% elif message.role == 'assistant' %}",
    )
    tokenizer = build_tokenizer(chat_template=template, eos_token="</s>")
    turns = [*calling(count=2), *calling()[1:], turn("assistant", "four"), *MORE]
    assert trained(template, turns, tokenizer=tokenizer) == [
        f"[CALLS]{FIRST}\n{SECOND}</s>",
        f"[CALLS]{FIRST}</s>",
        " four</s>",
        " five</s>",
    ]


@pytest.mark.parametrize("keys", [{}, {"thinking": "hm"}])
@pytest.mark.parametrize("is_named", [False, True])
def test_calls_behind_results_in_an_open_turn_are_found(keys, is_named):
    turns = [*calling(), *calling(**keys)[1:], turn("assistant", "four"), *MORE]
    thought = "<thought>hm</thought>" if keys else ""
    template = OPEN_TURN.replace("before.role != 'tool'", "before.role != 'tool' or message.tool_calls")
    assert trained(template if is_named else OPEN_TURN, turns) == [
        FIRST,
        f"{thought}{FIRST}",
        "four<|im_end|>",
        "five<|im_end|>",
    ]


def test_dropped_system_messages_and_texts_beside_calls_are_noted():
    messages = [turn("system", "brief"), turn("user", "two"), turn("assistant", "four")]
    _, example = encode(SPACED, messages)
    assert any("system message" in note for note in example.notes)
    _, example = encode(UNMARKED, messages)
    assert not example.notes
    calls = UNMARKED.replace(
        "{{ message.content }}", "{% if message.tool_calls %}" + CALLS + "{% else %}{{ message.content }}{% endif %}"
    )
    _, example = encode(calls, [*calling("plus"), turn("assistant", "four")])
    assert any("beside tool calls" in note for note in example.notes)
    _, example = encode(calls, [*calling(), turn("assistant", "four")])
    assert not example.notes
