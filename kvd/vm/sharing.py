"""Sealed pages by their text: which pages of a sharing domain a prompt begins with.

Theory of operation. A tree per domain. A node stands for a page after those of its parent, named by the length of its
text and a digest of text and control borders; so a prompt finds it without knowing anybody's ids, and what is control
text on one side only never matches (`kvd.vm.prefix`). Texts of one place may be stored with different ids, which makes
different pages of different lengths: a look-up goes down every branch of the tree that the prompt agrees with, and
feeds the prompt's bytes to one digest per node, read at each length that occurs. Its cost is that of hashing the
prompt, however many agents there are.

A node holds no text, only which spaces pass through it. Digests say where to look; whoever uses a place compares the
text itself. Spaces are put in, cut and taken out by the owner, page by page.

May import kvd.ids and kvd.vm.text.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvd.ids import SpaceId
from kvd.vm.text import Span, TypedText

DIGEST_BYTES: Final = 16

_MARK: Final = b"\xff"
"""Stands in the digested bytes where control text begins or ends; no UTF-8 text has it."""


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """A run of pages whose text a prompt begins with.

    Attributes:
        pages: how many, from position 0.
        end_bytes: length of their text.
        spaces: who maps them, in the order they came.
    """

    pages: int
    end_bytes: int
    spaces: tuple[SpaceId, ...]


@dataclass(eq=False, slots=True)
class _Node:
    """A page by its text. `lengths` counts the children of each length in bytes."""

    parent: _Node | None
    name: tuple[int, bytes]
    pages: int
    end_bytes: int
    children: dict[tuple[int, bytes], _Node] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    spaces: dict[SpaceId, None] = field(default_factory=dict)


class PageTexts:
    """The pages of one domain by their text. Mutated by its owner through `append`, `cut` and `forget` only."""

    def __init__(self) -> None:
        self._root = _Node(None, (0, b""), 0, 0)
        self._ends: dict[SpaceId, _Node] = {}
        self._nodes = 0

    def __len__(self) -> int:
        """Page texts that are known."""
        return self._nodes

    def pages(self, space: SpaceId) -> int:
        """Pages of a space that are known."""
        return self._ends.get(space, self._root).pages

    def end_bytes(self, space: SpaceId) -> int:
        """Length of their text."""
        return self._ends.get(space, self._root).end_bytes

    def append(self, space: SpaceId, data: bytes, borders: Sequence[int]) -> None:
        """A space has one more sealed page.

        Args:
            space: whose.
            data: the page's text: the bytes that its tokens stand for.
            borders: offsets in `data` where control text begins or ends, ascending.
        """
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        _feed(digest, memoryview(data), 0, len(data), borders)
        parent = self._ends.get(space, self._root)
        name = (len(data), digest.digest())
        node = parent.children.get(name)
        if node is None:
            node = parent.children[name] = _Node(parent, name, parent.pages + 1, parent.end_bytes + len(data))
            parent.lengths[len(data)] = parent.lengths.get(len(data), 0) + 1
            self._nodes += 1
        node.spaces[space] = None
        self._ends[space] = node

    def cut(self, space: SpaceId, pages: int) -> None:
        """A space has `pages` sealed pages at most."""
        node = self._ends.get(space)
        while node is not None and node.parent is not None and node.pages > pages:
            del node.spaces[space]
            if not node.spaces:  # then it has no children either: they would hold one of its spaces
                self._drop(node, node.parent)
            node = node.parent
        if node is self._root:
            self._ends.pop(space, None)
        elif node is not None:
            self._ends[space] = node

    def forget(self, space: SpaceId) -> None:
        """A space is gone."""
        self.cut(space, 0)

    def find(self, prompt: TypedText) -> list[SharedPlace]:
        """All runs of pages whose text the prompt begins with, the longest text first."""
        data, borders = memoryview(prompt.data), control_borders(prompt.spans)
        found: list[SharedPlace] = []
        ahead = [self._root]
        while ahead:
            node = ahead.pop()
            if node.pages:
                found.append(SharedPlace(node.pages, node.end_bytes, tuple(node.spaces)))
            digest, at = hashlib.blake2b(digest_size=DIGEST_BYTES), node.end_bytes
            for length in sorted(node.lengths):
                end = node.end_bytes + length
                if end > len(data):
                    break
                _feed(digest, data, at, end, borders)
                at = end
                child = node.children.get((length, digest.digest()))  # reading it does not end it
                if child is not None:
                    ahead.append(child)
        return sorted(found, key=lambda place: (-place.end_bytes, place.pages))

    def _drop(self, node: _Node, parent: _Node) -> None:
        del parent.children[node.name]
        length = node.name[0]
        parent.lengths[length] -= 1
        if not parent.lengths[length]:
            del parent.lengths[length]
        self._nodes -= 1


def control_borders(spans: Iterable[Span]) -> list[int]:
    """Offsets in bytes where control text begins or ends, ascending; text begins as no control text."""
    borders: list[int] = []
    end, is_control = 0, False
    for span in spans:
        if span.text_bytes and (span.kind == "control") != is_control:
            is_control = not is_control
            borders.append(end)
        end += span.text_bytes
    return borders


def _feed(digest: hashlib.blake2b, data: memoryview, start: int, end: int, borders: Sequence[int]) -> None:
    """Digest `data[start:end]` with a mark before each byte at a border."""
    for border in borders[bisect_left(borders, start) : bisect_left(borders, end)]:
        digest.update(data[start:border])
        digest.update(_MARK)
        start = border
    digest.update(data[start:end])
