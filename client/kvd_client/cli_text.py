"""Commands that make or take text: generate, chat, inject, tokenize."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click

from kvd_client.calls import ChatOptions, InjectOptions, Options
from kvd_client.cli_common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    F,
    Session,
    is_terminal,
    print_json,
    print_lines,
    report,
    with_session,
    write_text,
)
from kvd_client.cli_completion import complete_agents
from kvd_client.cli_show import seconds
from kvd_client.cli_wait import waiting
from kvd_client.cli_words import command_words
from kvd_client.client import GenerateStream
from kvd_client.errors import KvdClientError
from kvd_client.logprobs import TokenLogprob
from kvd_client.results import GenerateResult, InjectResult
from kvd_client.stream import Reasoning, StreamEvent, Text, ToolCall

T = TypeVar("T")

END_FIELDS = (
    "text",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "match",
    "match_reason",
    "ttft_s",
    "durable",
    "agent",
    "context_full",
)
"""What `generate --json` and `chat --json` print, in this order; then `message` of `chat`, then `logprobs`."""


def sampling_options(command: F) -> F:
    """Add the options of `generate` and `chat`; those that are not given have the daemon's defaults."""
    options: tuple[Callable[[F], F], ...] = (
        click.option("--no-stream", is_flag=True, help="Print the text when it is complete, not as it is made."),
        click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; may be repeated."),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Makes sampling repeatable."),
        click.option(
            "--logprobs",
            type=click.IntRange(0, 20),
            help="Print each token's log-probability, and those of so many of the most likely tokens.",
        ),
        click.option("--repetition-penalty", type=click.FloatRange(0.01, 100), help="1 is off [default: 1]."),
        click.option(
            "--min-p", type=click.FloatRange(0, 1, max_open=True), help="Least probability relative to the best."
        ),
        click.option("--top-k", type=click.IntRange(0, 2**63 - 1), help="Keep the most likely tokens; 0 keeps all."),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling [default: 1, off]."),
        click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy [default: 0]."),
        click.option(
            "--on-context-full",
            type=click.Choice(["error", "stop"]),
            help="What to do when the model's context has no room for --max-tokens: refuse, or end there "
            "[default: error].",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(0, 1_000_000, min_open=True),
            help="Seconds after which the daemon cancels the call and keeps what it computed.",
        ),
        click.option(
            "--priority",
            type=click.Choice(["interactive", "background"]),
            help="Background starts when nothing interactive waits [default: interactive].",
        ),
        click.option(
            "--response-format",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False),
            help='JSON: the form of the answer, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"schema": ...}}.',
        ),
        click.option("--max-tokens", type=click.IntRange(0, 1_000_000), help="Most new tokens [default: 256]."),
    )
    for option in options:
        command = option(command)
    return command


def source_options(command: F) -> F:
    """Add the ways to give a text: --text, --file and the argument `-`."""
    options: tuple[Callable[[F], F], ...] = (
        click.option("--file", "file", type=click.Path(exists=True, dir_okay=False), help="Read the text from a file."),
        click.option("--text", "text", help="The text."),
        click.argument("source", required=False, metavar="[-]"),
    )
    for option in options:
        command = option(command)
    return command


def read_source(source: str | None, text: str | None, file: str | None) -> str:
    """The one text that was given, its bytes unchanged.

    Raises:
        click.UsageError: none or several were given, or the bytes are not UTF-8.
    """
    if source not in (None, "-"):
        raise click.UsageError(f"unexpected argument {source!r}; the text is given by --text, --file or - (stdin)")
    if sum(given is not None for given in (source, text, file)) != 1:
        raise click.UsageError("give the text exactly once: by --text T, by --file F, or by - for stdin")
    if text is not None:
        data, name = text.encode("utf-8", "surrogateescape"), "--text"
    elif file is not None:
        data, name = Path(file).read_bytes(), file
    else:
        data, name = _read_stdin(), "stdin"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise click.UsageError(f"{name} is not UTF-8: byte 0x{byte:02x} at offset {error.start}") from error


def _read_stdin() -> bytes:
    """All of stdin; on a terminal it is said that this is what is waited for."""
    if sys.stdin.isatty():
        click.echo("reading the text from standard input; end it with Ctrl-D", err=True)
    try:
        return sys.stdin.buffer.read()
    except KeyboardInterrupt:  # here, because no call runs yet that could be said to be cancelled
        report("interrupted; nothing was sent")
        raise SystemExit(EXIT_INTERRUPTED) from None


def read_json(file: str, kind: type[T], words: str) -> T:
    """What a file of JSON holds.

    Raises:
        click.UsageError: it is not JSON, or not what it must hold.
    """
    try:
        loaded = json.loads(Path(file).read_bytes())
    except ValueError as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(loaded, kind):
        raise click.UsageError(f"{file} must hold {words}")
    return loaded


def read_messages(messages: tuple[str, ...], system: str | None, file: str | None) -> list[dict[str, Any]]:
    """The conversation: the system text, the messages of the file, then one user message for each --message.

    Raises:
        click.UsageError: there is none, or the file is not a JSON list of messages.
    """
    found: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if file is not None:
        wanted = 'a list of messages, each {"role": ..., "content": ...}'
        loaded = read_json(file, list, wanted)
        if not all(isinstance(one, dict) and "role" in one for one in loaded):
            raise click.UsageError(f"{file} must hold {wanted}")
        found += loaded
    elif not messages:
        raise click.UsageError("give at least one --message or a --messages-file")
    return found + [{"role": "user", "content": message} for message in messages]


def run_stream(session: Session, begin: Callable[[], GenerateStream], *, no_stream: bool) -> None:
    """Print a generation: one JSON object at its end, or the text as it is made and a summary on stderr."""
    shown = Shown()
    try:
        with waiting(as_json=session.json) as news, begin() as stream:
            for event in stream:
                news.see(event)
                if not session.json and not no_stream:
                    shown.see(event)
            result = stream.result
    except (KvdClientError, KeyboardInterrupt):  # their line on stderr must not go on where the text stopped
        _end_line(shown.last)
        raise
    if session.json:
        end = {name: getattr(result, name) for name in END_FIELDS}
        if result.message is not None:
            end["message"] = result.message
        if result.logprobs is not None:
            end["logprobs"] = [each.plain() for each in result.logprobs]
        print_json(end)
        return
    if no_stream:
        shown.write(answer_text(result))
    _end_line(shown.last)
    click.echo(summary(result), err=True)
    for each in result.logprobs or ():
        click.echo(logprob_line(each), err=True)


class Shown:
    """What of an answer is printed. Owner: one command.

    Attributes:
        last: the latest piece; it is noted first, since Ctrl-C may come before or after it is written.
    """

    def __init__(self) -> None:
        self.last = ""

    def write(self, text: str) -> None:
        """Print on stdout."""
        self.last = text or self.last
        write_text(text)

    def see(self, event: StreamEvent) -> None:
        """Print what an event says of the answer."""
        if isinstance(event, Text):
            self.write(event.text)
        elif isinstance(event, Reasoning):
            click.echo(event.text, err=True, nl=False)
        elif isinstance(event, ToolCall):
            begin = "\n" if self.last and not self.last.endswith("\n") else ""
            self.write(begin + call_line(str(event.data.get("name")), str(event.data.get("arguments"))))


def call_line(name: str, arguments: str) -> str:
    """A call of a tool, for people."""
    return f"{name}({arguments})\n"


def answer_text(result: GenerateResult) -> str:
    """All that is printed of an answer."""
    if result.message is None:
        return result.text
    text = result.message.get("content") or ""
    calls = [call["function"] for call in result.message.get("tool_calls") or ()]
    lines = "".join(call_line(call["name"], call["arguments"]) for call in calls)
    return f"{text}\n{lines}" if text and lines and not text.endswith("\n") else text + lines


def logprob_line(token: TokenLogprob) -> str:
    """One line about a token: its log-probability, its text, and what was most likely in its place."""
    others = "  ".join(f"{each.token!r} {each.logprob:.3f}" for each in token.top_logprobs)
    return f"{token.logprob:9.3f}  {token.token!r:<16} {others}".rstrip()


def _end_line(shown: str) -> None:
    """End the line of a printed text: in a pipe or file by stderr, so that stdout stays the text, byte for byte."""
    if shown and not shown.endswith("\n"):
        click.echo(err=not is_terminal())


def summary(result: GenerateResult) -> str:
    """One line about a generation."""
    ttft = "" if result.ttft_s is None else f", first token after {result.ttft_s:.3f} s"
    match = f"{result.match} ({result.match_reason})" if result.match_reason else result.match
    durable = "durable" if result.durable else f"NOT durable ({result.durable_reason or 'no reason given'})"
    finish = f"{result.finish_reason} (context full)" if result.context_full else result.finish_reason
    return (
        f"[{result.agent}: {result.completion_tokens} tokens, {finish}; prompt {result.prompt_tokens} "
        f"tokens, {result.cached_tokens} reused, match {match}{ttft}; {durable}]"
    )


def _options(given: dict[str, Any]) -> Options:
    """Options that were given; `stop` is many, `response_format` a file."""
    if given.get("response_format") is not None:
        given["response_format"] = read_json(given["response_format"], dict, 'a map such as {"type": "json_object"}')
    chosen = {key: value for key, value in given.items() if value is not None and value != ()}
    return cast(Options, chosen)


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@source_options
@sampling_options
@with_session
def generate(
    session: Session,
    /,
    agent: str,
    source: str | None,
    text: str | None,
    file: str | None,
    no_stream: bool,
    **sampling: Any,  # noqa: ANN401  (click's parameters)
) -> None:
    """Continue AGENT's text.

    The text is the agent's whole text so far, its bytes unchanged: what the agent has already is not computed again.
    Give it by --text, by --file, or by `-` for stdin. The new text is printed as it is made; with --json one object is
    printed at the end and nothing else. While a long text is computed, stderr says how far it is.

    Example: kvd-client generate alice --text "Once upon a time" --max-tokens 40 --json
    """
    prompt = read_source(source, text, file)
    options = _options({**sampling, "stream": not no_stream})
    run_stream(session, lambda: session.client.generate_stream(agent, prompt, **options), no_stream=no_stream)


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@click.option("--message", "messages", metavar="TEXT", multiple=True, help="A user message; may be repeated.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--messages-file",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON list of the conversation so far, before --message.",
)
@click.option(
    "--tools",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help='JSON list of functions the model may call: {"type": "function", "function": {"name": ..., ...}}.',
)
@click.option(
    "--tool-choice",
    metavar="auto|none|required|NAME",
    help="Whether the model may, must not or must call, or the function that it must call [default: auto].",
)
@click.option("--one-tool-call", is_flag=True, help="At most one call in an answer.")
@click.option(
    "--template-option",
    "template_options",
    metavar="NAME=VALUE",
    multiple=True,
    help="A switch of the model's template, such as enable_thinking=false; may be repeated.",
)
@sampling_options
@with_session
def chat(
    session: Session,
    /,
    agent: str,
    messages: tuple[str, ...],
    system: str | None,
    messages_file: str | None,
    tools: str | None,
    tool_choice: str | None,
    one_tool_call: bool,
    template_options: tuple[str, ...],
    no_stream: bool,
    **sampling: Any,  # noqa: ANN401  (click's parameters)
) -> None:
    """Answer the last message of AGENT's conversation.

    The conversation is whole each time: the system message, what --messages-file holds, then each --message as a user
    message. Output is as of `generate`; a call of a tool is printed as NAME(ARGUMENTS), reasoning on stderr. With
    --json, `message` is the answer as the conversation's next message.

    Example: kvd-client chat alice --system "Be brief." --message "What is a page table?"
    """
    conversation = read_messages(messages, system, messages_file)
    given = {**sampling, "stream": not no_stream}
    if tools is not None:
        given["tools"] = read_json(tools, list, "a list of functions")
    if tool_choice is not None:
        is_rule = tool_choice in ("auto", "none", "required")
        given["tool_choice"] = tool_choice if is_rule else {"type": "function", "function": {"name": tool_choice}}
    if one_tool_call:
        given["parallel_tool_calls"] = False
    if template_options:
        given["chat_template_kwargs"] = dict(map(_switch, template_options))
    options = cast(ChatOptions, _options(given))
    run_stream(session, lambda: session.client.chat_stream(agent, conversation, **options), no_stream=no_stream)


def _switch(text: str) -> tuple[str, object]:
    """Name and value of a template's switch; a value that is no JSON is text."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise click.UsageError(f"--template-option takes NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@click.command()
@click.argument("agents", nargs=-1, required=True, metavar="AGENT... [-]", shell_complete=complete_agents)
@click.option("--message", "messages", metavar="TEXT", multiple=True, help="A user message; may be repeated.")
@click.option(
    "--messages-file",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON list of messages, before --message.",
)
@click.option("--file", "file", type=click.Path(exists=True, dir_okay=False), help="Read the text from a file.")
@click.option("--text", "text", help="The text.")
@click.option(
    "--priority",
    type=click.Choice(["interactive", "background"]),
    help="Background starts when nothing interactive waits [default: background].",
)
@with_session
def inject(
    session: Session,
    /,
    agents: tuple[str, ...],
    messages: tuple[str, ...],
    messages_file: str | None,
    text: str | None,
    file: str | None,
    priority: Literal["interactive", "background"] | None,
) -> None:
    """Append text, or messages, to each AGENT and compute it without generating.

    Give exactly one of them: a text by --text, by --file or by `-` for stdin after the agents, or messages by --message
    and --messages-file. Messages go on from the agent's conversation as `chat` would. With several agents the exit code
    is 1 when one of them failed; the others have the text all the same.

    Example: kvd-client inject alice bob --file handbook.txt
    """
    source = "-" if agents[-1] == "-" else None
    names = agents[: len(agents) - (source is not None)]
    if not names:
        raise click.UsageError("name the agents to inject into")
    added: dict[str, Any]
    if not messages and messages_file is None:
        added = {"text": read_source(source, text, file)}
    elif (source, text, file) == (None, None, None):
        added = {"messages": read_messages(messages, None, messages_file)}
    else:
        raise click.UsageError("give either messages or a text (by --text, --file or -), not both")
    options: InjectOptions = {} if priority is None else {"priority": priority}
    with waiting("waiting for the daemon to compute it", as_json=session.json):
        if len(names) == 1:
            results = [session.client.inject(names[0], **added, **options)]
        else:
            results = session.client.inject_into(names, **added, **options)
    if session.json:
        entries = [_entry(result) for result in results]
        print_json(entries[0] if len(names) == 1 else entries)
    else:
        print_lines([_injected(result) for result in results])
    if any(result.error is not None for result in results):
        raise SystemExit(EXIT_FAILED)


def _entry(result: InjectResult) -> dict[str, Any]:
    """What --json prints of one agent."""
    if (error := result.error) is not None:
        return {"agent": result.agent, "error": {"name": error.name, "message": error.message, "data": error.data}}
    facts = {name: getattr(result, name) for name in ("agent", "tokens", "appended_tokens", "durable")}
    return {**facts, **result.server}


def _injected(result: InjectResult) -> str:
    if result.error is not None:
        return f"{result.agent}: FAILED: {command_words(result.error, None)}"
    prefill_s = result.server.get("prefill_s")
    computed = f", computed in {seconds(prefill_s)}" if isinstance(prefill_s, int | float) else ""
    durable = "durable" if result.durable else f"NOT durable ({result.durable_reason or 'no reason given'})"
    return f"{result.agent}: {result.appended_tokens} tokens appended, {result.tokens} in all{computed}; {durable}"


@click.command()
@source_options
@with_session
def tokenize(session: Session, /, source: str | None, text: str | None, file: str | None) -> None:
    """Print the model's token ids of a text.

    Example: kvd-client tokenize --text "Hello" --json
    """
    tokens = session.client.tokenize(read_source(source, text, file))
    if session.json:
        print_json({"tokens": tokens})
    else:
        click.echo(" ".join(map(str, tokens)))
