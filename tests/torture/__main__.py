"""Run the torture; see the package. Options have the form's figures as defaults."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

import platformdirs

from kvd import launcher

launcher.prepare()

from tests.support.daemon import short_folder  # noqa: E402
from tests.support.tiny_model import make_tiny_model  # noqa: E402
from tests.support.zygote import start_zygote  # noqa: E402
from tests.torture import flips, kills, rivals  # noqa: E402

BAD = ("lost", "wrong answers", "served", "nobody noticed", "crashed")
"""Counts with one of these in their names must be 0."""


def main() -> None:
    """Parse, run, print, and exit with 1 when something was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kill -9 of real daemons under load")
    parser.add_argument("--flips", type=int, default=1000, help="random bits of page files, logs and catalog")
    parser.add_argument("--races", type=int, default=20, help="pairs of daemons on one folder")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of every random choice; printed")
    wanted = parser.parse_args()
    os.umask(0o077)  # daemons want their sockets in folders of nobody else's
    kernels = platformdirs.user_cache_path("kvd-tests", appauthor=False) / "kernels"
    os.environ.setdefault("KVD_KERNEL_CACHE", str(kernels))
    print(f"seed {wanted.seed}", flush=True)
    counts: Counter[str] = Counter()
    with short_folder() as folder, start_zygote() as zygote:
        model = make_tiny_model(folder / "model")
        for name, figure, run in (
            ("flips", wanted.flips, lambda n: flips.run(folder / "f", model, zygote, flips=n, seed=wanted.seed)),
            ("races", wanted.races, lambda n: rivals.run(folder / "r", model, zygote, races=n, seed=wanted.seed)),
            ("kills", wanted.kills, lambda n: kills.run(folder / "k", model, zygote, kills=n, seed=wanted.seed)),
        ):
            if figure:
                began_s = time.monotonic()
                print(f"{name}: {figure}", flush=True)
                counts.update(run(figure))
                print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    for what, count in sorted(counts.items()):
        print(f"{what:32} {count:6,}")
    bad = {what: count for what, count in counts.items() if count and any(word in what for word in BAD)}
    print(f"seed {wanted.seed}: {'FAILED: ' + str(bad) if bad else 'nothing lost, nothing wrong'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
