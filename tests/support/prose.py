"""Text for tests whose length in tokens of the tiny model is known: each of its words is one token there.

A text begins with a space, so that its first word is one token too; two texts put together have the sum of their
tokens.
"""

from __future__ import annotations

import functools
import random
from typing import Final

_TEXT: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which you were
all her she there would their we him been has when who will no more if out so up said what its about than into them can
only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should
"""
WORDS: Final = tuple(_TEXT.split())


@functools.cache
def prose(tokens: int, seed: int | str) -> str:
    """Seeded words, exactly `tokens` tokens of the tiny model.

    Args:
        tokens: words, one token each.
        seed: equal seeds give texts one of which begins with the other; unequal ones differ from the first words on.
    """
    choice = random.Random(str(seed))
    return "".join(f" {choice.choice(WORDS)}" for _ in range(tokens))
