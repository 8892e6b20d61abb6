"""Answers in a history stand as the model wrote them, so that the next prompt goes on from the agent's own text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvd.model.answers import AnswerFormat, AnswerReader
from kvd.model.continuation import continuation
from kvd.model.recall import HeldText, needs_tokens
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.history import render_history
from kvd.vm.prefix import Match, StoredText, match
from kvd.vm.text import Span, TypedText, joined
from tests.support.chat_templates import ALTERNATING, TAGGED, THINKING, TURNS_ONLY

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>\n{"arguments": {"b":2,   "a": "\\u00e9"}, "name": "weather"}\n</tool_call>'
"""Otherwise than any template prints it: order, white space and escapes."""


class Agent:
    """What an agent holds after turns that a model of given answers had."""

    def __init__(self, template: ChatTemplate, codec: TextCodec) -> None:
        self.template, self.codec = template, codec
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.text = TypedText(b"", ())

    @property
    def held(self) -> HeldText:
        """For recall."""
        return HeldText(self.text, tuple(self.ids), tuple(self.lengths))

    def prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> TypedText:
        """The next prompt."""
        return render_history(self.template, self.codec, messages, [self.held], **options)

    def turn(self, messages: list[dict[str, Any]], answer: Sequence[str | int], **options: Any) -> dict[str, Any]:
        """Match, go on, answer (ids are control tokens); the message that a client gets."""
        prompt = self.prompt(messages, **options)
        matched = self.match(prompt)
        assert matched.kind in ("new", "extend"), matched
        rest = prompt.data[len(self.text.data) :]
        ids, lengths = self.codec.encode_typed(TypedText(rest, (Span("control", len(rest)),)))
        opening = prompt.data[-prompt.spans[-1].text_bytes :].decode()
        reader = AnswerReader(
            self.template.answers, self.codec, opening=opening, reads_calls=bool(options.get("tools"))
        )
        made: list[int] = []
        for piece in answer:
            if isinstance(piece, str):
                made += self.codec.encode_content(piece)
                reader.feed(piece)
            else:
                made.append(piece)
                reader.feed_control(self.codec.token_bytes(piece).decode())
        reader.end()
        data, made_lengths = self.codec.surface(made)
        self.ids += [*ids, *made]
        self.lengths += [*lengths, *made_lengths]
        self.text = joined(prompt, TypedText(data, (Span("generated", len(data)),)))
        return reader.answer.message()

    def match(self, prompt: TypedText) -> Match:
        """How a prompt compares with what is held."""
        return match(StoredText.of(self.text, self.lengths, len(self.ids)), prompt)


@pytest.fixture
def make_agent(tiny_codec: TextCodec) -> Any:
    """Agents of a template."""
    return lambda source: Agent(ChatTemplate(source, tiny_codec), tiny_codec)


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def result_of(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """What a tool gave back for a message's first call."""
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def as_clients_send(message: Mapping[str, Any], how: str) -> dict[str, Any]:
    """The message as a client may send it back."""
    sent = json.loads(json.dumps(message))
    if how == "without reasoning":
        sent.pop("reasoning_content", None)
    if how == "trimmed":
        sent["content"] = (sent["content"] or "").strip()
    if how == "in parts":
        sent["content"] = [{"type": "text", "text": sent["content"] or ""}]
    for call in sent.get("tool_calls", ()) if how == "printed anew" else ():
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=2)
        call["id"] = "another"
    return sent


@pytest.mark.parametrize("how", ["as it is", "without reasoning", "trimmed", "in parts", "printed anew"])
@pytest.mark.parametrize("source", [THINKING, TAGGED, TURNS_ONLY], ids=["thinking", "tagged", "turns only"])
def test_every_turn_extends(make_agent: Any, source: str, how: str) -> None:
    """P13, P16, P17: five turns of calls, results, reasoning and odd spaces, each an extension of all that is held.

    The templates drop reasoning from history, trim contents and print arguments their own way, or know no tools.
    """
    agent = make_agent(source)
    thinks = agent.template.answers.reasoning is not None
    reasoning = "<think>\nI need\n the weather.\n</think>\n\n" if thinks else ""
    messages = [{"role": "system", "content": "Be brief."}, user("Weather?")]
    for number, answer in enumerate(
        [f"{reasoning}{CALL}", "  It rains.\n\n", f"{reasoning}Look: {CALL}", "Dry. <b>\n"]
    ):
        message = agent.turn(messages, [answer], tools=TOOLS)
        assert bool(message.get("tool_calls")) == (CALL in answer)
        assert bool(message.get("reasoning_content")) == ("<think>" in answer)
        messages.append(as_clients_send(message, how))
        messages.append(result_of(messages[-1], "12 °C") if message.get("tool_calls") else user(f"And {number}?"))
        matched = agent.match(agent.prompt(messages, tools=TOOLS))
        assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))


def test_a_template_that_opens_reasoning_or_leaves_it_out(make_agent: Any) -> None:
    """P17: `enable_thinking` changes what an answer begins behind; the history keeps what was there."""
    agent = make_agent(THINKING)
    assert agent.template.variables == ("enable_thinking",)
    messages = [user("a")]
    for thinks, answer in ((False, "Yes."), (True, "<think>\nhm</think>No."), (False, "Yes."), (True, "No.")):
        message = agent.turn(messages, [answer], variables={"enable_thinking": thinks})
        messages += [{**message}, user("more")]
        for later in (True, False):
            matched = agent.match(agent.prompt(messages, variables={"enable_thinking": later}))
            assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))
    assert agent.text.data.count(b"<think>\n\n</think>\n\n") == 2


def test_other_answers_are_the_templates(make_agent: Any) -> None:
    """What differs in meaning is another answer: it is rendered as given, and the match ends where it differs."""
    agent = make_agent(THINKING)
    messages = [user("Weather?")]
    message = agent.turn(messages, [f"<think>x</think>{CALL}"], tools=TOOLS)
    call = message["tool_calls"][0]
    others = (
        {**message, "content": "I call."},
        {**message, "reasoning_content": "y"},
        {**message, "tool_calls": [{**call, "function": {"name": "weather", "arguments": '{"a": "é", "b": 3}'}}]},
        {**message, "tool_calls": [{**call, "function": {**call["function"], "name": "climate"}}]},
        {**message, "tool_calls": [call, call]},
        {"role": "assistant", "content": "no call"},
        {"role": "user", "content": message["content"], "tool_calls": message["tool_calls"]},
    )
    for other in others:
        matched = agent.match(agent.prompt([*messages, other, user("b")], tools=TOOLS))
        assert matched.kind == "diverge", other
    changed = agent.match(agent.prompt([user("Other?"), message, user("b")], tools=TOOLS))
    assert changed.kind == "diverge"
    assert changed.matched_bytes < agent.text.data.index(b"Weather?") + 1


def test_markers_that_are_control_tokens_are_recalled_from_ids(make_agent: Any, tiny_codec: TextCodec) -> None:
    """A marker that surfaces as nothing is in no text, but among the ids: the answer is found all the same."""
    agent = make_agent(TURNS_ONLY)
    agent.template.__dict__["answers"] = AnswerFormat(("<|endoftext|>", "<|endoftext|>"))
    mark = tiny_codec.id_of("<|endoftext|>")
    assert mark is not None
    assert needs_tokens(agent.template.answers, tiny_codec)
    messages = [user("Weather?")]
    message = agent.turn(messages, [mark, "hm", mark, " Yes."])
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    matched = agent.match(agent.prompt([*messages, message, user("b")]))
    assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))
    without_ids = render_history(agent.template, tiny_codec, [*messages, message, user("b")], [HeldText(agent.text)])
    assert agent.match(without_ids).kind == "diverge"


def test_the_branch_that_has_most_is_recalled(make_agent: Any) -> None:
    """An agent goes back to an abandoned branch: its answers are those of that branch."""
    agent = make_agent(THINKING)
    first = agent.turn([user("a")], ["<think>x</think>One."])
    messages = [user("a"), first, user("b")]
    second = agent.turn(messages, ["<think>z</think>Two."])
    other = make_agent(THINKING)
    other.turn([user("a")], ["<think>other</think>One."])
    history = [*messages, second, user("c")]
    for held in ([other.held, agent.held], [agent.held, other.held]):
        prompt = render_history(agent.template, agent.codec, history, held)
        assert generated(prompt) == ["<think>x</think>One.", "<think>z</think>Two."]
    assert generated(render_history(agent.template, agent.codec, history, [])) == ["One.", "Two."]


OLD, NEW = "<think>OLD</think>Done.", "<think>NEW</think>Done."


def two_alike(agent: Agent) -> list[dict[str, Any]]:
    """Two turns whose answers differ in hidden reasoning alone; the messages of both, as most clients send them."""
    messages = [user("delete a.txt")]
    for answer, question in ((OLD, "create b.txt"), (NEW, "next")):
        messages += [as_clients_send(agent.turn(messages, [answer]), "without reasoning"), user(question)]
    return messages


def test_an_answer_stands_behind_what_it_was_written_behind(make_agent: Any) -> None:
    """P17: answers that read alike are told apart by all that comes before, whatever a client did to its history.

    Compaction, edits of any message, system texts in the middle: the reasoning of one turn gets into no other.
    """
    agent = make_agent(THINKING)
    delete, done, create, same, after = messages = two_alike(agent)
    assert done == same
    nudge = {"role": "system", "content": "Take care."}
    for history, answers in (
        (messages, [OLD, NEW]),
        ([create, done, after], ["Done."]),
        ([delete, done, after], [OLD]),
        ([delete, create, done, after], ["Done."]),
        ([create, done, delete, done, after], ["Done.", "Done."]),
        ([user("So far: a.txt is deleted."), *messages[2:]], ["Done."]),
        ([delete, {"role": "assistant", "content": "Gone."}, *messages[2:]], ["Gone.", "Done."]),
        ([delete, done, user("create c.txt"), *messages[3:]], [OLD, "Done."]),
        ([delete, done, nudge, *messages[2:]], [OLD, "Done."]),
        ([nudge, *messages], ["Done.", "Done."]),
        ([delete, {**done, "reasoning_content": "NEW"}, *messages[2:]], ["Done.", "Done."]),
        ([*messages[:4], {**same}, after], [OLD, NEW, "Done."]),
    ):
        assert generated(agent.prompt(history)) == answers, history


def test_results_and_tools_are_part_of_what_comes_before(make_agent: Any) -> None:
    """P17: another result, or other tools, and what was thought of the first ones is not put behind them."""
    agent = make_agent(THINKING)
    first = agent.turn([user("Weather?")], [f"<think>x</think>{CALL}"], tools=TOOLS)
    messages = [user("Weather?"), first, result_of(first, "12 °C")]
    messages += [agent.turn(messages, ["<think>mild</think>Fine."], tools=TOOLS), user("b")]
    edited = [*messages[:2], result_of(first, "-30 °C"), *messages[3:]]
    for history, tools, thoughts in ((messages, TOOLS, (1, 1)), (edited, TOOLS, (1, 0)), (messages, TOOLS * 2, (0, 0))):
        data = agent.prompt(history, tools=tools).data
        assert (data.count(b"<think>x"), data.count(b"<think>mild")) == thoughts


def test_of_branches_the_one_the_prompt_goes_along_with_is_recalled(make_agent: Any) -> None:
    """P17: each branch has an answer that reads the same; the prompt gets that of its own past, and goes on from it."""
    agents = []
    for question, answer in (("delete a.txt", OLD), ("create b.txt", NEW)):
        agents.append(make_agent(THINKING))
        agents[-1].turn([user("hi")], ["<think>hm</think>Hello."])
        greeted = [user("hi"), {"role": "assistant", "content": "Hello."}, user(question)]
        agents[-1].turn(greeted, [answer])
    for held in (agents, agents[::-1]):
        for agent, question, answer in zip(agents, ("delete a.txt", "create b.txt"), (OLD, NEW), strict=True):
            history = [user("hi"), {"role": "assistant", "content": "Hello."}, user(question)]
            history += [{"role": "assistant", "content": "Done."}, user("next")]
            prompt = render_history(agent.template, agent.codec, history, [each.held for each in held])
            assert generated(prompt) == ["<think>hm</think>Hello.", answer]
            assert agent.match(prompt).kind == "extend"


def test_after_an_edit_every_turn_extends_again(make_agent: Any) -> None:
    """P13, P17: what the template made of older answers stays, and new ones stand as they were written."""
    compacted = two_alike(make_agent(THINKING))[2:]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    told = {"role": "assistant", "content": "Done.", "tool_calls": [call]}
    agent = make_agent(THINKING)
    messages = [user("So far."), told, result_of(told, "12 °C"), *compacted]
    for answer in (OLD, NEW, "Done."):
        messages += [as_clients_send(agent.turn(messages, [answer], tools=TOOLS), "without reasoning"), user("more")]
        matched = agent.match(agent.prompt(messages, tools=TOOLS))
        assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))
    assert generated(agent.prompt(messages, tools=TOOLS)) == ["Done.", "Done.", OLD, NEW, "Done."]


@pytest.mark.parametrize(
    "answer", ["<think>half a thou", "<think>x</think>Done", "Half <b", "<think>x</think><tool_ca"]
)
def test_an_answer_cut_short_is_recalled(make_agent: Any, answer: str) -> None:
    """P17: cut inside of reasoning, of text, or of a marker: it is what it is, and the next turn goes on from it."""
    agent = make_agent(THINKING)
    messages = [user("a")]
    messages += [agent.turn(messages, [answer]), user("b")]
    matched = agent.match(agent.prompt(messages))
    assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))


def test_an_injected_message_is_part_of_what_comes_before(make_agent: Any) -> None:
    """P17: a client that knows of it goes on; one that does not gets no thoughts about it."""
    agent = make_agent(THINKING)
    first = agent.turn([user("a")], [OLD])
    injected = {"role": "system", "content": "b.txt is gone."}
    agent.text = continuation(agent.template, [injected]).after(agent.text)
    messages = [user("a"), as_clients_send(first, "without reasoning"), injected, user("b")]
    prompt = render_history(agent.template, agent.codec, messages, [HeldText(agent.text)])
    assert generated(prompt) == [OLD]
    assert prompt.data.startswith(agent.text.data)
    agent.text = joined(prompt, TypedText(NEW.encode(), (Span("generated", len(NEW)),)))
    messages += [messages[1], user("c")]
    for history, answers in ((messages, [OLD, NEW]), ([*messages[:2], *messages[3:]], [OLD, "Done."])):
        assert generated(render_history(agent.template, agent.codec, history, [HeldText(agent.text)])) == answers


def test_where_the_first_guess_is_another_text_the_one_in_its_place_is_taken(make_agent: Any) -> None:
    """P17: a text that the template made of a message with calls reads like a later answer without."""
    agent = make_agent(THINKING)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    told = {"role": "assistant", "content": "Done.", "tool_calls": [call]}
    messages = [user("So far."), told, result_of(told, "12 °C"), user("next")]
    messages += [as_clients_send(agent.turn(messages, [OLD], tools=TOOLS), "without reasoning"), user("more")]
    prompt = agent.prompt(messages, tools=TOOLS)
    assert generated(prompt) == ["Done.", OLD]
    assert agent.match(prompt).kind == "extend"


def test_calls_are_read_where_a_message_has_them_only(make_agent: Any) -> None:
    """Reading calls costs most of all: texts of other functions, and messages without calls, cost none of it."""
    agent = make_agent(THINKING)
    messages = [user("Weather?")]
    message = agent.turn(messages, [CALL], tools=TOOLS)
    messages += [message, result_of(message, "12 °C"), user("b")]
    read: list[str] = []
    dialect = agent.template.answers.tools

    def parser(body: str, tools: Any) -> Any:
        read.append(body)
        return dialect.parser(body, tools)

    agent.template.__dict__["answers"] = AnswerFormat(None, replace(dialect, parser=parser))
    other = {**message, "tool_calls": [{**message["tool_calls"][0], "function": {"name": "clock", "arguments": "{}"}}]}
    for answer, times in ((message, 1), ({"role": "assistant", "content": "Dry."}, 0), (other, 0)):
        read.clear()
        agent.prompt([messages[0], answer, *messages[2:]], tools=TOOLS)
        assert len(read) == times


def test_an_ordinary_turn_is_rendered_once(make_agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing costs no second rendering where the history is the agent's; elsewhere their number is bounded."""
    agent = make_agent(THINKING)
    messages = two_alike(agent)
    rendered: list[Mapping[int, Any]] = []
    render = ChatTemplate.render_recalled

    def counted(self: ChatTemplate, given: Any, recalled: Mapping[int, Any], **options: Any) -> Any:
        rendered.append(recalled)
        return render(self, given, recalled, **options)

    monkeypatch.setattr(ChatTemplate, "render_recalled", counted)
    agent.prompt(messages)
    assert len(rendered) == 1
    rendered.clear()
    agent.prompt([user("other"), *messages[1:]])
    assert len(rendered) == 2


@pytest.mark.parametrize("call", ['[{"arguments":{"b":2},  "name":"weather"}]', '[{"name":"a"},{"name":"b"}]'])
def test_a_template_that_wants_to_see_calls_sees_stand_ins(make_agent: Any, call: str) -> None:
    """One that counts turns, and cuts open what it prints of calls: the answer is in place all the same."""
    agent = make_agent(ALTERNATING)
    assert agent.template.answers.tools.name == "mistral"
    messages = [user("Weather?")]
    for _ in range(2):
        message = agent.turn(messages, [f"[TOOL_CALLS]{call}"], tools=TOOLS)
        messages += [message, *(result_of({"tool_calls": [each]}, "12") for each in message["tool_calls"])]
        matched = agent.match(agent.prompt(messages, tools=TOOLS))
        assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))
    messages.append(agent.turn(messages, ["Dry."], tools=TOOLS))
    matched = agent.match(agent.prompt([*messages, user("b")], tools=TOOLS))
    assert (matched.kind, matched.keep_tokens) == ("extend", len(agent.ids))
    control = b"".join(piece for kind, piece in split(agent.text) if kind == "control")
    assert b"Kv" not in agent.text.data
    assert b"name" not in control


NAMES_CALLS = (
    "{# <tool_call> #}{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>"
    "{{ messages[loop.index0 - 1].tool_calls[0].function.name }}={{ m.content }}<|im_end|>{% elif m.tool_calls %}"
    "<|im_start|>{{ m.tool_calls[0].function.name }}<|im_end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""Prints a call's name beside its result too."""


@pytest.mark.parametrize(
    "source", [TAGGED, NAMES_CALLS, "{% for m in messages %}{{ m.content or '-' }}{% endfor %}<tool_call>{{ tools }}"]
)
def test_a_template_that_refuses_stand_ins_gets_the_calls(make_agent: Any, source: str) -> None:
    """Where neither can be, it gets what the client sent, and the match ends honestly at it."""
    refuses = "{% if messages[-1].role == 'tool' and messages[-2].tool_calls[0].function.name != 'weather' %}"
    agent = make_agent(refuses + "{{ raise_exception('x') }}{% endif %}" + source)
    message = agent.turn([user("a")], [CALL], tools=TOOLS)
    prompt = agent.prompt([user("a"), message, result_of(message, "12")], tools=TOOLS)
    assert agent.match(prompt).kind == "diverge"
    assert b"Kv" not in prompt.data


def test_a_form_that_nobody_can_read_is_told_as_text(make_agent: Any) -> None:
    """A template that shows tools but marks no calls: the model is told of a form that is read back."""
    source = "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    agent = make_agent(source)
    assert not agent.template.supports_tools
    assert b"You may call the functions" in agent.template.render([user("a")], tools=TOOLS).data
    assert make_agent(source + "{# <tool_call> #}").template.supports_tools


def test_tools_for_a_template_that_knows_none(make_agent: Any) -> None:
    """They are told in the system message, a result is a user's message, and nothing of it is control text."""
    agent = make_agent(TURNS_ONLY)
    assert not agent.template.supports_tools
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    typed = agent.template.render([user("a"), called, *results, user("b")], tools=TOOLS)
    text = typed.data.decode()
    assert text.startswith("<|im_start|>system\nYou may call")
    assert json.dumps(TOOLS[0]) in text
    assert 'assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    one = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n\nb"
    assert f"user\n{one}<|im_end|>" in text
    assert b"tool" not in b"".join(piece for kind, piece in split(typed) if kind == "control")
    with_system = agent.template.render([{"role": "system", "content": "Brief."}, user("a")], tools=TOOLS)
    assert with_system.data.startswith(b"<|im_start|>system\nBrief.\n\nYou may call")
    no_system = make_agent(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ).template.render([user("a")], tools=TOOLS)
    assert no_system.data.startswith(b"<|im_start|>user\nYou may call")
    assert no_system.data.endswith(b"\n\na<|im_end|>\n")


def generated(typed: TypedText) -> list[str]:
    """The answers in a prompt."""
    return [data.decode() for kind, data in split(typed) if kind == "generated"]


def split(typed: TypedText) -> list[tuple[str, bytes]]:
    """(kind, bytes) of each span."""
    starts = _starts(typed)
    return [(span.kind, typed.data[at : at + span.text_bytes]) for at, span in zip(starts, typed.spans, strict=True)]


def _starts(typed: TypedText) -> list[int]:
    ends, at = [], 0
    for span in typed.spans:
        ends.append(at)
        at += span.text_bytes
    return ends


def test_a_developer_is_the_system_where_a_template_knows_no_other(make_agent: Any) -> None:
    """The newer name of the role; a template that prints roles itself gets it as it is."""
    developer = [{"role": "developer", "content": "Brief."}, user("a")]
    assert b"<|im_start|>system\nBrief." in make_agent(TURNS_ONLY).template.render(developer).data
    own = make_agent("{# developer #}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}").template
    assert own.render(developer).data == b"developer:Brief.;user:a;"


def test_results_get_the_name_of_their_function(make_agent: Any) -> None:
    """Some templates print it, most clients leave it out."""
    source = (
        "{# <tool_call> #}{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}{{ m.name }}={{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1"}]
    assert make_agent(source).template.render([*messages[:1], {**messages[1], "content": "x"}]).data == b"Nonef=x"
