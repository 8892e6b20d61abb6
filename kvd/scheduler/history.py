"""A conversation as an agent's next prompt, with answers as the agent wrote them where it holds all before them.

Theory of operation. An answer may stand as the model wrote it, hidden reasoning included, in one place only: behind the
very text it was written behind. Equal meaning is not enough. Short answers ("Done.") are alike, clients compact and
edit what they send, and the reasoning of one turn must not appear in another. So what fits by meaning is only a guess.
The conversation is rendered with it, and the prompt is laid beside the branch that the guess is from: an answer is
taken when both are the same, byte for byte and kind for kind, from their first byte to the answer's last. Where a
guess stands in another place, the text that the branch has in that place is tried; where prompt and branch part, the
answers behind it are the template's. Nothing is lost by that: what is behind a divergence is computed anew anyway.

System messages in the middle, results of tools, injected messages, what a template prints of tools or makes of a first
message need no rules of their own: all are part of the text compared. Of several branches the one that the prompt goes
along with furthest has the say; the present one where that is several.

An ordinary turn is rendered once. Others are rendered a few times, at most `MAX_RENDERINGS` for each branch.

May import kvd.model, kvd.vm.prefix and kvd.vm.text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvd.model.recall import Generated, HeldText, Meanings, generated_texts
from kvd.model.rendering import Rendering
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.vm.prefix import typed_prefix_bytes
from kvd.vm.text import TypedText

MAX_RENDERINGS: Final = 8
"""Of one branch: after so many, nothing of it is recalled."""


def render_history(
    template: ChatTemplate,
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    held: Sequence[HeldText],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> TypedText:
    """Typed text of a conversation that goes on from what an agent holds. For a worker thread.

    Args:
        template: of the model.
        codec: its vocabulary.
        messages: the conversation.
        held: the agent's branches, the present one first.
        tools: as `ChatTemplate.render`.
        variables: as `ChatTemplate.render`.

    Raises:
        InvalidParams, InvalidText, UnsupportedFeature, TemplateRefused: as `ChatTemplate.render`.
    """
    history = _History(template, codec, messages, tools, variables)
    best, furthest = history.render({}) if not (held and history.answers) else None, -1
    for branch in held if history.answers else ():
        if len(branch.typed.data) <= furthest:
            continue
        recalled = history.recalled(branch)
        rendering = history.render(recalled)
        agreed = typed_prefix_bytes(branch.typed, rendering.typed)
        if agreed > furthest:
            best, furthest = rendering, agreed
        if len(recalled) == len(history.answers):
            break
    return (best or history.render({})).typed


class _History:
    """One conversation while it is rendered. Owner: `render_history`.

    Attributes:
        answers: indexes of its assistant messages.
    """

    def __init__(
        self,
        template: ChatTemplate,
        codec: TextCodec,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> None:
        self._template, self._codec = template, codec
        self._messages, self._tools, self._variables = messages, tools, variables
        self.answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        self._meanings = Meanings(template.answers, codec, tools) if self.answers else None
        self._renderings: dict[tuple[tuple[int, str, str], ...], Rendering] = {}

    def render(self, recalled: Mapping[int, Generated]) -> Rendering:
        """The conversation with these answers; rendered once however often it is asked for."""
        key = tuple((index, text.opening, text.text) for index, text in recalled.items())
        if key not in self._renderings:
            self._renderings[key] = self._template.render_recalled(
                self._messages, recalled, tools=self._tools, variables=self._variables
            )
        return self._renderings[key]

    def recalled(self, branch: HeldText) -> dict[int, Generated]:
        """The answers that stand in the conversation as in the branch, by index of the message, in order."""
        texts = list(generated_texts(branch, self._codec))
        chosen = self._fitting(texts, after_message=-1, after_border=-1)
        for _ in range(MAX_RENDERINGS):
            rendering = self.render(chosen)
            agreed = typed_prefix_bytes(branch.typed, rendering.typed)
            wrong = next((index for index, text in chosen.items() if not _stands(text, rendering, index, agreed)), None)
            if wrong is None:
                return chosen
            place = rendering.places.get(wrong)
            tried = chosen[wrong]
            chosen = {index: text for index, text in chosen.items() if index < wrong}
            if place is None or agreed < place.border:  # they part before it
                continue
            there = next((text for text in texts if text.border == place.border), None)
            if there is not None and there != tried and self._says(there, wrong):
                chosen[wrong] = there
            chosen |= self._fitting(texts, after_message=wrong, after_border=place.border)
        return {}

    def _fitting(self, texts: Sequence[Generated], *, after_message: int, after_border: int) -> dict[int, Generated]:
        """For each answer behind a message the first text behind a place that says the same, in order."""
        found: dict[int, Generated] = {}
        rest = [text for text in texts if text.border > after_border]
        at = 0
        for index in self.answers:
            if index > after_message:
                number = next((n for n in range(at, len(rest)) if self._says(rest[n], index)), None)
                if number is not None:
                    found[index], at = rest[number], number + 1
        return found

    def _says(self, text: Generated, index: int) -> bool:
        return self._meanings is not None and self._meanings.is_equal(text, self._messages[index])


def _stands(text: Generated, rendering: Rendering, index: int, agreed: int) -> bool:
    """Whether an answer has its place of the branch, and all before it and it itself are the branch's."""
    place = rendering.places.get(index)
    return place is not None and place.start == text.start and agreed >= text.start + len(text.text.encode())
