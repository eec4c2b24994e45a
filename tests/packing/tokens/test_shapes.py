"""Tool calls, tools, reasoning and weights reach a template in the form that it reads, or the row says what is lost."""

import json

import pytest
from jinja2 import Template

from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.tokens.chat import NOT_TRAINED
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.packing.tokens.shapes import REASONING_DROPPED, RESULTS_DROPPED, TOOLS_DROPPED, MessageShapes
from tests.packing.conftest import MARKED, UNMARKED, build_tokenizer

CONTENT = "{{ message.content }}"


def show_calls(arguments):
    return (
        "{% for call in message.tool_calls or [] %}{% set f = call.function or call %}<call>{{ f.name }} "
        + arguments
        + "</call>{% endfor %}"
    )


# The habits of Llama and Qwen, of DeepSeek (raises on an object), and of GLM (raises on a text).
OBJECT, TEXT = show_calls("{{ f.arguments | tojson }}"), show_calls("{{ '' + f.arguments }}")
ITEMS = show_calls("{% for name, value in f.arguments.items() %}{{ name }}={{ value }};{% endfor %}")
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
# Shows the thoughts of the last turn alone (the habit of Qwen3).
LAST_THOUGHT = "{% if loop.last and message.NAME %}<think>{{ message.NAME | trim }}</think>{% endif %}"

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ARGUMENTS = {"city": "Zürich", "days": 2}


def call(arguments, *, is_flat=False):
    function = {"name": "weather", "arguments": arguments}
    return function if is_flat else {"type": "function", "id": "c1", "function": function}


def calling(arguments, **options):
    return [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments, **options)]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "four"},
    ]


def encode(template, row, *, format="messages", **options):
    """Return the trained texts of a row, joined, and its notes; or the error that rejects it."""
    tokenizer = build_tokenizer(chat_template=template)
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512, **options))
    (example,) = formatter.encode([row], format=format)
    if isinstance(example, RowRejectedError):
        return example, ()
    return tokenizer.decode(example.input_ids[example.is_trained]), example.notes


@pytest.mark.parametrize("base", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (OBJECT, '{"city": "Zürich", "days": 2}'),
        (TEXT, '{"city": "Zürich", "days": 2}'),
        (ITEMS, "city=Zürich;days=2;"),
    ],
    ids=["object", "text", "items"],
)
@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)], ids=["dict", "json"])
def test_arguments_are_rendered_alike_as_objects_and_as_json_text(base, calls, shown, is_flat, arguments):
    text, _ = encode(base.replace(CONTENT, CONTENT + calls), {"messages": calling(arguments, is_flat=is_flat)})
    assert text == f"<call>weather {shown}</call><|im_end|>four<|im_end|>"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", rejects.MALFORMED),
        ("[1]", rejects.WRONG_TYPE),
        (3, rejects.WRONG_TYPE),
        ('{"a": NaN}', rejects.NOT_FINITE),
    ],
)
def test_arguments_that_are_no_object_are_rejected(arguments, reason):
    rejected, _ = encode(UNMARKED.replace(CONTENT, CONTENT + OBJECT), {"messages": calling(arguments)})
    assert rejected.reason == reason
    assert "messages[1].tool_calls[0]" in rejected.detail


@pytest.mark.parametrize("calls", ["weather", [3], [{"function": "weather"}]])
def test_calls_that_are_no_objects_are_rejected(calls):
    messages = calling({})
    messages[1]["tool_calls"] = calls
    rejected, _ = encode(UNMARKED.replace(CONTENT, CONTENT + OBJECT), {"messages": messages})
    assert rejected.reason == rejects.WRONG_TYPE


@pytest.mark.parametrize(
    "base", [MARKED, UNMARKED, UNMARKED.replace(CONTENT, CONTENT + show_calls("{{ f.arguments }}"))]
)
def test_template_that_drops_tool_calls_or_writes_them_as_python_is_named(base):
    found, _ = encode(base, {"messages": calling(ARGUMENTS)})
    if "call" in base:
        # A text is written as it is: only objects would be written as Python writes them.
        assert found.startswith('<call>weather {"city": "Zürich", "days": 2}</call>')
    else:
        assert found.reason == rejects.TEMPLATE_DROPS
    assert encode(base, {"messages": calling(ARGUMENTS)[::3]})[0] == "four<|im_end|>"


def test_calls_and_results_in_the_earlier_form_are_those_of_tools():
    # The habit of Qwen and ChatML with tools: a role that the template does not know is skipped.
    template = "{% for message in messages if message.role != 'function' %}" + UNMARKED.partition("%}")[2]
    template = template.replace(CONTENT, CONTENT + OBJECT)
    turns, former = calling(ARGUMENTS), calling(ARGUMENTS)
    former[1] = {"role": "assistant", "content": None, "function_call": turns[1]["tool_calls"][0]["function"]}
    former[2] = {"role": "function", "name": "weather", "content": "sun"}
    found = encode(template, {"messages": former}, loss_on="all")
    assert found == encode(template, {"messages": turns}, loss_on="all")
    assert "<|im_start|>tool\nsun<|im_end|>" in found[0]
    assert RESULTS_DROPPED not in found[1]
    # A template that shows the role gets it.
    assert "<|im_start|>function\nsun" in encode(UNMARKED, {"messages": [*turns[:1], *former[2:]]}, loss_on="all")[0]
    former[1]["tool_calls"] = turns[1]["tool_calls"]
    assert "keep one" in encode(template, {"messages": former})[0].detail


@pytest.mark.parametrize("base", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("role", ["tool", "function"])
def test_row_tells_of_results_that_the_template_drops(base, role):
    turns = [*calling(ARGUMENTS)[:1], {"role": role, "content": "four"}, *calling(ARGUMENTS)[3:]]
    blind = base.replace("in messages %}", "in messages if message.role in ('user', 'assistant') %}")
    assert RESULTS_DROPPED not in encode(base, {"messages": turns})[1]
    assert RESULTS_DROPPED in encode(blind, {"messages": turns})[1]
    # The habit of Gemma 4: a result is shown behind a call alone.
    picky = base.replace("in messages %}", "in messages if message.role != role or messages[1].tool_calls %}")
    assert RESULTS_DROPPED in encode(picky.replace("!= role", f"!= '{role}'"), {"messages": turns})[1]


@pytest.mark.parametrize("form", ["messages", "conversations", "prompt_completion"])
def test_tools_reach_the_template_in_every_format(form):
    turns = calling(ARGUMENTS)[::3]
    rows = {
        "messages": {"messages": turns},
        "conversations": {"conversations": turns},
        "prompt_completion": {"prompt": turns[:1], "completion": turns[1:]},
    }
    row = {**rows[form], "tools": [TOOL]}
    shown, notes = encode(TOOLS + UNMARKED, row, format=form, loss_on="all")
    assert shown.startswith(json.dumps(TOOL))
    assert TOOLS_DROPPED not in notes
    assert TOOLS_DROPPED in encode(UNMARKED, row, format=form)[1]


def test_tools_of_a_prompt_that_is_text_are_rejected():
    row = {"prompt": "two", "completion": "four", "tools": [TOOL]}
    assert encode(UNMARKED, row, format="prompt_completion")[0].reason == rejects.WRONG_TYPE


@pytest.mark.parametrize("base", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_given_under_the_name_that_the_template_reads(base, read, given):
    template = base.replace(CONTENT, LAST_THOUGHT.replace("NAME", read) + CONTENT)
    one = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four", given: " hm\n"}]
    text, notes = encode(template, {"messages": one})
    assert text == "<think>hm</think>four<|im_end|>"
    assert REASONING_DROPPED not in notes
    text, notes = encode(template, {"messages": [*one, *one]})
    assert text == "four<|im_end|><think>hm</think>four<|im_end|>"
    assert REASONING_DROPPED in notes
    assert REASONING_DROPPED in encode(base, {"messages": one})[1]
    rejected, _ = encode(template, {"messages": [one[0], {**one[1], given: ["hm"]}]})
    assert rejected.reason == rejects.WRONG_TYPE


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_renamed_where_transformers_does_not(read):
    """Newer versions of transformers give each message all names; older ones do not."""
    template = Template(
        "{% for message in messages %}{{ message.content }}{{ message.NAME }}{% endfor %}".replace("NAME", read)
    )
    shapes = MessageShapes(lambda messages, tools: template.render(messages=messages))
    for given in ("reasoning_content", "thinking", "reasoning"):
        answer = {"role": "assistant", "content": "four", given: "hm", "weight": 0}
        assert shapes.shape([answer]) == [{"role": "assistant", "content": "four", read: "hm"}]


def test_reasoning_that_cannot_be_told_from_the_prompt_is_rejected():
    # Finished turns do not begin as the generation prompt does, so the answer is found by its content alone.
    template = UNMARKED.replace(CONTENT, LAST_THOUGHT.replace("NAME", "thinking") + CONTENT)
    template = template.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<|think|>{% endif")
    turn = {"role": "assistant", "content": "four"}
    assert encode(template, {"messages": [{"role": "user", "content": "two"}, turn]})[0] == "four<|im_end|>"
    rejected, _ = encode(template, {"messages": [{"role": "user", "content": "two"}, turn | {"thinking": "hm"}]})
    assert rejected.reason == rejects.TEMPLATE_UNCLEAR


@pytest.mark.parametrize("flag", [{"weight": 1}, {"train": True}])
def test_trained_flag_of_a_question_is_reported(flag):
    messages = calling(ARGUMENTS)[::3]
    messages[0] |= flag
    text, notes = encode(UNMARKED, {"messages": messages})
    assert text == "four<|im_end|>"
    assert NOT_TRAINED in notes
    assert NOT_TRAINED not in encode(UNMARKED, {"messages": messages}, loss_on="all")[1]
    messages[0] = {"role": "user", "content": "two"}
    messages[1] |= flag
    assert encode(UNMARKED, {"messages": messages}) == ("four<|im_end|>", ())
