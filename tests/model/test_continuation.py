"""Messages that go on from what an agent holds: as if the template had written the whole conversation."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.model.continuation import continuation
from kvd.model.errors import TemplateRefused
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.vm.text import Span, TypedText, cut_spans
from tests.support.tiny_model import CHAT_TEMPLATE

Messages = list[dict[str, Any]]

TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
"""As Gemma: roles take turns, the system message is no role."""

INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}<s>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
"""As Llama 2: nothing opens an answer, and only an answer is closed by a mark of its own."""

HOISTS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As DeepSeek: all system messages come first."""

DROPS = HOISTS.partition("{% endfor %}")[2]
"""System messages do not come at all."""


def message(role: str, content: str) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content}


def answered(template: ChatTemplate, messages: Messages, answer: str) -> TypedText:
    """What an agent holds after a `chat`."""
    prompt = template.render(messages)
    data = answer.encode()
    return TypedText(prompt.data + data, (*prompt.spans, Span("generated", len(data))))


def same(left: TypedText, right: TypedText) -> bool:
    """Equal bytes, and equal places of control text: what matching compares."""

    def control(text: TypedText) -> list[int]:
        return [span.kind == "control" for span in text.spans for _ in range(span.text_bytes)]

    return left.data == right.data and control(left) == control(right)


QUESTION, ANSWER = message("user", "a question"), message("assistant", "an answer")
ADDED = [message("user", "what Marco said"), message("assistant", "I see."), message("user", "and Danny")]


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TURNS, INST, HOISTS], ids=["chatml", "turns", "inst", "hoists"])
def test_messages_follow_as_chat_would_write_them(tiny_codec: TextCodec, source: str) -> None:
    """After an open answer, after a closed message, or alone: the text of the whole conversation, byte for byte."""
    template = ChatTemplate(source, tiny_codec)
    added = continuation(template, ADDED)
    assert same(added.after(TypedText(b"", ())), template.render(ADDED, add_generation_prompt=False))
    whole = template.render([QUESTION, ANSWER, *ADDED], add_generation_prompt=False)
    assert same(added.after(answered(template, [QUESTION], "an answer")), whole)
    closed = template.render([QUESTION, ANSWER], add_generation_prompt=False)
    assert same(added.after(closed), whole)
    # and again: a second injection behind the first
    more = [message("assistant", "Go on."), message("user", "more")]
    twice = template.render([QUESTION, ANSWER, *ADDED, *more], add_generation_prompt=False)
    assert same(continuation(template, more).after(whole), twice)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, HOISTS], ids=["chatml", "hoists"])
def test_an_answer_that_was_not_begun_is_taken_back(tiny_codec: TextCodec, source: str) -> None:
    """`chat` with `max_tokens` 0 opens an answer; a history has no such message."""
    template = ChatTemplate(source, tiny_codec)
    opened = template.render([QUESTION])
    expected = template.render([QUESTION, *ADDED], add_generation_prompt=False)
    assert same(continuation(template, ADDED).after(opened), expected)


def test_an_injected_answer_fills_the_one_that_was_opened(tiny_codec: TextCodec) -> None:
    """Somebody else's answer in the agent's place keeps the markup that opened it."""
    template = ChatTemplate(CHAT_TEMPLATE, tiny_codec)
    opened = template.render([QUESTION])
    whole = continuation(template, [ANSWER]).after(opened)
    assert same(whole, template.render([QUESTION, ANSWER], add_generation_prompt=False))
    assert whole.data.startswith(opened.data)


def test_a_content_that_was_cut_off_is_closed_first(tiny_codec: TextCodec) -> None:
    """A cancelled prefill or a rollback can end inside a message: the new ones never become part of it."""
    template = ChatTemplate(CHAT_TEMPLATE, tiny_codec)
    whole = template.render([QUESTION, ANSWER], add_generation_prompt=False)
    count = whole.data.index(b"question")
    cut = TypedText(whole.data[:count], tuple(cut_spans(whole.spans, count)))
    assert (
        continuation(template, ADDED).after(cut).data.startswith(whole.data[:count] + b"<|im_end|>\n<|im_start|>user")
    )


def test_typed_markup_is_no_conversation(tiny_codec: TextCodec) -> None:
    """Text that only looks like the template's is text: the messages stand behind it as a conversation of their own."""
    template = ChatTemplate(CHAT_TEMPLATE, tiny_codec)
    typed = b"<|im_start|>assistant\n"
    whole = continuation(template, ADDED).after(TypedText(typed, (Span("content", len(typed)),)))
    assert whole.data == typed + template.render(ADDED, add_generation_prompt=False).data
    assert whole.spans[0] == Span("content", len(typed))


NUDGE = message("system", "Stay on the topic.")


@pytest.mark.parametrize("source", [TURNS, HOISTS, DROPS], ids=["turns", "hoists", "drops"])
@pytest.mark.parametrize(
    "history",
    [
        [QUESTION, ANSWER, NUDGE, QUESTION],
        [QUESTION, NUDGE],
        [QUESTION, ANSWER, NUDGE],
        [QUESTION, NUDGE, ANSWER, QUESTION],
    ],
    ids=["before a question", "behind a question", "alone", "long ago"],
)
def test_a_nudge_stays_in_its_place(tiny_codec: TextCodec, source: str, history: Messages) -> None:
    """P13: a template that refuses, drops or hoists it gets it as user text; what came before it is unchanged."""
    template = ChatTemplate(source, tiny_codec)
    before = template.render(history[: history.index(NUDGE)], add_generation_prompt=False).data
    text = template.render(history).data
    assert text.count(b"Stay on the topic.") == 1
    common = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
    assert common >= before.rindex(b"a question" if history[1] is NUDGE else b"an answer") + 9
    # the next turn goes on from it
    after = template.render([*history, message("assistant", "so"), message("user", "on")]).data
    assert after.startswith(text)


def test_a_template_that_takes_nudges_gets_them_as_they_are(tiny_codec: TextCodec) -> None:
    """P13: ChatML writes a system message anywhere; nothing is joined."""
    text = ChatTemplate(CHAT_TEMPLATE, tiny_codec).render([QUESTION, ANSWER, NUDGE, QUESTION]).data
    assert b"<|im_start|>system\nStay on the topic.<|im_end|>\n<|im_start|>user\na question<|im_end|>" in text


def test_other_refusals_stay_refusals(tiny_codec: TextCodec) -> None:
    """Roles that do not take turns for another reason are refused in the template's words."""
    with pytest.raises(TemplateRefused, match="roles must take turns"):
        ChatTemplate(TURNS, tiny_codec).render([QUESTION, QUESTION, ANSWER, NUDGE])


def test_messages_that_cannot_begin_can_go_on(tiny_codec: TextCodec) -> None:
    """Where messages are refused is a matter of what the agent holds; what is refused everywhere is refused at once."""
    template = ChatTemplate(TURNS, tiny_codec)
    added = continuation(template, [ANSWER, QUESTION])
    with pytest.raises(TemplateRefused, match="roles must take turns"):
        added.after(TypedText(b"", ()))
    asked = template.render([QUESTION], add_generation_prompt=False)
    assert same(added.after(asked), template.render([QUESTION, ANSWER, QUESTION], add_generation_prompt=False))
    with pytest.raises(TemplateRefused, match="roles must take turns"):
        continuation(template, [QUESTION, QUESTION])
