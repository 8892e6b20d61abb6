"""A `chat` call between its parameters and its turn: the prompt, the mask, and typed events of what is generated.

Theory of operation. What a call needs of the model's template and vocabulary is made in a worker thread (`prepare`):
the conversation is rendered, with answers as the agent holds them (`history`), and where the answer must have a
form, its grammar is compiled. The turn runs on the engine as any other; it gives out text and, where the model marks
the parts of an answer by control tokens, their names. On the event loop `AnswerStream` makes typed events of both, and
of the whole the message that the client sends back with its next call.

May import kvd.ids, kvd.model, kvd.vm.text and siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.errors import InvalidParams
from kvd.model.answers import AnswerFormat, AnswerReader
from kvd.model.grammar import GrammarCompiler
from kvd.model.grammar_text import CallChoice, answer_grammar
from kvd.model.recall import HeldText, needs_tokens
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.core import EngineCore
from kvd.scheduler.history import render_history
from kvd.scheduler.params import Params
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.sampling import LogitsHook
from kvd.vm.text import TypedText

Emit = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a turn is made of.

    Attributes:
        prompt: the agent's whole text.
        hooks: the mask that holds the answer to its form, if it must have one.
        reader: takes the answer apart; None for `generate`.
        tells_control: the reader needs the names of control tokens.
    """

    prompt: TypedText
    hooks: tuple[LogitsHook, ...] = ()
    reader: AnswerReader | None = None
    tells_control: bool = False


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A `chat` call whose parameters are checked, but for what only the model's template can tell.

    Attributes:
        messages: the conversation.
        tools: functions the model may call; None for none.
        choice: whether it may, must, or must not.
        schema: JSON schema of the answer; None for text.
        variables: switches for the template.
    """

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    choice: CallChoice
    schema: Mapping[str, object] | None
    variables: Mapping[str, object]

    @classmethod
    def of(cls, params: Params) -> ChatCall:
        """Read a call's parameters.

        Raises:
            InvalidParams, InvalidText: naming the parameter, the place inside and what is allowed.
        """
        messages, tools = params.messages(), params.tools()
        choice, schema = params.call_choice(tools), params.response_schema()
        return cls(messages, tools, choice, schema, params.template_variables())

    @property
    def has_history(self) -> bool:
        """Whether the agent may hold messages of it as a model wrote them."""
        return any(message["role"] == "assistant" for message in self.messages)

    def prepare(
        self, template: ChatTemplate, codec: TextCodec, compiler: GrammarCompiler, held: Sequence[HeldText]
    ) -> Prepared:
        """Render, recall and compile. For a worker thread.

        Raises:
            InvalidParams, UnsupportedFeature, TemplateRefused: as `render_history`, `answer_grammar` and
                `GrammarCompiler.compile`.
        """
        unknown = sorted(self.variables.keys() - set(template.variables))
        if unknown:
            raise InvalidParams(
                f"the model's chat template does not know {', '.join(unknown)}; "
                f"it knows {', '.join(template.variables) or 'no switches'}",
                parameter="chat_template_kwargs",
                allowed=list(template.variables),
            )
        answers = template.answers
        prompt = render_history(template, codec, self.messages, held, tools=self.tools, variables=self.variables)
        opening = _opening(prompt)
        reads_calls = self.tools is not None and self.choice.rule != "none"
        return Prepared(
            prompt,
            self._mask(answers, codec, compiler, opening),
            AnswerReader(answers, codec, opening=opening, reads_calls=reads_calls, tools=self.tools),
            needs_tokens(answers, codec),
        )

    def _mask(
        self, answers: AnswerFormat, codec: TextCodec, compiler: GrammarCompiler, opening: str
    ) -> tuple[LogitsHook, ...]:
        """What holds the answer to its form; nothing when any text will do."""
        for is_loose in (False, True):
            grammar = answer_grammar(
                answers,
                codec,
                schema=self.schema,
                tools=self.tools,
                choice=self.choice,
                opening=opening,
                is_loose=is_loose,
            )
            if grammar is None:
                break
            try:
                return (compiler.compile(grammar, parameter="tools" if self.schema is None else "response_format"),)
            except InvalidParams:
                if is_loose or self.tools is None:
                    raise
        return ()


def _opening(prompt: TypedText) -> str:
    """The control text that a prompt ends with."""
    last = prompt.spans[-1] if prompt.spans else None
    if last is None or last.kind != "control":
        return ""
    return prompt.data[-last.text_bytes :].decode(errors="replace")


class AnswerStream:
    """Typed events of a turn's raw ones. Owner: the event loop.

    Args:
        reader: takes the answer apart.
        emit: takes events.
    """

    def __init__(self, reader: AnswerReader, emit: Emit) -> None:
        self._reader = reader
        self._emit = emit
        self._ended = False

    def __call__(self, event: Mapping[str, object]) -> None:
        """Take an event of the turn; what is no text goes on as it is."""
        kind = event["type"]
        if kind == "text":
            self._send(self._reader.feed(str(event["text"])))
        elif kind == "control":
            self._send(self._reader.feed_control(str(event["text"])))
        else:
            if kind == "usage":  # no text comes after it
                self._end()
            self._emit(event)

    def complete(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The turn's result with the answer as a message."""
        self._end()
        answer = self._reader.answer
        finish = result["finish_reason"]
        if finish == "stop" and answer.calls:
            finish = "tool_calls"
        return {**result, "message": answer.message(), "finish_reason": finish}

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._send(self._reader.end())

    def _send(self, events: Sequence[Mapping[str, object]]) -> None:
        for event in events:
            self._emit(event)


def held_texts(core: EngineCore, ref: AgentRef, *, with_tokens: bool) -> list[HeldText] | None:
    """What an agent's branches hold, the present one first; nothing of an agent that there is not. On the engine.

    Returns:
        None while the agent sleeps or is only in the warm tier: who uses it reads or imports it first.
    """
    if ref in core.agents.asleep:
        return None
    agent = core.agents.find(ref)
    if agent is None:
        return None if ref in core.warm.paths else []
    branches = sorted(agent.branches.values(), key=lambda branch: branch.branch_id != agent.current)
    return [
        HeldText(
            branch.typed,
            tuple(branch.tokens) if with_tokens else (),
            tuple(branch.token_bytes) if with_tokens else (),
        )
        for branch in branches
    ]
