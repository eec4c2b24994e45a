"""Data in every form that people keep it in: trained exactly, or refused for a reason that has a name; nothing is
silently wrong.
"""

import re

import pytest

from lightning_fastft.core.errors import DataError, OptionError
from tests.faults.data_forms import FORMS
from tests.packing.conftest import UNMARKED, build_tokenizer
from tests.support.training_parts import quiet_data

TEMPLATE = UNMARKED.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}",
)
IDS = [6, 7]


def trained_texts(paths, tokenizer, options):
    data = quiet_data(paths, tokenizer=tokenizer, **{"max_tokens": 512, **options})
    data.setup("fit")
    documents = [document.labels[document.labels != -100].tolist() for document in data.subset("train").documents]
    return documents, [tokenizer.decode(ids) for ids in documents]


def test_there_are_sixty_forms_with_names_of_their_own():
    assert len({form.name for form in FORMS}) == len(FORMS) >= 60


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name.replace(" ", "-"))
def test_form_is_trained_exactly_or_refused_by_name(tmp_path, form):
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    paths = form.write(tmp_path)
    paths = str(paths) if hasattr(paths, "parts") else paths
    if isinstance(form.answer, str) and form.answer != "ids":
        with pytest.raises((DataError, OptionError), match=form.answer) as caught:
            trained_texts(paths, tokenizer, form.options)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", str(caught.value))
        return
    documents, texts = trained_texts(paths, tokenizer, form.options)
    if form.answer == "ids":
        assert documents == [IDS]
    else:
        assert texts == form.answer
