"""Messages that go on from whatever an agent holds, as its chat template would write them there.

Theory of operation. `inject` gets messages, not the conversation before them, and the agent may change until its turn
comes. So the template is asked beforehand, with a stand-in conversation: what it writes between the stand-in's last
content and the end of the new messages is what has to follow an answer that is still open; less the markup that closes
a message, it is what has to follow a closed one. Which of these fits is known when the agent is: its text ends in
generated text, in a content, or in control text. So a later `chat` whose history has the messages in this place writes
the same bytes, and everything matches.

An answer that was opened and not begun (`max_tokens` 0, a cancellation before the first token) is taken back: a history
has no such message.

May import kvd.errors, kvd.vm.text and this package.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.model.errors import TemplateRefused
from kvd.model.template import ChatTemplate
from kvd.vm.text import TypedText, cut_spans, joined, merge_spans, rest_of


@dataclass(frozen=True, slots=True)
class Continuation:
    """Rendered messages, ready to go on from any state of a conversation.

    Attributes:
        alone: they are the whole conversation, or the text before them is none.
        after_open: they follow an answer, or a content, whose message is not closed yet.
        after_closed: they follow a closed message.
        opening: markup that opens an answer; empty where the template has none of its own.

    Where the template refuses the messages in such a place, its refusal stands for them.
    """

    alone: TypedText | TemplateRefused
    after_open: TypedText | TemplateRefused
    after_closed: TypedText | TemplateRefused
    opening: bytes

    def after(self, stored: TypedText) -> TypedText:
        """The whole text of an agent that holds `stored`: all of it but an answer not begun, then the messages.

        Raises:
            TemplateRefused: the messages can stand elsewhere, but not here.
        """
        spans = merge_spans(stored.spans)
        if all(span.kind != "control" for span in spans):
            return joined(stored, _accepted(self.alone))
        if spans[-1].kind != "control":
            return joined(stored, _accepted(self.after_open))
        last_bytes, opening_bytes = spans[-1].text_bytes, len(self.opening)
        if opening_bytes and last_bytes >= opening_bytes and stored.data.endswith(self.opening):
            stored = _first(stored, len(stored.data) - opening_bytes)
        return joined(stored, _accepted(self.after_closed))


def continuation(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> Continuation:
    """Render messages that are to go on from what an agent holds.

    Args:
        template: the model's.
        messages: as `ChatTemplate.render` takes them.

    Raises:
        InvalidParams, InvalidText, UnsupportedFeature: as `ChatTemplate.render`.
        TemplateRefused: the template refuses them wherever they stand.
    """
    alone: TypedText | TemplateRefused
    try:
        alone = template.render(messages, add_generation_prompt=False)
    except TemplateRefused as refusal:
        alone = refusal
    question, answer = ({"role": role, "content": _mark()} for role in ("user", "assistant"))
    # an answer follows a question: templates that want roles to take turns accept it after nothing else
    before = [question] if messages[0].get("role") == "assistant" else [question, answer]
    closed = template.render(before, add_generation_prompt=False)
    opened = template.render([question], add_generation_prompt=True)
    opening = _opening(_behind(opened, str(question["content"]).encode()).data, template, question)
    try:
        whole = template.render([*before, *messages], add_generation_prompt=False)
    except TemplateRefused as refusal:
        if isinstance(alone, TemplateRefused):
            raise alone from None
        return Continuation(alone, refusal, refusal, opening)
    mark = str(before[-1]["content"]).encode()
    after_open, closing = _behind(whole, mark), _behind(closed, mark).data
    # a template without closing markup, or with another between two messages, joins them its own way
    after_closed = rest_of(after_open, len(closing)) if after_open.data.startswith(closing) else after_open
    return Continuation(alone, after_open, after_closed, opening)


def _accepted(text: TypedText | TemplateRefused) -> TypedText:
    if isinstance(text, TemplateRefused):
        raise text.with_traceback(None)  # several requests may raise it, one after the other
    return text


def _opening(behind: bytes, template: ChatTemplate, question: Mapping[str, str]) -> bytes:
    """What of the text behind a question opens the answer, rather than closes the question."""
    closing = _behind(template.render([question], add_generation_prompt=False), question["content"].encode()).data
    return behind[len(closing) :] if behind.startswith(closing) else b""


def _mark() -> str:
    """A content that no client can have sent."""
    return "kvd" + secrets.token_hex(12)


def _behind(text: TypedText, mark: bytes) -> TypedText:
    """What follows the stand-in's content."""
    return rest_of(text, text.data.rindex(mark) + len(mark))


def _first(text: TypedText, count_bytes: int) -> TypedText:
    return TypedText(text.data[:count_bytes], tuple(cut_spans(text.spans, count_bytes)))
