"""Whether property tests take the same examples each time, fewer of them, or look for new ones (`make test-long`)."""

from __future__ import annotations

import os
from typing import Final

PROFILE: Final = os.environ.get("KVD_TEST_EXAMPLES", "same")
SAME_EXAMPLES: Final = PROFILE == "same"

__all__ = ["PROFILE", "SAME_EXAMPLES"]
