"""The size parser and formatter."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidParams
from kvd.ops import InvalidSize, format_size, parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1_000_000", 1_000_000),
        ("100K", 100_000),
        ("100k", 100_000),
        ("100Ki", 102_400),
        ("40MB", 40_000_000),
        ("40 MB", 40_000_000),
        (" 40mb ", 40_000_000),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("10.2GB", 10_200_000_000),
        ("10.2G", 10_200_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2TB", 2 * 10**12),
        ("1PiB", 2**50),
        ("17B", 17),
        ("1.0009K", 1_000),
        (40_000_000, 40_000_000),
    ],
)
def test_forms_that_people_write(text: str | int, size_bytes: int) -> None:
    """P39: `100K` and its relatives are sizes; figures are exact, decimal and binary units differ."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "K",
        "GB",
        "-1",
        "-1GB",
        "+5",
        "1e9",
        "1.GB",
        ".5GB",
        "10,2GB",
        "1__0",
        "_1",
        "1_",
        "10 GB s",
        "10.2.1GB",
        "nan",
        "inf",
        "0x10",
        "1iB",
        "1KBiB",
        "1KK",
        "1 0GB",
        "\u0661GB",
        "1\u00a0GB",
        "10GBit",
        "40MB\n40MB",
        True,
        -5,
    ],
)
def test_everything_else_is_refused_with_the_allowed_forms(text: str | int) -> None:
    """P39: a text that is no size is a caller's error that names the setting and lists what is allowed."""
    with pytest.raises(InvalidSize, match=r"10\.2GB") as caught:
        parse_size(text, what="--budget")
    assert "--budget" in caught.value.message
    assert caught.value.data["value"] == str(text)
    assert isinstance(caught.value, InvalidParams)


def test_a_size_that_fits_nowhere_is_refused() -> None:
    """More than a signed 64-bit number of bytes."""
    assert parse_size("8EB".replace("EB", "000PB")) == 8 * 10**18
    with pytest.raises(InvalidSize, match="limit"):
        parse_size("9999999999999999999999PB")


@given(st.text(max_size=30))
def test_no_text_crashes_the_parser(text: str) -> None:
    """P39: any text is a size or an InvalidSize."""
    with contextlib.suppress(InvalidSize):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1024, "1.02 KB"),
        (10_200_000_000, "10.2 GB"),
        (40_000_000, "40 MB"),
        (999_999, "1 MB"),
        (123_456_789, "123 MB"),
        (-40_000_000, "-40 MB"),
        (2**63 - 1, "9.22 EB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size_bytes: int, text: str) -> None:
    """Decimal units, no trailing zeros, rounded up into the next unit where that is nearer."""
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=10**17))
def test_what_is_shown_can_be_typed(size_bytes: int) -> None:
    """The formatter's text is a size within half a percent of the figure."""
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= size_bytes / 200


@pytest.mark.parametrize(
    ("text", "share"), [("50%", 0.5), (" 12.5 % ", 0.125), ("0%", 0.0), ("100%", 1.0), ("4GB", 4_000_000_000), ("7", 7)]
)
def test_a_share_is_a_part_or_bytes(text: str, share: int | float) -> None:
    """P39: what ends in % becomes a float, everything else an int."""
    parsed = parse_share(text)
    assert parsed == share
    assert type(parsed) is type(share)


@pytest.mark.parametrize("text", ["101%", "%", "-1%", "1e1%", "nan%", "١%", "half", ""])
def test_what_is_no_share_is_refused(text: str) -> None:
    """The error names the setting and what is allowed."""
    with pytest.raises(InvalidSize, match=r"pin-limit .* is not a "):
        parse_share(text, what="pin-limit")
