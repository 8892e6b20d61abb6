"""Page files: canonical, readable by ordinary safetensors readers, and any other byte is an error."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.ids import Fingerprint, FormatId, PageId, PageKey
from kvd.quant.spec import PageLayout
from kvd.store.errors import PageCorrupt
from kvd.store.page_file import (
    PageHeader,
    decode_page,
    encode_page,
    file_bytes_for,
    header_bytes,
    parse_header,
)
from kvd.store.records import PositionRun
from tests.support.store_data import FINGERPRINT, hex_of, kv_of, tiny_layout

LAYOUT = tiny_layout(layers=(1, 5), kv_heads=1)


def header(**changes: object) -> PageHeader:
    """A header of `LAYOUT`."""
    base = PageHeader(
        page_id=PageId(hex_of("page")),
        key=PageKey(hex_of("key")),
        fingerprint=FINGERPRINT,
        domain="default",
        group=0,
        format_id=FormatId(LAYOUT.format_id),
        runs=(PositionRun(256, 256),),
        numerics="1/reference",
    )
    return replace(base, **changes)


def file_of(page: PageHeader, layout: PageLayout = LAYOUT, seed: object = 0) -> bytes:
    """The whole file."""
    return b"".join(encode_page(page, layout, kv_of(layout, seed)))


def test_what_was_written_is_read_back() -> None:
    """Round trip, exact length, and the payload is a view, not a copy."""
    data = file_of(header())
    assert len(data) == file_bytes_for(header(), LAYOUT)
    payload = decode_page(data, header(), LAYOUT)
    assert payload == kv_of(LAYOUT, 0)
    assert payload.obj is data


def test_the_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    """A third-party reader finds every tensor with its dtype, shape and bytes, and the metadata."""
    data = file_of(header())
    tensors = dict(safetensors.deserialize(data))
    payload = kv_of(LAYOUT, 0)
    assert set(tensors) == {tensor.name for tensor in LAYOUT.tensors} | {"xxh3_128"}
    for tensor in LAYOUT.tensors:
        found = tensors[tensor.name]
        assert (found["dtype"], tuple(found["shape"])) == (tensor.dtype, tensor.shape)
        assert bytes(found["data"]) == payload[tensor.offset_bytes : tensor.offset_bytes + tensor.tensor_bytes]
    assert bytes(tensors["xxh3_128"]["data"]) == xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    path = tmp_path / "page.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, framework="np") as opened:
        metadata = opened.metadata()
    assert metadata["page_id"] == header().page_id
    assert metadata["runs"] == "256+256"


def test_the_bytes_are_the_same_for_ever() -> None:
    """Files of an older kvd must stay readable: the canonical bytes are pinned by digest."""
    assert hashlib.sha256(header_bytes(header(), LAYOUT)).hexdigest() == PINNED_HEADER
    assert hashlib.sha256(file_of(header())).hexdigest() == PINNED_FILE


def test_the_payload_is_aligned() -> None:
    """Whoever maps the file finds the payload on a multiple of 8 bytes, for any length of the metadata."""
    for length in range(20):
        head = header_bytes(header(domain="d" * length), LAYOUT)
        (json_bytes,) = struct.unpack_from("<Q", head)
        assert len(head) == 8 + json_bytes
        assert len(head) % 8 == 0
        json.loads(head[8:])


@pytest.mark.parametrize(
    "change",
    [
        {"page_id": PageId(hex_of("other"))},
        {"key": PageKey(hex_of("other"))},
        {"fingerprint": Fingerprint(hex_of("other weights"))},
        {"domain": "another"},
        {"group": 1},
        {"format_id": FormatId("q8-000000000000")},
        {"runs": (PositionRun(0, 256),)},
        {"runs": (PositionRun(256, 128), PositionRun(512, 128))},
        {"numerics": "2/reference"},
        {"page_tokens": 128},
    ],
)
def test_a_page_is_only_served_as_itself(change: dict[str, object]) -> None:
    """P7 P19: a good file of other weights, another domain, place, format or numerics is an error."""
    with pytest.raises(PageCorrupt) as caught:
        decode_page(file_of(header()), header(**change), LAYOUT)
    assert caught.value.reason == "header"
    assert caught.value.offset is not None


def test_a_layer_that_changed_its_number_is_an_error() -> None:
    """P4: one flipped bit turns `layers.1` into `layers.5`; with a fitting checksum the header still gives it away."""
    data = bytearray(file_of(header()))
    at = data.index(b"layers.1")
    data[at + 7] = ord("5")
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[:-16]))
    with pytest.raises(PageCorrupt) as caught:
        decode_page(bytes(data), header(), LAYOUT)
    assert (caught.value.reason, caught.value.offset) == ("header", at + 7)


def test_lengths_are_exact() -> None:
    """P3: every shorter and any longer file is an error."""
    data = file_of(header())
    rng = random.Random(1)
    cuts = {0, 1, 7, 8, 9, len(data) - 1, len(data) - 16, *(rng.randrange(len(data)) for _ in range(50))}
    for cut in cuts:
        with pytest.raises(PageCorrupt):
            decode_page(data[:cut], header(), LAYOUT)
    for more in (b"\0", bytes(16), data):
        with pytest.raises(PageCorrupt) as caught:
            decode_page(data + more, header(), LAYOUT)
        assert caught.value.reason == "length"


def test_a_payload_of_another_length_is_not_written() -> None:
    """The mistake is found before the disk is touched."""
    with pytest.raises(PageCorrupt):
        encode_page(header(), LAYOUT, b"short")


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_headers_can_be_read_without_knowing_them(data: st.DataObject) -> None:
    """Recovery without a catalog reads identity from the file: any header comes back equal."""
    text = st.text(max_size=20).filter(lambda value: value.isprintable() or value == "")
    page = header(
        domain=data.draw(text),
        numerics=data.draw(text),
        group=data.draw(st.integers(0, 9)),
        runs=tuple(
            PositionRun(start, tokens)
            for start, tokens in data.draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 256)), max_size=4))
        ),
    )
    head = header_bytes(page, LAYOUT)
    assert parse_header(head + b"more") == (page, len(head))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 40) + b"{}",
        struct.pack("<Q", 21) + b'{"__metadata__":"kvd"}',
        struct.pack("<Q", 60) + b'{"__metadata__":{"format":"kvd-page","version":"2"}}       ',
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_foreign_headers_are_not_taken_for_ours(data: bytes) -> None:
    """None, never an exception."""
    assert parse_header(data) is None


PINNED_HEADER = "3627fd0c33dce84d0cd063f68fb04d98dcc1e9a97d7c071287b903c190597ec9"
PINNED_FILE = "9921f8c24dbc818e1b4b165773b2d3502dea6db29508679eb456490fa891ef6b"
