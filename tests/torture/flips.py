"""Random single bits flip in page files, logs and the catalog of a folder that daemons left behind by `kill -9`.

After each flip the folder is opened as a start does, every agent is woken and every page and tail read. What is served
must be, byte for byte, what was there before the flip; what is not served must be said. Then the folder is put back.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvd.ids import Fingerprint
from kvd.model.cache_spec import build_cache_spec
from kvd.model.folder import ModelFolder
from kvd.quant.spec import PageLayout
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader
from kvd.store.recovery import recover
from kvd.store.swap_ops import ReadPageOp, ReadTailOp, WakeLogOp
from kvd.store.swap_store import SwapStore
from tests.support.daemon import Daemon
from tests.support.prose import prose
from tests.support.zygote import Zygote

AGENTS = 4
KV_FORMAT = "k8v4"


@dataclass
class Served:
    """Everything a folder serves.

    Attributes:
        tokens, text: by agent.
        pages: payload by page id.
        tails: by agent and group, with how many tokens the branch has.
        said: something was found wrong.
    """

    tokens: dict[str, tuple[int, ...]]
    text: dict[str, bytes]
    pages: dict[str, bytes]
    tails: dict[tuple[str, int], tuple[int, bytes]]
    said: bool


def run(folder: Path, model: Path, zygote: Zygote | None, *, flips: int, seed: int) -> Counter[str]:
    """Flip bits one at a time; returns counts."""
    chance = random.Random(seed)
    daemon = Daemon(folder, model, ("--sharing", "agent", "--kv-format", KV_FORMAT), zygote=zygote)
    folder.mkdir(parents=True)
    daemon.start()
    for agent in range(AGENTS):
        daemon.client.inject(f"agent-{agent}", prose(300 * (agent + 1), f"{agent}"))
        daemon.client.generate(f"agent-{agent}", prose(300 * (agent + 1), f"{agent}") + " on", max_tokens=4)
    facts = daemon.client.call("model.info")
    assert isinstance(facts, dict)
    daemon.kill()
    spec = build_cache_spec(
        ModelFolder(model.name, model).config(),
        model_name=model.name,
        fingerprint=Fingerprint(str(facts["fingerprint"])),
        item_bytes=2,
    )
    layouts = [group.layout(group.format(KV_FORMAT)) for group in spec.groups]
    kept = folder / "kept"
    shutil.copytree(daemon.data_dir, kept, ignore=shutil.ignore_patterns("*.sock"))
    truth = serve(daemon.data_dir, spec.fingerprint, layouts, read_agents=99)
    assert not truth.said
    assert len(truth.tokens) == AGENTS
    kinds = {
        "page files": sorted(kept.glob(f"{spec.fingerprint}/swap/*/*")),
        "logs": sorted(kept.glob(f"{spec.fingerprint}/agents/*")),
        "the catalog": sorted(path for path in kept.glob(f"{spec.fingerprint}/catalog*") if path.stat().st_size),
    }
    counts: Counter[str] = Counter()
    for number in range(flips):
        shutil.rmtree(daemon.data_dir)
        shutil.copytree(kept, daemon.data_dir)
        daemon.data_dir.chmod(0o700)
        kind = chance.choice(sorted(kinds))
        path = daemon.data_dir / chance.choice(kinds[kind]).relative_to(kept)
        data = bytearray(path.read_bytes())
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        found = serve(daemon.data_dir, spec.fingerprint, layouts, read_agents=chance.choice((0, 99)))
        counts[f"flips in {kind}"] += 1
        wrong = wrong_things(found, truth)
        silent = kind != "the catalog" and not found.said
        if wrong or silent:
            counts["flips served" if wrong else "flips nobody noticed"] += 1
            print(f"  FAULT flip {number}: bit {bit} of {path.relative_to(daemon.data_dir)}: {wrong}", flush=True)
    counts["flips"] = flips
    counts["flips served"] += 0
    return counts


def serve(root: Path, fingerprint: Fingerprint, layouts: list[PageLayout], *, read_agents: int) -> Served:
    """Open a folder as a start does and read everything there is."""
    fs = RealFileSystem()
    folder = DataFolder(root, fs)
    folder.open()
    known = {(group, layout.format_id): layout for group, layout in enumerate(layouts)}

    def layout(group: int, format_id: str) -> PageLayout | None:
        return known.get((group, format_id))

    report = recover(folder, fingerprint, layout, fs, read_agents=read_agents)
    store = SwapStore(
        folder=folder, fingerprint=fingerprint, fs=fs, quota_bytes=1 << 40, layouts=layout, recovered=report
    )
    served = Served({}, {}, {}, {}, bool(report.log_troubles or report.missing_pages))
    images = dict(report.agents)
    headers: dict[str, PageHeader] = dict(report.pages)
    for ref in report.asleep:
        woken = store.perform(WakeLogOp(*ref))
        served.said |= woken.error is not None or bool(woken.facts)
        if woken.image is not None:
            images[ref] = woken.image
    for (namespace, agent), image in images.items():
        served.tokens[agent], served.text[agent] = image.branch.tokens, image.branch.text
        for segment in image.branch.segments:
            for page in segment.pages:
                if page.page_id in headers:
                    loaded = store.perform(ReadPageOp(headers[page.page_id], layouts[segment.group]))
                    served.said |= loaded.error is not None
                    if loaded.payload is not None:
                        served.pages[page.page_id] = bytes(loaded.payload)
            tail = store.perform(ReadTailOp(namespace, agent, image.current, segment.group))
            served.said |= tail.error is not None
            if tail.payload is not None:
                served.tails[agent, segment.group] = len(image.branch.tokens), bytes(tail.payload)
    store.close()
    folder.close()
    return served


def wrong_things(found: Served, truth: Served) -> str:
    """What is served and was not there before; empty when all is right or absent."""
    wrong = [agent for agent, tokens in found.tokens.items() if tokens != truth.tokens[agent][: len(tokens)]]
    wrong += [agent for agent, text in found.text.items() if not truth.text[agent].startswith(text)]
    wrong += [page for page, payload in found.pages.items() if payload != truth.pages[page]]
    wrong += [
        f"tail of {agent}"
        for (agent, group), (tokens, tail) in found.tails.items()
        if tokens == truth.tails[agent, group][0] and tail != truth.tails[agent, group][1]
    ]
    return ", ".join(wrong)
