"""Parameters of calls: unknown, missing, mistyped and out-of-range ones are refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import CallerError, InvalidParams, InvalidText
from kvd.scheduler.params import MAX_NAME_CHARACTERS, MAX_STOP_STRINGS, TURN_NAMES, Params
from kvd.scheduler.requests import AgentRef


def params(**raw: object) -> Params:
    """Parameters of a call."""
    return Params("generate", raw)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """A misspelt parameter is never ignored."""
    with pytest.raises(InvalidParams, match="generate does not know max_token, tempe; it takes agent, text") as caught:
        params(max_token=1, agent="a", tempe=2).refuse_unknown("agent", "text")
    assert caught.value.data["parameters"] == ["max_token", "tempe"]
    params(agent="a").refuse_unknown("text", *TURN_NAMES)
    with pytest.raises(InvalidParams, match="it takes nothing"):
        params(x=1).refuse_unknown()


@pytest.mark.parametrize(
    ("raw", "read", "words"),
    [
        ({}, lambda p: p.text("text"), "needs text"),
        ({"text": 7}, lambda p: p.text("text"), "text must be a string, not int"),
        ({"text": b"x"}, lambda p: p.text("text"), "text must be a string, not bytes"),
        ({"stream": 1}, lambda p: p.flag("stream", True), "stream must be true or false, not int"),
        ({"n": True}, lambda p: p.integer("n", default=1), "n must be an integer from 0"),
        ({"n": 1.0}, lambda p: p.integer("n", default=1), "n must be an integer"),
        ({"n": 0}, lambda p: p.integer("n", low=1, high=5), "n must be from 1 to 5, not 0"),
        ({"n": 6}, lambda p: p.integer("n", low=1, high=5), "n must be from 1 to 5, not 6"),
        ({}, lambda p: p.integer("n", low=1), "needs n"),
        ({"x": "1"}, lambda p: p.number("x", 1.0), "x must be a number, not str"),
        ({"x": True}, lambda p: p.number("x", 1.0), "x must be a number, not bool"),
        ({"x": float("nan")}, lambda p: p.number("x", 1.0), "not NaN"),
        ({"agent": ""}, lambda p: p.name("agent"), "1 to 128 printable"),
        ({"agent": "a" * 129}, lambda p: p.name("agent"), "1 to 128 printable"),
        ({"agent": "a\nb"}, lambda p: p.name("agent"), "printable"),
        ({"agent": "a\x00"}, lambda p: p.name("agent"), "printable"),
        ({"agent": "a", "namespace": ""}, lambda p: p.ref(), "namespace must be 1 to 128"),
        ({"stop": ""}, lambda p: p.stop(), "stop must be a non-empty string"),
        ({"stop": ["a", ""]}, lambda p: p.stop(), "stop must be"),
        ({"stop": ["a", 1]}, lambda p: p.stop(), "stop must be"),
        ({"stop": b"ab"}, lambda p: p.stop(), "stop must be"),
        ({"stop": {"a": 1}}, lambda p: p.stop(), "stop must be"),
        ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, lambda p: p.stop(), "at most 16 strings, not 17"),
        ({"logit_bias": []}, lambda p: p.sampling(), "logit_bias must map"),
        ({"logit_bias": {"x": 1}}, lambda p: p.sampling(), "logit_bias must map"),
        ({"logit_bias": {1: "nan"}}, lambda p: p.sampling(), "logit_bias must map"),
        ({"logit_bias": {1.5: 1}}, lambda p: p.sampling(), "logit_bias must map"),
        ({"logit_bias": {True: 1}}, lambda p: p.sampling(), "logit_bias must map"),
        ({"logit_bias": {1: float("inf")}}, lambda p: p.sampling(), "logit_bias must be at most"),
        ({"temperature": 101}, lambda p: p.sampling(), "temperature must be between 0 and 100"),
        ({"seed": -1}, lambda p: p.sampling(), "seed must be from 0"),
        ({"messages": []}, lambda p: p.messages(), "needs messages"),
        ({"messages": "hi"}, lambda p: p.messages(), "needs messages"),
        ({"messages": [{"content": "x"}]}, lambda p: p.messages(), r"messages\[0\] must be a map with a role"),
        ({"messages": [{"role": "user"}, 3]}, lambda p: p.messages(), r"messages\[1\] must be a map"),
        ({"messages": [{"role": "user", "content": 3}]}, lambda p: p.messages(), r"messages\[0\].content must be"),
        ({"messages": [{"role": "user", "a": [b"x"]}]}, lambda p: p.messages(), r"messages\[0\].a\[0\] must be text"),
        ({"tools": {"name": "f"}}, lambda p: p.tools(), "tools must be a list of maps"),
        ({"tools": ["f"]}, lambda p: p.tools(), "tools must be a list of maps"),
        ({"tools": [{"f": {"x": b""}}]}, lambda p: p.tools(), r"tools\[0\].f.x must be text, a number"),
        ({"tools": [{"f": float("inf")}]}, lambda p: p.tools(), r"tools\[0\].f must be a finite number"),
        ({"response_format": "json"}, lambda p: p.mapping("response_format"), "response_format must be a map, not str"),
        ({"on_context_full": "halt"}, lambda p: p.on_context_full(), "must be error or stop, not 'halt'"),
        ({"on_context_full": True}, lambda p: p.on_context_full(), "on_context_full must be a string, not bool"),
        ({"priority": "urgent"}, lambda p: p.priority(), "must be interactive or background, not 'urgent'"),
        ({"timeout_s": 0}, lambda p: p.timeout_s(), "timeout_s must be above 0 and at most 1000000, not 0.0"),
        ({"timeout_s": float("nan")}, lambda p: p.timeout_s(), "timeout_s must be a number, not NaN"),
        ({"timeout_s": "1"}, lambda p: p.timeout_s(), "timeout_s must be a number, not str"),
    ],
)
def test_wrong_values_are_refused_by_name(raw: dict[str, object], read: Callable[[Params], object], words: str) -> None:
    """Each refusal names the parameter and what it may be."""
    with pytest.raises(InvalidParams, match=words):
        read(params(**raw))


@pytest.mark.parametrize("read", [lambda p: p.text("x"), lambda p: p.name("x"), lambda p: p.stop()])
def test_lone_surrogates_are_refused_with_their_position(read: Callable[[Params], object]) -> None:
    """Text that UTF-8 cannot carry is `invalid_text`."""
    with pytest.raises(InvalidText, match="character 2") as caught:
        read(params(x="ab\ud800c", stop=["ab\ud800c"]))
    assert caught.value.data["character"] == 2
    with pytest.raises(InvalidText, match=r"messages\[1\]"):
        params(messages=[{"role": "user"}, {"role": "user", "content": "\udc00"}]).messages()


def test_absent_values_take_their_defaults() -> None:
    """None is the same as absent."""
    given_params = params(temperature=None, stop=None, namespace=None, agent="é 1", stream=None)
    assert given_params.sampling().temperature == 0.0
    assert given_params.stop() == ()
    assert given_params.ref() == AgentRef("default", "é 1")  # type: ignore[arg-type]
    assert given_params.flag("stream", True)
    assert given_params.optional_integer("tokens") is None
    assert not given_params.has("temperature")


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (
            {"messages": [{"role": "u", "content": "ab\ud800"}]},
            "messages[0].content has a lone surrogate at character 2",
        ),
        ({"messages": [{"role": "\udfff"}]}, "messages[0].role has"),
        ({"messages": [{"role": "u", "tool_calls": [{"arguments": "\ud800"}]}]}, "messages[0].tool_calls[0].arguments"),
        ({"messages": [{"role": "u", "\ud800": 1}]}, "a key of messages[0] has"),
        ({"tools": [{"description": "x\ud83d"}]}, "tools[0].description has a lone surrogate at character 1"),
    ],
)
def test_lone_surrogates_are_found_inside_of_messages_and_tools(raw: dict[str, list[object]], place: str) -> None:
    """The error says where inside; the parameter is the one that the client sent."""
    given_params, (name,) = params(**raw), raw
    with pytest.raises(InvalidText) as refused:
        getattr(given_params, name)()
    assert refused.value.message.startswith(place)
    assert refused.value.data["parameter"] == name


def test_good_values_are_taken() -> None:
    """Whole numbers serve as floats; ids of a bias may be strings, as JSON has no other keys."""
    sampling = params(temperature=1, logit_bias={7: 2, "8": -1.5}, seed=3, top_k=5).sampling()
    assert sampling.temperature == 1.0
    assert sampling.logit_bias == ((7, 2.0), (8, -1.5))
    assert (sampling.seed, sampling.top_k) == (3, 5)
    assert params(stop="x").stop() == ("x",)
    assert (params().on_context_full(), params(on_context_full="stop").on_context_full()) == ("error", "stop")
    assert (params().priority(), params(priority="background").priority()) == ("interactive", "background")
    assert (params().timeout_s(), params(timeout_s=2).timeout_s()) == (None, 2.0)
    assert (params(tools=[]).tools(), params().tools()) == (None, None)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"n": [1, 2.5, None, True]}, "strict": None}}
    assert params(tools=[tool]).tools() == [tool]
    assert params(agent="a" * MAX_NAME_CHARACTERS).name("agent")
    assert params(messages=[{"role": "user", "content": "x", "name": "n"}]).messages() == [
        {"role": "user", "content": "x", "name": "n"}
    ]


LIMIT_NAMES = ("budget", "namespace_quotas", "namespace_disk_quotas")


@pytest.mark.parametrize(
    ("value", "size_bytes"), [(None, None), (5, 5), ("5", 5), ("4GB", 4_000_000_000), ("1Ki", 1024)]
)
def test_a_size_is_bytes_or_what_the_command_line_takes(value: object, size_bytes: int | None) -> None:
    """P39: one parser for both."""
    assert params(budget=value).size("budget") == size_bytes
    expected = {} if value is None else {"a": size_bytes}
    assert params(quotas=None if value is None else {"a": value}).namespace_sizes("quotas") == expected


@pytest.mark.parametrize("value", [True, 1.5, [1], "much", "", "-5", -5, "5%"])
def test_what_is_no_size_is_refused_with_the_allowed_forms(value: object) -> None:
    """P39: the error names the parameter and examples; in a map, the place."""
    with pytest.raises(InvalidParams, match=r"budget .*512MiB or 10\.2GB") as caught:
        params(budget=value).size("budget")
    assert caught.value.data["parameter"] == "budget"
    with pytest.raises(InvalidParams, match=r"quotas\['a'\]") as caught:
        params(quotas={"a": value}).namespace_sizes("quotas")
    assert caught.value.data["parameter"] == "quotas"


def test_no_quota_is_nil_and_names_are_checked() -> None:
    """A namespace that cannot exist has none."""
    assert params(quotas={"a": None}).namespace_sizes("quotas") == {"a": None}
    for name in ("", "a\n", "a" * 129):
        with pytest.raises(InvalidParams, match="1 to 128 printable characters"):
            params(quotas={name: 5}).namespace_sizes("quotas")


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*TURN_NAMES, "messages", "text", "tools", "response_format", *LIMIT_NAMES]), ANYTHING
    )
)
def test_nothing_a_client_sends_is_more_than_refused(raw: dict[str, object]) -> None:
    """Any value either passes or is the caller's error; nothing else is ever raised."""
    readers: list[Callable[[Params], object]] = [
        Params.sampling,
        Params.stop,
        Params.ref,
        Params.messages,
        Params.tools,
        Params.on_context_full,
        Params.priority,
        Params.timeout_s,
        lambda p: p.mapping("response_format"),
        lambda p: p.text("text"),
        lambda p: p.integer("max_tokens", default=1, low=0, high=10),
        lambda p: p.flag("stream", True),
        lambda p: p.size("budget"),
        lambda p: p.namespace_sizes("namespace_quotas"),
    ]
    for read in readers:
        with contextlib.suppress(CallerError):
            read(Params("generate", raw))
