"""Names of the things kvd owns. All are strings or integers at run time; NewTypes keep them apart in review.

May import nothing.
"""

from __future__ import annotations

from typing import NewType

AgentId = NewType("AgentId", str)
"""What a client calls its agent: 1 to 128 characters, unique inside a namespace."""

Namespace = NewType("Namespace", str)
"""The sharing domain an agent lives in (`default` when the client names none)."""

DEFAULT_NAMESPACE = Namespace("default")

SpaceId = NewType("SpaceId", int)
"""One address space: one branch of one agent. Never reused while the daemon runs."""

PageId = NewType("PageId", str)
"""32 hex digits, unique for ever; names the swap file of a sealed page."""

PageKey = NewType("PageKey", str)
"""32 hex digits, blake2b-128 of everything a page's content depends on; a look-up index, not an identity."""

FrameId = NewType("FrameId", int)
"""A slot of the RAM pool."""

GroupId = NewType("GroupId", int)
"""Index of a cache group in `ModelCacheSpec.groups`."""

FormatId = NewType("FormatId", str)
"""Canonical name of a page format, such as `q4` or `q4c-1f0c9a…` (the digest names the conditioning constants)."""

Fingerprint = NewType("Fingerprint", str)
"""32 hex digits over weights, tokenizer, template and quantisation of a model."""

RequestId = NewType("RequestId", int)
"""One request inside the daemon; unlike the id on the wire it is unique over all connections."""
