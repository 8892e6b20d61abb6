"""The page at `/` in a real headless Chromium, in front of a real daemon; skipped where there is no browser.

`make browser-deps` installs one where that can be done. Nothing here depends on how fast anything is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.gateway import read_key_file
from tests.front.service import serving
from tests.gateway.monitored import HOSTILE, MonitoredDaemon
from tests.gateway.serving import Served, gateway
from tests.support.chromium import Browser, Page, browser, find_chromium, installed, why_not
from tests.support.daemon import Daemon, eventually, short_folder
from tests.support.prose import prose
from tests.support.zygote import start_zygote

pytestmark = pytest.mark.daemon

LIVE = "document.getElementById('link').dataset.state === 'live'"
PHONE = {"width": 360, "height": 740}
CELLS = "JSON.stringify(Object.fromEntries([...kvd.state.agents.values()].map(a => [a.agent, [...a.cells]])))"
STATES = "kvd.state.states"
AGENTS = ("coder", "planner", "reviewer")
KEY = "k" * 24
STILL = """(async () => {
  for (let [same, last] = [0, -1]; same < 5; same += 1) {
    await new Promise(requestAnimationFrame);
    if (kvd.map.drawn !== last) [same, last] = [0, kvd.map.drawn];
  }
  return kvd.map.drawn;
})()"""
"""Marks drawn so far, once nothing more is drawn for some frames."""
CONTRAST = """(() => {
  const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const paper = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if ((color[3] ?? 1) === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility()) continue;
    const [a, b] = [rgb(getComputedStyle(element).color), paper(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return [...found];
})()"""
"""Elements with text of too little contrast (WCAG 2.1, 1.4.3)."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all."""
    if not installed():
        pytest.skip("no Chromium yet: tools/browser_deps.sh still installs one")
    program = find_chromium()
    if program is None:
        pytest.skip(why_not())
    with browser(program) as running:
        yield running


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path) -> Iterator[Daemon]:
    """A daemon with three agents: one in RAM, one that shares its beginning, one whose prompt left its text."""
    with short_folder() as folder, start_zygote() as zygote, Daemon(folder, tiny_model_dir, zygote=zygote) as running:
        running.client.inject("planner", prose(1100, "planner"))
        running.client.fork("planner", "reviewer", tokens=600)
        running.client.generate("coder", prose(300, "coder") + HOSTILE + " one", max_tokens=4)
        running.client.generate("coder", prose(300, "coder") + "<b>bold</b> other words", max_tokens=4)
        yield running


@pytest.fixture(scope="module")
def served(daemon: Daemon) -> Iterator[Served]:
    """The gateway in front of it."""
    with gateway(daemon.socket, show_divergence=True) as running:
        running.run(look_on(running))
        running.ask("GET", "/monitor")
        yield running


async def look_on(served: Served) -> None:
    """A viewer that never leaves: no test is blamed for the connections that the first one brings about."""
    served.gateway.watch.enter()


@pytest.fixture(scope="module")
def page(chromium: Browser, served: Served) -> Iterator[Page]:
    """The page, live; looked at by several tests, none of which it minds."""
    with opened(chromium, served.url) as shown:
        shown.until(f"{LIVE} && kvd.state.agents.size === 3", "the page shows three agents")
        yield shown


@contextmanager
def opened(chromium: Browser, url: str, **look: Any) -> Iterator[Page]:
    """A page at an address, closed at the end."""
    shown = chromium.page(**look)
    try:
        shown.open(url + "/")
        yield shown
    finally:
        shown.close()


def drawn(page: Page) -> dict[str, list[str]]:
    """States of the pages that the map has, by agent."""
    states = page.run(STATES)
    return {agent: [states[code & 15] for code in codes] for agent, codes in json.loads(page.run(CELLS)).items()}


def resident(daemon: Daemon) -> dict[str, list[str]]:
    """The same, as the daemon's `residency` tells it."""
    found = {}
    for name in AGENTS:  # by name: one that nobody used since the start is listed by no other call
        branches = daemon.client.residency(name)["agents"][0]["branches"]
        segments = next(each for each in branches if each["current"])["segments"]
        pages = [page for each in segments for page in [*each["pages"], *([each["tail"]] if each["tail"] else [])]]
        found[name] = [page["state"] for page in pages]
    return found


def words(page: Page, selector: str) -> str:
    """The text of an element."""
    found: str = page.run(f"document.querySelector({json.dumps(selector)}).textContent")
    return found


def test_the_page_shows_every_page_of_every_agent(page: Page, daemon: Daemon, served: Served) -> None:
    """Without a complaint of the browser, from this gateway alone; marks are the daemon's pages, gauges its figures."""
    eventually(lambda: drawn(page) == resident(daemon), "the map has what the daemon says")  # writes end by themselves
    expected = resident(daemon)
    assert sum(page.run("Object.values(kvd.map.counts())")) == sum(map(len, expected.values()))
    assert page.run("kvd.map.drawn") >= sum(map(len, expected.values()))
    assert page.run("document.getElementById('budget').ariaValueMax") == str(daemon.statistics()["budget_bytes"])
    assert "of" in words(page, "#disk-text")
    assert page.complaints() == []
    assert {url.split("/")[2] for url in page.requested()} == {served.url.removeprefix("http://")}


def test_an_eviction_shows_in_map_and_time_line(page: Page, daemon: Daemon) -> None:
    """What a client does is on the page without a reload, and so is the fault that brings the pages back."""
    daemon.client.generate("planner", prose(1100, "planner"), max_tokens=1)  # it may have been on disk
    daemon.client.evict("planner")
    cells = "[...kvd.state.agents.values()].find(a => a.agent === 'planner').cells"
    on_disk = f"{cells}.filter(c => kvd.state.states[c & 15] === 'evicted').length"
    told = "[...document.querySelectorAll('#time-list li')].map(li => li.textContent)"
    page.until(f"{on_disk} >= 2", "pages are on disk in the map")
    page.until(
        f"{told}.some(t => t.includes('planner') && t.includes('evicted (asked for)'))", "the list has the eviction"
    )
    assert "evicted" in page.run("document.getElementById('time').getAttribute('aria-label')")
    daemon.client.generate("planner", prose(1100, "planner"), max_tokens=1)
    page.until(f"{on_disk} === 0", "pages are back in the map")
    page.until(f"{told}.some(t => /planner.* faulted in/.test(t))", "the list has the fault")


def test_hostile_text_stays_text(page: Page) -> None:
    """P12: the place and text where a prompt left the stored one, `<script>` and all, and nothing of it is markup."""
    cell = "#agents tbody tr:nth-child(1) td:last-child"
    page.until(f"document.querySelector({json.dumps(cell)}).textContent.includes('script')", "the miss is told")
    assert "<script>document.title=" in words(page, cell + " .text")
    assert "b>bold</b>" in words(page, cell + " .text.asked")
    page.run("document.querySelector('#agents tbody button').click()")
    page.until("document.querySelector('#agents .more')", "the history is open")
    assert "≠" in words(page, "#agents .more")
    assert page.run("document.querySelectorAll('#agents script, #agents b, #agents img').length") == 0
    assert page.run("document.title") == "kvd"
    page.run("document.querySelector('#agents tbody button').click()")
    assert page.complaints() == []


def test_the_map_is_for_keyboards_fingers_and_readers(page: Page, chromium: Browser, served: Served) -> None:
    """Arrows walk over the pages, each is told in words; every control has a name; a tap tells, too."""
    page.run("document.getElementById('map').focus()")
    told = []
    for key in ("ArrowRight", "PageDown", "End"):
        page.key(key)
        told.append(words(page, "#map-info"))
    assert told[0].startswith("coder: page 2 of")
    assert told[1].startswith("planner: page 1 of")
    assert "open page" in told[2]
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "searchbox", "combobox", "meter", "application", "image", "img", "row", "table")
    unnamed = [
        (node["role"]["value"], node.get("description"))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles[:-2] and not node.get("name", {}).get("value")
    ]
    assert unnamed == []
    assert {node["role"]["value"] for node in tree} >= {"table", "row", "meter", "application", "status"}
    with opened(chromium, served.url, **PHONE) as phone:
        phone.until(f"{LIVE} && document.getElementById('map').clientHeight > 0", "the phone shows the map")

        def tapped() -> bool:  # figures that come may move the map under the finger
            phone.run("document.getElementById('map').scrollIntoView({block: 'center'})")
            box = phone.run("(b => [b.left, b.top])(document.getElementById('map').getBoundingClientRect())")
            phone.tap(box[0] + 9, box[1] + 4 + 16 + 5)
            return words(phone, "#map-info").startswith("coder: page 1")

        eventually(tapped, "the tap tells")


def test_it_can_be_read_in_every_light(chromium: Browser, served: Served, tmp_path: Path) -> None:
    """In the dark, on a phone and as print is: nothing is wider than the screen, no text has too little contrast."""
    with opened(chromium, served.url) as shown:
        shown.until(f"{LIVE} && document.querySelectorAll('#agents .turn.miss').length > 0", "the page is live")
        shown.run("document.querySelector('#agents tbody button').click()")
        for number, look in enumerate(({"dark": True}, {}, PHONE, PHONE | {"dark": True, "still": True})):
            shown.look(**({"width": 1280, "height": 900} | look))
            shown.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert shown.run("document.documentElement.scrollWidth <= innerWidth"), f"{look} scrolls sideways"
            assert shown.run(CONTRAST) == [], look
            assert shown.screenshot(tmp_path / f"page-{number}.png", whole=True).stat().st_size > 10_000
        assert shown.complaints() == []


@pytest.mark.leaks("the daemon is another process afterwards, and so are the connections to it")
def test_a_daemon_that_was_killed_is_told_and_comes_back(page: Page, daemon: Daemon) -> None:
    """`kill -9` of the daemon: the page says so and since when; after the restart it is live again, with the agents."""
    daemon.kill()
    page.until("document.getElementById('link').textContent.startsWith('daemon away since')", "the page says so")
    assert page.run("document.title").startswith("✕")
    daemon.start()
    page.until(f"{LIVE} && document.getElementById('link').textContent.includes('daemon back since')", "it is back")
    assert page.run("kvd.state.agents.size") == 3
    assert page.complaints() == []


# ---- in front of a daemon that is made up ---------------------------------------------------------------------------


@contextmanager
def made_up(daemon: MonitoredDaemon, **settings: Any) -> Iterator[Served]:
    """A gateway in front of it."""
    with (
        short_folder() as folder,
        serving(folder / "kvd.sock", daemon),
        gateway(folder / "kvd.sock", **settings) as served,
    ):
        yield served


def test_a_key_is_asked_for_and_opens_one_namespace(chromium: Browser, tmp_path: Path) -> None:
    """P19, P37: the page is empty before; a wrong key is told; the key is in no address and in this tab alone."""
    path = tmp_path / "keys"
    path.write_text(f"{KEY} team\n")
    path.chmod(0o600)
    daemon = MonitoredDaemon(agents=4, namespaces=("default", "team"))
    daemon.figures["agents_untold"] = 1234
    with made_up(daemon, keys=read_key_file(path)) as served, opened(chromium, served.url) as shown:
        asked = "document.getElementById('ask').open"
        for key in ("wrong" * 5, KEY):
            shown.until(asked, "the key is asked for")
            shown.run(f"document.getElementById('ask-key').value = '{key}'")
            shown.run("document.querySelector('#ask button').click()")
            if key != KEY:
                shown.until("document.getElementById('ask-wrong').textContent !== ''", "a wrong key is told")
        shown.until(LIVE, "the page is live")
        assert not shown.run(asked)
        assert shown.run("[...kvd.state.agents.values()].map(a => a.agent)") == ["agent-001", "agent-003"]
        shown.until("kvd.state.figures.agents_untold", "the figures are there")
        assert words(shown, "#agents-untold").startswith("1,234 more agents of the daemon, asleep")
        assert shown.run("document.getElementById('agents-untold').hidden") is False
        daemon.do(lambda: daemon.say("reload", outcome="refused", settings=[], reason="the quota of default"))
        shown.until("document.querySelector('#time-list li')", "the event is listed")
        assert words(shown, "#time-list li span") == "configuration refused: the daemon's log says why"
        assert not any(KEY in url for url in shown.requested())
        assert shown.run("[localStorage.length, sessionStorage.length]") == [0, 1]
        assert shown.call("Network.getCookies")["cookies"] == []
        wrong = [each for each in shown.complaints() if "401" not in each]
        assert wrong == []


def test_a_gateway_that_comes_back_is_found(chromium: Browser) -> None:
    """The page says since when it is away, and goes on by itself when it is there again."""
    with made_up(MonitoredDaemon(agents=2)) as served, opened(chromium, served.url) as shown:
        shown.until(LIVE, "the page is live")
        served.loop.call_soon_threadsafe(served.gateway.stop)
        shown.until("document.getElementById('link').dataset.state === 'away'", "the page says that it is away")
        served.loop.call_soon_threadsafe(served.gateway.page.go_on)
        shown.until(f"{LIVE} && kvd.link.reconnects > 0", "it is live again")
        assert shown.run("kvd.state.agents.size") == 2


def test_many_pages_are_drawn_where_they_are_seen_and_when_they_change(chromium: Browser) -> None:
    """20,000 pages of 100 agents: those in sight are drawn, and of a change only the pages that changed."""
    daemon = MonitoredDaemon(agents=100, pages=200)
    with made_up(daemon) as served, opened(chromium, served.url) as shown:
        shown.until(f"{LIVE} && kvd.map.drawn > 0", "the map is drawn")
        assert sum(shown.run("Object.values(kvd.map.counts())")) == 20_000
        before = shown.run(STILL)
        assert before < 20_000
        key = ("default", "agent-000")

        def drop() -> None:
            cells = daemon.agents[key]["cells"]
            cells[3:8] = [9] * 5
            daemon.touch(key)

        daemon.do(drop)
        cells = "[...kvd.state.agents.values()][0].cells"
        shown.until(f"{cells}[3] === 9", "the change is there")
        after = shown.run(STILL)
        assert after - before == 5
        shown.run("document.getElementById('map-scroll').scrollTop = 1e6")
        shown.until(f"kvd.map.drawn > {after}", "others are drawn when they come in sight")
        shown.run(
            "(f => { f.value = 'agent-07'; f.dispatchEvent(new Event('input')); })(document.getElementById('filter'))"
        )
        shown.until("Object.keys(kvd.map.counts()).length === 10", "the filter narrows the map")
        shown.until("document.querySelectorAll('#agents tbody tr').length === 10", "and the table")
        assert shown.complaints() == []
