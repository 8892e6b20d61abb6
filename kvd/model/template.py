"""Chat templates: from messages to typed text, where only what the template itself wrote is control.

Theory of operation. A Jinja template mixes its markup with what clients wrote, and its output alone does not tell
which is which. So the template is rendered with a unique sentinel (letters and digits only: it survives trimming,
escaping and case tests) in place of each message content, and the output is split at the sentinels: between them is
control text, and in their place comes the content, byte for byte as given, also where the template would have trimmed
it. JSON the template prints (`tojson`, tools and tool-call arguments) is content as well. Other strings of a client
(roles, names) stay readable for the template's own tests, unless they hold a letter that control tokens begin or end
with: then they too travel as sentinels. So nothing a client sends can become a control token.

A template that loses a sentinel (it edits or drops contents) is rendered again with the real contents, which are then
searched in the output; when even that fails, or would let client text pass as control, the request is refused with the
reason.

System messages in mid-conversation stay where they are. A template that refuses or drops them there, or hoists them to
the front, where a new one would change everything behind it, gets them as user messages: their texts are joined with
those of the user messages beside them, so that roles still take turns. Which kind a template is, is found by trying.

A template that knows nothing of tools gets them as text (`plain_tools`). Answers that the agent holds stand in the
conversation as the model wrote them (`recall`): the template gets them as plain contents, without calls and reasoning,
and where their markup opens reasoning, or leaves it out, it is made what it was when they were written.

Templates run in `template_sandbox`, which bounds their work. Rendering is for a worker thread: it may take seconds.
May import kvd.vm.text and this package.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from kvd.model.answers import AnswerFormat, find_reasoning
from kvd.model.errors import ModelCorrupt, TemplateRefused
from kvd.model.folder import read_object
from kvd.model.messages import Message, folded, name_results, normalise
from kvd.model.plain_tools import with_plain_tools
from kvd.model.recall import Generated
from kvd.model.rendering import Piece, Rendering, assembled, behind_openings
from kvd.model.stand_ins import in_place, is_stand_in, new_mark, stand_in
from kvd.model.template_sandbox import BoundedEnvironment, check_size
from kvd.model.tokenizer import TextCodec, token_text
from kvd.model.tool_calls import PLAIN_START, ToolDialect, find_dialect, plain_dialect
from kvd.vm.text import SpanKind, TypedText

_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt", "documents", "_kvd_sentinels"})
"""What a template finds beside the switches that a client may set."""

_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model writes, for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class fixes the type

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Parse to the tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Recalled(dict[str, Any]):
    """A message whose content is an answer as the model wrote it."""


class _Sentinels:
    """The strings of one rendering that stand for what a client wrote. Owner: that rendering."""

    def __init__(self) -> None:
        self._prefix = "Kv" + secrets.token_hex(12)  # fresh for each rendering: no client can guess it
        self._revealed: set[int] = set()
        self.pieces: list[Piece] = []

    def hide(self, text: str, kind: SpanKind | Literal["recalled"]) -> str:
        """A sentinel for `text`; empty text needs none."""
        if not text:
            return ""
        self.pieces.append((kind, text))
        return f"{self._prefix}N{len(self.pieces) - 1}E"

    def reveal(self, text: str) -> str:
        """`text` with the real strings in place of their sentinels, which then count as printed."""
        pieces, seen = self._split(text)
        self._revealed |= seen
        return "".join(piece for _, piece in pieces)

    def split(self, output: str, required: set[int]) -> list[Piece] | None:
        """The output as pieces; None when a required sentinel is missing or any was cut in pieces."""
        pieces, seen = self._split(output)
        broken = any(kind == "control" and self._prefix[:12] in text for kind, text in pieces)
        return None if broken or not required <= seen | self._revealed else pieces

    def _split(self, text: str) -> tuple[list[Piece], set[int]]:
        first, *rest = text.split(self._prefix + "N")
        pieces: list[Piece] = [("control", first)]
        seen: set[int] = set()
        characters = len(text)
        for part in rest:
            number, end, after = part.partition("E")
            if end and number.isdecimal() and int(number) < len(self.pieces):
                seen.add(int(number))
                characters += len(self.pieces[int(number)][1])
                check_size(characters)
                pieces += [self.pieces[int(number)], ("control", after)]
            else:
                pieces.append(("control", self._prefix + part))
        return pieces, seen


class ChatTemplate:
    """A model's chat template. Immutable.

    Args:
        source: the Jinja text.
        codec: says which strings could spell control tokens.
        tokens: values of `bos_token`, `eos_token` and their like for the template.
        tool_source: another template to use when tools are given.
        tool_parser: the parser of tool calls that the model's folder names; None to go by the template.

    Attributes:
        supports_tools: the template shows tools itself, and what it tells the model of calls can be read back.
        variables: switches it knows, such as `enable_thinking`.

    Raises:
        ModelCorrupt: the template is no valid Jinja.
    """

    def __init__(
        self,
        source: str,
        codec: TextCodec,
        *,
        tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        tool_parser: str | None = None,
    ) -> None:
        self.source = source
        self._codec = codec
        self._tokens = dict(tokens or {})
        self._environment = _environment()
        self._tool_source = source if tool_source is None else tool_source
        self._plain = self._environment.template(source)
        self._with_tools = self._environment.template(self._tool_source)
        self._tool_parser = tool_parser
        tree = self._environment.parse(self._tool_source)
        asked = jinja2.meta.find_undeclared_variables(tree)
        # a form that nobody can read is of no use: such a model is told of another one, in text
        self.supports_tools = "tools" in asked and (PLAIN_START in self._tool_source or self._dialect is not None)
        known = _OWN_VARIABLES | self._environment.globals.keys() | set(_TOKEN_NAMES) | _own_names(tree)
        self.variables = tuple(sorted(asked - known))

    @classmethod
    def from_folder(cls, folder: Path, codec: TextCodec) -> ChatTemplate | None:
        """The template of a model folder: `chat_template.jinja`, else the entry of `tokenizer_config.json`.

        Returns:
            None when the model has none (a base model).

        Raises:
            ModelCorrupt: a file that should hold it cannot be read, or the template is no valid Jinja.
        """
        path = folder / "tokenizer_config.json"
        settings = read_object(path) if path.is_file() else {}
        template, tool_source = _stored_template(folder, settings), None
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template if _is_named(entry)}
            template, tool_source = named.get("default"), named.get("tool_use")
        if not isinstance(template, str) or not template.strip():
            return None
        tokens = {name: value for name in _TOKEN_NAMES if (value := token_text(settings.get(name))) is not None}
        parser = settings.get("tool_parser_type")
        tool_parser = parser if isinstance(parser, str) else None
        return cls(template, codec, tokens=tokens, tool_source=tool_source, tool_parser=tool_parser)

    @functools.cached_property
    def answers(self) -> AnswerFormat:
        """How the model marks the parts of an answer. The first use may import a parser: not for the event loop."""
        dialect = self._dialect if self.supports_tools else None
        return AnswerFormat(find_reasoning(self._tool_source, self._codec), dialect or plain_dialect())

    @functools.cached_property
    def _dialect(self) -> ToolDialect | None:
        return find_dialect(self._tool_source, self._codec.vocabulary, self._tool_parser)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> TypedText:
        """Typed text of a conversation.

        Args:
            messages: objects with `role` and `content` (text, a list of text parts, or None beside tool calls);
                contents of `assistant` messages are of kind `generated`, all others `content`.
            tools: tool definitions in the OpenAI form.
            add_generation_prompt: end with the markup that opens the assistant's answer.
            variables: further switches the template knows, such as `enable_thinking`.

        Returns:
            Text whose adjacent spans differ in kind.

        Raises:
            InvalidParams: a message is no message.
            InvalidText: lone surrogates.
            UnsupportedFeature: parts that are not text.
            TemplateRefused: the template raised, does too much, or loses what it is given.
        """
        context = {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        return self._rendered(messages, context | dict(variables or {}), {}).typed

    def render_recalled(
        self,
        messages: Sequence[Message],
        recalled: Mapping[int, Generated],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """A conversation with answers as the model wrote them, up to where it answers next.

        Args:
            messages: as for `render`.
            recalled: by index of the message, in order. A template that takes them in no form gets the messages.
            tools: as for `render`.
            variables: as for `render`.

        Raises:
            InvalidParams, InvalidText, UnsupportedFeature, TemplateRefused: as `render`.
        """
        context = {"tools": list(tools) if tools else None, "add_generation_prompt": True}
        return self._rendered(messages, context | dict(variables or {}), recalled)

    def _rendered(
        self, messages: Sequence[Message], context: Mapping[str, Any], recalled: Mapping[int, Generated]
    ) -> Rendering:
        try:
            if recalled:
                for as_calls in (False, True):
                    with contextlib.suppress(TemplateRefused):  # it wants to see calls
                        return self._render(messages, context, recalled, as_calls=as_calls)
            return self._render(messages, context, {})
        except RecursionError:
            raise TemplateRefused("the messages, or the chat template's calls, are nested too deep") from None

    def _render(
        self,
        messages: Sequence[Message],
        context: Mapping[str, Any],
        recalled: Mapping[int, Generated],
        *,
        as_calls: bool = False,
    ) -> Rendering:
        plain = [normalise(message, index) for index, message in enumerate(messages)]
        name_results(plain)
        if "developer" not in self._tool_source:
            plain = [{**each, "role": "system"} if each["role"] == "developer" else each for each in plain]
        marks: dict[str, Generated] = {}
        for index, answer in recalled.items():
            if as_calls and plain[index].get("tool_calls"):
                mark = new_mark()
                marks[mark] = answer
                plain[index] = stand_in(plain[index], mark)
            else:
                plain[index] = _Recalled(role="assistant", content=answer.text)
        if not self.supports_tools:
            takes_system = not context["tools"] or self._takes_system
            plain = with_plain_tools(plain, context["tools"], takes_system=takes_system)
            context = {**context, "tools": None}
        if any(message["role"] == "system" for message in plain[1:]) and not self._takes_nudges:
            plain = folded(plain)
        pieces = self._pieces(plain, context)
        if marks:
            pieces = in_place(pieces, marks, self._closing)
        return assembled(behind_openings(pieces, recalled, self.answers) if recalled else pieces, recalled)

    @functools.cached_property
    def _closing(self) -> str:
        """Markup that closes an answer; empty where there is none."""
        texts = ("Kv" + secrets.token_hex(12), "Kv" + secrets.token_hex(12))
        probe = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        pieces = self._pieces(probe, {"tools": None, "add_generation_prompt": False})
        return pieces[-1][1] if pieces[-1][0] == "control" else ""

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Whether the template knows system messages at all."""
        try:
            probe = [{"role": role, "content": role} for role in ("system", "user")]
            return _in_order(probe, self._pieces(probe, {"tools": None, "add_generation_prompt": False}))
        except (TemplateRefused, RecursionError):
            return False

    @functools.cached_property
    def _takes_nudges(self) -> bool:
        """Whether the template leaves a system message wherever it stands in a conversation.

        Asked of the template, not of one conversation: a template may take one in some places only, and what a message
        becomes must not change when the conversation goes on.
        """
        question, answer, nudge = ({"role": role, "content": role} for role in ("user", "assistant", "system"))
        try:
            return all(
                _in_order(probe, self._pieces(probe, {"tools": None, "add_generation_prompt": False}))
                for probe in ([question, answer, nudge, question], [question, nudge, answer, question])
            )
        except (TemplateRefused, RecursionError):
            return False

    def _pieces(self, messages: Sequence[dict[str, Any]], context: Mapping[str, Any]) -> list[Piece]:
        try:
            pieces = self._render_hidden(messages, context)
            return self._render_and_search(messages, context) if pieces is None else pieces
        except TemplateRefused:
            if all(message["content"] is not None for message in messages):
                raise
        # some templates tell calls by a content of null, others fail on one
        told = [message if message["content"] is not None else {**message, "content": ""} for message in messages]
        return self._pieces(told, context)

    def _render_hidden(self, messages: Sequence[dict[str, Any]], context: Mapping[str, Any]) -> list[Piece] | None:
        """Render with sentinels; None when a message content did not come back."""
        sentinels = _Sentinels()

        def guard(value: object) -> object:
            """Client strings that could take part in spelling a control token, hidden; all else as it is."""
            if isinstance(value, str):
                return sentinels.hide(value, "content") if self._codec.may_spell_control(value) else value
            if isinstance(value, Mapping):
                return {guard(key): guard(item) for key, item in value.items()}
            return [guard(item) for item in value] if isinstance(value, list | tuple) else value

        contents: set[int] = set()
        hidden: list[dict[str, Any]] = []
        for message in messages:
            kept = {key: guard(value) for key, value in message.items() if key != "content"}
            content: str | None = message["content"]
            if content:
                contents.add(len(sentinels.pieces))
                content = sentinels.hide(content, _kind(message))
            hidden.append({**kept, "content": content})
        guarded = {key: guard(value) for key, value in context.items()}
        output = self._run(hidden, guarded, sentinels)
        return sentinels.split(output, contents)

    def _render_and_search(self, messages: Sequence[dict[str, Any]], context: Mapping[str, Any]) -> list[Piece]:
        """Render with the real contents and find them in the output, in order."""
        if any(self._codec.may_spell_control(text) for text in _strings([*messages, context])):
            raise TemplateRefused(
                "the chat template changes or drops message contents, and the request holds characters that control "
                "tokens are made of; use a template that prints contents unchanged"
            )
        sentinels = _Sentinels()
        output = sentinels.reveal(self._run(messages, context, sentinels))
        pieces: list[Piece] = []
        start = 0
        for index, message in enumerate(messages):
            content: str = message["content"] or ""
            text = next((text for text in (content, content.strip()) if output.find(text, start) >= 0), None)
            if text is None:
                raise TemplateRefused(f"the chat template does not print the content of message {index}", index=index)
            at = output.find(text, start)
            pieces += [("control", output[start:at]), (_kind(message), text)]
            start = at + len(text)
        return [*pieces, ("control", output[start:])]

    def _run(self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any], sentinels: _Sentinels) -> str:
        template = self._with_tools if context["tools"] else self._plain
        try:
            # `_kvd_sentinels` is how the tojson filter finds the rendering it belongs to.
            given = {**self._tokens, **context, "messages": messages, "_kvd_sentinels": sentinels}
            return self._environment.render(template, given)
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template refuses the messages: {error.message or error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
            raise TemplateRefused(
                f"the chat template fails on the messages: {str(error) or type(error).__name__}"
            ) from None


def check_template(source: str) -> None:
    """Refuse a chat template that could not be loaded.

    Raises:
        ModelCorrupt: it is no valid Jinja.
    """
    _environment().template(source)


def _environment() -> BoundedEnvironment:
    """What every model's template finds."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


def _own_names(tree: jinja2.nodes.Template) -> set[str]:
    """Names that a template sets for itself, and does not ask whether they were given."""
    names = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
    asked = {test.node.name for test in tree.find_all(jinja2.nodes.Test) if isinstance(test.node, jinja2.nodes.Name)}
    return names - asked


def _in_order(messages: Sequence[dict[str, Any]], pieces: Sequence[Piece]) -> bool:
    """Whether the contents of messages come in the order of the messages."""
    printed = iter(text.strip() for kind, text in pieces if kind != "control")
    return all(
        message["content"].strip() in printed for message in messages if message["content"]
    )  # each search goes on


def _strings(value: object) -> Iterator[str]:
    """All strings inside plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _kind(message: Mapping[str, Any]) -> SpanKind | Literal["recalled"]:
    if isinstance(message, _Recalled):
        return "recalled"
    return "generated" if message["role"] == "assistant" else "content"


def _stored_template(folder: Path, settings: Mapping[str, Any]) -> object:
    """What a model folder keeps as its template; a file of its own wins over the tokenizer's configuration."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelCorrupt(f"{jinja} cannot be read: {error}", file=str(jinja)) from None
    alone = folder / "chat_template.json"
    return read_object(alone).get("chat_template") if alone.is_file() else settings.get("chat_template")


def _is_named(entry: object) -> bool:
    """Whether an entry of a list of templates has a name and a text."""
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


@jinja2.pass_context
def _tojson(context: jinja2.runtime.Context, value: object, indent: int | None = None, **options: Any) -> str:  # noqa: ANN401
    """JSON as model templates expect it: no HTML escapes, no ASCII escapes; hidden as one piece of content."""
    sentinels = context.resolve("_kvd_sentinels")
    if not isinstance(sentinels, _Sentinels):
        raise jinja2.TemplateError("tojson is used outside a rendering")
    settings = {"ensure_ascii": False, **options}
    written = json.dumps(_revealed(value, sentinels), indent=indent, **settings)
    return written if is_stand_in(written) else sentinels.hide(written, "content")


def _revealed(value: object, sentinels: _Sentinels) -> object:
    """`value` with the real strings in place of sentinels."""
    if isinstance(value, str):
        return sentinels.reveal(value)
    if isinstance(value, Mapping):
        return {_revealed(key, sentinels): _revealed(item, sentinels) for key, item in value.items()}
    return [_revealed(item, sentinels) for item in value] if isinstance(value, list | tuple) else value


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
