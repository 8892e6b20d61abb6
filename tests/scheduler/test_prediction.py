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
    one, two = iter(10 * "AB"), iter(10 * "CD")
    for which in "1221211121221222112111212122":
        predictor.started(next(one if which == "1" else two), int(which))
    assert set(predictor.expected()[:2]) == {"A", "C"}
    hits, misses = predictor.hits, predictor.misses
    run(predictor, "ABABAB", 1)
    assert (predictor.hits - hits, predictor.misses) == (6, misses)


def test_one_connection_a_call_is_as_good() -> None:
    """Calls that each make their own connection follow each other."""
    predictor = Predictor()
    for number, agent in enumerate("ABCABC"):
        predictor.started(agent, number)
    assert predictor.expected() == ("A", "B")


@pytest.mark.parametrize("cycle", ["AB", "ABC", "ABCDE"])
def test_agents_on_connections_of_their_own_are_seen_to_take_turns(cycle: str) -> None:
    """Each agent is a process: its connection says nothing but that it comes again, the order of all says when."""
    predictor = Predictor()
    for agent in 3 * cycle:
        predictor.started(agent, f"connection of {agent}")
    hits, misses = predictor.hits, predictor.misses
    for agent in 3 * cycle:
        assert predictor.expected()[0] == agent
        predictor.started(agent, f"connection of {agent}")
    assert (predictor.hits - hits, predictor.misses - misses) == (3 * len(cycle), 0)


def test_an_order_is_believed_as_long_as_it_is_right() -> None:
    """Agents that took turns on connections of their own, then two clients with agents of their own side by side."""
    predictor = Predictor()
    for agent in 6 * "ABC":
        predictor.started(agent, agent)
    for one, two in zip(12 * "PQ", "SSTTTSTSSTSTTSSTTTSSTSTT", strict=True):
        for _ in range(2 if two == "T" else 1):
            predictor.started(one, 1)
        predictor.started(two, 2)
    assert {"P", "Q"} & set(predictor.expected()[:2])


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
    for order in (predictor._by_client, predictor._overall):
        assert len(order._habits) <= prediction.MAX_AGENTS
        assert len(order._streams) <= prediction.MAX_STREAMS
        assert all(len(habit.next) <= prediction.MAX_SUCCESSORS for habit in order._habits.values())
