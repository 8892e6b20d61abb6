"""Who runs next: alternation and round robin are learned in two rounds, noise predicts nothing, memory is bounded."""

from __future__ import annotations

import pytest

from kvd.scheduler import prediction
from kvd.scheduler.prediction import Predictor


def run(predictor: Predictor, agents: str, stream: object = "one") -> None:
    """Turns of agents named by letters, in this order."""
    for agent in agents:
        predictor.started(agent, stream)


@pytest.mark.parametrize(("cycle", "expected"), [("AB", ("A", "B")), ("ABC", ("A", "B")), ("ABCD", ("A", "B"))])
def test_agents_that_take_turns_are_predicted_after_two_rounds(cycle: str, expected: tuple[str, ...]) -> None:
    """A, B, A, B and longer rounds: the next agent, then the one after it; from then on every one is a hit."""
    predictor = Predictor()
    run(predictor, 2 * cycle)
    assert predictor.expected() == expected
    hits = predictor.hits
    run(predictor, 3 * cycle)
    assert predictor.hits - hits == 3 * len(cycle)
    assert predictor.misses == 0


def test_agents_that_do_not_repeat_predict_nothing() -> None:
    """A new agent each time; nor is an agent predicted that came only once, whoever it followed."""
    predictor = Predictor()
    run(predictor, "ABCDEFGH")
    assert predictor.expected() == ()
    run(predictor, "A")
    assert predictor.expected() == ()
    assert (predictor.hits, predictor.misses) == (0, 0)


def test_an_agent_that_others_follow_at_random_predicts_nothing() -> None:
    """No successor is likely enough."""
    predictor = Predictor()
    run(predictor, "ABACADAEABACADAEABACADAEA")
    assert predictor.expected() == ()


def test_an_agent_that_goes_on_by_itself_is_what_is_expected() -> None:
    """After A, A, A comes A, which keeps its pages; who came between is not preferred to it."""
    predictor = Predictor()
    run(predictor, "AAAAAABBBBBBAAAAAA")
    assert predictor.expected() == ("A",)


def test_a_habit_that_changed_is_forgotten() -> None:
    """After many rounds of one order, the other one is predicted within a few."""
    predictor = Predictor()
    run(predictor, "ABC" * 30)
    run(predictor, "CBA" * 4)
    assert predictor.expected()[0] == "C"


def test_clients_that_ask_side_by_side_are_told_apart() -> None:
    """Each connection has an order of its own, however the two are mixed."""
    predictor = Predictor()
    for one, two in zip("ABABABAB", "CDCDCDCD", strict=True):
        predictor.started(one, 1)
        predictor.started(two, 2)
        predictor.started(two, 2) if two == "C" else None
    assert set(predictor.expected()[:2]) >= {"A"}
    hits, misses = predictor.hits, predictor.misses
    run(predictor, "ABABAB", 1)
    assert (predictor.hits - hits, predictor.misses) == (6, misses)


def test_one_connection_a_call_is_as_good() -> None:
    """Calls that each make their own connection follow each other."""
    predictor = Predictor()
    for number, agent in enumerate("ABCABC"):
        predictor.started(agent, number)
    assert predictor.expected() == ("A", "B")


def test_what_is_expected_is_given_up_when_it_came_or_never_comes() -> None:
    """An agent that runs is expected no more; a client that is silent for long is taken for gone."""
    predictor = Predictor()
    run(predictor, "ABAB", "gone")
    assert "A" in predictor.expected()
    for number in range(prediction.STALE_STARTS):
        predictor.started(f"other {number}", "here")
    assert predictor.expected() == ()
    run(predictor, "PQPQ", "there")
    predictor.started("P", "elsewhere")
    assert "P" not in predictor.expected()[:1]


def test_an_agent_that_is_gone_is_forgotten() -> None:
    """Deleted agents are neither expected nor counted on."""
    predictor = Predictor()
    run(predictor, "ABABAB")
    predictor.forget("A")
    assert predictor.expected() == ("B",) or predictor.expected() == ()
    run(predictor, "B")
    assert "A" not in predictor.expected()


def test_memory_is_bounded() -> None:
    """Any number of agents, successors and clients."""
    predictor = Predictor()
    for number in range(3 * prediction.MAX_AGENTS):
        predictor.started(number, number)
        predictor.started("hub", number)
    assert len(predictor._habits) <= prediction.MAX_AGENTS
    assert len(predictor._streams) <= prediction.MAX_STREAMS
    assert all(len(habit.next) <= prediction.MAX_SUCCESSORS for habit in predictor._habits.values())
