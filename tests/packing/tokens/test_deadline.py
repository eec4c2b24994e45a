"""Chat templates of strangers end, and leave the user's timer and handler as they were."""

import signal

import pytest

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.tokens import deadline
from lightning_fastft.packing.tokens.deadline import template_deadline
from tests.packing.conftest import UNMARKED, build_tokenizer

# Some seconds: it ends where nothing stops it, so that the test does too.
LOOP = "{% for a in range(90000) %}{% for b in range(500) %}{% endfor %}{% endfor %}"
ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]


@pytest.mark.parametrize("template", [LOOP, "{% generation %}" + LOOP + "{% endgeneration %}"])
def test_a_template_that_takes_too_long_stops_the_run_with_its_reason(template, monkeypatch):
    monkeypatch.setattr(deadline, "TEMPLATE_SECONDS", 0.2)
    with pytest.raises(DataError, match="chat template"):
        tokenize_sources(
            ROWS,
            tokenizer=build_tokenizer(chat_template=UNMARKED),
            options=FormatOptions(max_tokens=64, chat_template=template),
        )


def test_handler_and_timer_of_the_user_are_put_back():
    before = signal.getsignal(signal.SIGVTALRM)
    with template_deadline():
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
