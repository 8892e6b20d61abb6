"""Page keys: equal exactly when everything a page's content depends on is equal."""

from __future__ import annotations

import random

import pytest

from kvd.errors import InternalError
from kvd.ids import Fingerprint, FormatId, GroupId, Namespace, PageKey
from kvd.vm.keys import KeyChain

P = 8
Q4 = FormatId("q4")
Q8 = FormatId("q8")
IDS = tuple(random.Random(1).randrange(50_000) for _ in range(3 * P))


def chain(
    domain: str = "default", fingerprint: str = "f1", group: int = 0, numerics: str = "1/cpu", page_tokens: int = P
) -> KeyChain:
    """A chain with one thing changed."""
    return KeyChain(Namespace(domain), Fingerprint(fingerprint), GroupId(group), numerics, page_tokens=page_tokens)


def keys(ids: tuple[int, ...], **changes: str | int) -> tuple[PageKey, ...]:
    """Keys of all whole pages of `ids` in q4."""
    return chain(**changes).extend(ids, Q4)  # type: ignore[arg-type]


def test_a_key_is_128_bits_and_one_per_page() -> None:
    """Keys are 32 hex digits and differ by page."""
    found = keys(IDS)
    assert len(set(found)) == 3
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "f2"},
        {"domain": "other"},
        {"group": 1},
        {"numerics": "2/cpu"},
        {"domain": "defaultf", "fingerprint": "1"},
    ],
)
def test_everything_the_content_depends_on_is_in_the_key(changes: dict[str, str | int]) -> None:
    """P7, P19: another checkpoint, domain, group or numerics version shares no key, nor do shifted field borders."""
    assert not set(keys(IDS)) & set(keys(IDS, **changes))


@pytest.mark.parametrize("position", [0, P - 1, P, 2 * P + 3])
def test_one_other_token_changes_its_page_and_all_that_follow(position: int) -> None:
    """P10: pages with equal tokens after another past are other pages."""
    other = list(IDS)
    other[position] += 1
    same = position // P
    assert keys(tuple(other))[:same] == keys(IDS)[:same]
    assert not set(keys(tuple(other))[same:]) & set(keys(IDS)[same:])


def test_the_format_of_every_position_is_in_the_key() -> None:
    """A page of equal tokens collides neither in another format nor with another format earlier on."""
    plain = keys(IDS)
    mixed = chain()
    found = mixed.extend(IDS[:3], Q8) + mixed.extend(IDS[3:], Q4)
    shifted = chain()
    later = shifted.extend(IDS[:4], Q8) + shifted.extend(IDS[4:], Q4)
    assert len({*plain, *found, *later}) == 9


def test_how_tokens_are_fed_does_not_matter() -> None:
    """Any division into calls gives the same keys, in order, as the pages become full."""
    rng = random.Random(2)
    for _ in range(30):
        one = chain()
        found: list[PageKey] = []
        while one.tokens < len(IDS):
            step = rng.randrange(1, 2 * P + 2)
            found += one.extend(IDS[one.tokens : one.tokens + step], Q4)
        assert tuple(found) == one.keys == keys(IDS)
    assert one.extend((), Q8) == ()


def test_a_cut_chain_goes_on_as_if_it_had_never_been_longer() -> None:
    """Cutting returns the page border to feed from again; the abandoned tokens leave no trace."""
    one = chain()
    one.extend(IDS[:4], Q8)
    one.extend(IDS[4:], Q4)
    assert one.cut(2 * P + 5) == 2 * P
    assert one.cut(2 * P) == 2 * P
    one.extend(tuple(t + 1 for t in IDS[2 * P :]), Q8)
    assert one.cut(P + 1) == P
    assert one.extend(IDS[P:], Q4)[0] != keys(IDS)[1]
    fresh = chain()
    fresh.extend(IDS[:4], Q8)
    fresh.extend(IDS[4:], Q4)
    assert one.keys == fresh.keys
    with pytest.raises(InternalError):
        one.cut(one.tokens + 1)


def test_a_copy_is_independent() -> None:
    """A fork's chain and its parent's go on apart."""
    parent = chain()
    parent.extend(IDS[: P + 2], Q4)
    child = parent.copy()
    child.extend(tuple(t + 1 for t in IDS[P + 2 : 2 * P]), Q4)
    parent.extend(IDS[P + 2 :], Q4)
    assert parent.keys == keys(IDS)
    assert child.keys[0] == parent.keys[0]
    assert child.keys[1] != parent.keys[1]


def test_ids_out_of_range_are_refused_unchanged() -> None:
    """No id can pass for the mark of a format change."""
    one = chain()
    for bad in (-1, 0xFFFF_FFFF):
        with pytest.raises(InternalError):
            one.extend((1, bad), Q4)
    assert one.tokens == 0
    assert one.extend(IDS, Q4) == keys(IDS)


def test_a_long_context_is_hashed_once() -> None:
    """P20: feeding 100,000 tokens page by page saves one digest per page and hashes no token twice."""
    ids = tuple(range(100_000))
    long = chain(page_tokens=256)
    for start in range(0, len(ids), 512):
        long.extend(ids[start : start + 512], Q4)
    assert len(long.keys) == len(set(long.keys)) == 100_000 // 256
    assert long.keys == chain(page_tokens=256).extend(ids, Q4)
