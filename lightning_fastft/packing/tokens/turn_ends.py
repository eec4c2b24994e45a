"""Train the token at which generation stops behind answers that a chat template ends without a token.

GLM-4 marks where a turn begins, not where it ends: generation stops at the ``<|user|>`` or ``<|observation|>`` of the
next turn. So these tokens are trained behind an answer, and the last answer of a conversation gets one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fastft.packing.tokens.control_tokens import Rendered
from lightning_fastft.packing.tokens.turns import SENTINEL, Render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION = "58126934"


class TurnEnds:
    """Find the tokens at which generation stops behind the answers of a conversation.

    Args:
        tokenizer: Its end-of-sequence token stops generation.
        stop_ids: Ids of further tokens that do.
        shape: Brings messages to the shape that the template reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        shape: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]],
    ) -> None:
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        self._eos = tokenizer.eos_token
        self._stops = tuple(sorted({*filter(None, map(added.get, stop_ids)), *filter(None, [self._eos])}))
        # An answer that ends with another control token has an end.
        self._controls = tuple({*tokenizer.all_special_tokens, *self._stops})
        self._words = tuple({*self._controls, *(content for content in added.values() if content.strip())})
        self._shape = shape
        self._behind_answer: str | None = None

    def extend(self, rendered: Rendered) -> Rendered:
        """Return a conversation whose trained answers include the token behind them at which generation stops."""
        return rendered._replace(
            spans=tuple((begin, end + len(self._find_behind(rendered.text, end))) for begin, end in rendered.spans)
        )

    def close(self, rendered: Rendered, messages: Sequence[dict[str, Any]], render: Render) -> Rendered:
        """Return a conversation whose last answer, which is trained, ends with a token at which generation stops.

        It is the one that the template writes before the next turn, else the end-of-sequence token.
        """
        text = rendered.text
        # A template may write a line break behind the end of a turn, which loss_on="all" trains too.
        bare = text.rstrip()
        if bare.endswith(self._controls) or not rendered.spans or rendered.spans[-1][1] != len(text):
            return rendered
        token = self._find_next(text, messages, render)
        if not token and not bare.endswith(self._words):
            token = self._eos or ""
        if not token:
            return rendered
        begin, end = rendered.spans[-1]
        note = f"conversations that the chat template ends without a token; they get {token}, at which generation stops"
        return rendered._replace(
            text=text + token, spans=(*rendered.spans[:-1], (begin, end + len(token))), notes=(*rendered.notes, note)
        )

    def _find_next(self, text: str, messages: Sequence[dict[str, Any]], render: Render) -> str:
        """Return the token that the template writes between the last answer and the next turn; "" if there is none."""
        if messages[-1].get("tool_calls"):
            result = self._shape([{"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": _QUESTION}])
            longer = render([*messages, *result], False) or ""
            return self._find_behind(longer, len(text)) if longer.startswith(text) else ""
        if self._behind_answer is None:
            question = {"role": "user", "content": _QUESTION}
            turns = self._shape([question, {"role": "assistant", "content": SENTINEL}, question])
            longer = render(turns, False) or ""
            place = longer.find(SENTINEL) + len(SENTINEL)
            self._behind_answer = self._find_behind(longer, place) if SENTINEL in longer else ""
        return self._behind_answer

    def _find_behind(self, text: str, end: int) -> str:
        """Return the token at which generation stops that follows an answer without an end; else ""."""
        if text.endswith(self._controls, 0, end):
            return ""
        return next((token for token in self._stops if text.startswith(token, end)), "")
