// What the gateway told, put together: agents with their pages, figures, events, the daemon.

/** States of pages in the order of the legend: how a mark is drawn, and its words. */
export const MARKS = {
  clean: { shape: "full", color: "--ram", words: "in RAM and on disk" },
  sealed_dirty: { shape: "full", color: "--dirty", words: "in RAM only" },
  writing: { shape: "top", color: "--dirty", words: "being written" },
  filling: { shape: "half", color: "--ram", words: "open page in RAM" },
  packed: { shape: "half", color: "--ram", words: "open page in RAM, packed" },
  loading: { shape: "diamond", color: "--moving", words: "being read" },
  loading_tail: { shape: "diamond", color: "--moving", words: "open page, being read" },
  evicted: { shape: "hollow", color: "--disk", words: "on disk" },
  stashed: { shape: "low", color: "--disk", words: "open page, on disk" },
  lost: { shape: "cross", color: "--lost", words: "lost: will be computed again" },
};
export const SHARED = 16;
export const BEHIND = 32;
export const PINNED = 64;
const CODES = 128;

const MAX_EVENTS = 1500;
const MAX_EARLY = 1000;
const MAX_SAMPLES = 240;

export class State {
  agents = new Map(); // key -> agent
  events = [];
  samples = []; // {time_s, read, written, tokens}: a second each, at least
  figures = {};
  daemon = {};
  states = [];
  offset_s = 0; // the gateway's clock less this one's
  skipped = 0;
  #seen = 0;
  #early = new Map(); // histories of agents that were not told yet: a turn's events come before the next picture of pages

  /** Take in a picture; returns what changed: sets of keys, and whether agents came or went. */
  apply(picture) {
    const changed = new Set();
    let listed = picture.full;
    this.offset_s = picture.now_s - Date.now() / 1000;
    if (picture.daemon) {
      this.daemon = picture.daemon;
      this.states = picture.daemon.states ?? [];
    }
    if (picture.full) {
      const here = new Set(picture.agents.map(keyOf));
      for (const key of this.agents.keys()) if (!here.has(key)) this.agents.delete(key);
      this.events = [];
      this.#early.clear();
    }
    for (const [namespace, agent] of picture.gone ?? []) {
      listed = this.agents.delete(keyOf({ namespace, agent })) || listed;
    }
    for (const told of picture.agents ?? []) {
      const key = keyOf(told);
      const before = this.agents.get(key);
      listed = listed || !before;
      // views hold on to an agent's object, so it stays the same one
      if (before) Object.assign(before, agentOf(key, told, before.history));
      else this.agents.set(key, agentOf(key, told, this.#early.get(key) ?? []));
      this.#early.delete(key);
      changed.add(key);
    }
    for (const { namespace, agent, turns } of picture.histories ?? []) {
      const key = keyOf({ namespace, agent });
      const found = this.agents.get(key);
      if (found) {
        found.history = turns;
        changed.add(key);
      } else if (this.#early.size < MAX_EARLY) this.#early.set(key, turns);
    }
    if (picture.skipped) this.skipped += 1;
    for (const event of picture.events ?? []) this.events.push({ ...event, number: ++this.#seen });
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
    if (picture.figures) this.#sample(picture.figures);
    return { changed, listed, figures: Boolean(picture.figures), events: Boolean(picture.events) };
  }

  /** The daemon's time now, in seconds since the epoch. */
  now() {
    return Date.now() / 1000 + this.offset_s;
  }

  #sample(figures) {
    const last = this.samples.at(-1);
    const [read, written, tokens] = [figures.bytes_read, figures.bytes_written, figures.decode_rows];
    this.figures = figures;
    if (last && (read < last.read || written < last.written || tokens < last.tokens)) this.samples = []; // another run
    else if (last && figures.time_s - last.time_s < 1) return;
    this.samples.push({ time_s: figures.time_s, read, written, tokens });
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
  }

  /** Bytes and tokens a second between neighbouring samples of the last `span_s` seconds. */
  rates(span_s) {
    const from = this.now() - span_s;
    const found = [];
    for (let at = 1; at < this.samples.length; at += 1) {
      const [a, b] = [this.samples[at - 1], this.samples[at]];
      const seconds = b.time_s - a.time_s;
      if (b.time_s < from || seconds <= 0) continue;
      found.push({
        time_s: b.time_s,
        read: (b.read - a.read) / seconds,
        written: (b.written - a.written) / seconds,
        tokens: (b.tokens - a.tokens) / seconds,
      });
    }
    return found;
  }
}

/** One string for namespace and name; both may hold anything. */
export function keyOf({ namespace, agent }) {
  return JSON.stringify([namespace, agent]);
}

function agentOf(key, told, history) {
  const segments = [];
  let length = 0;
  const current = told.branches?.[0];
  for (const { group, runs } of current?.segments ?? []) {
    let pages = 0;
    for (let at = 1; at < runs.length; at += 2) pages += runs[at];
    segments.push({ group, start: length, end: length + pages, runs });
    length += pages;
  }
  const cells = new Uint8Array(length);
  for (const { start, runs } of segments) {
    let place = start;
    for (let at = 0; at < runs.length; at += 2) {
      cells.fill(runs[at] % CODES, place, place + runs[at + 1]);
      place += runs[at + 1];
    }
  }
  return { ...told, branches: told.branches?.length ?? 0, key, segments, cells, history };
}

/** A page's code in words. */
export function wordsOf(code, states) {
  const name = states[code & 15] ?? "unknown";
  const words = [MARKS[name]?.words ?? name];
  if (code & SHARED) words.push("shared");
  if (code & PINNED) words.push("pinned");
  if (code & BEHIND) words.push("behind the window");
  return words.join(", ");
}

/** Part of the prompt's tokens that was reused; null before the first turn. */
export function hitRate(agent) {
  return agent.prompt_tokens ? agent.cached_tokens / agent.prompt_tokens : null;
}

/** Bytes as people read them: decimal units, three digits. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let number = value;
  while (number >= 999.5 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit && number < 9.995 ? number.toFixed(2) : unit && number < 99.95 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

const numbers = new Intl.NumberFormat("en");
export const count = (value) => numbers.format(value ?? 0);
export const percent = (part) => (part === null ? "–" : `${Math.round(part * 100)} %`);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
