// The residency map: a mark a page, agents below each other, on a canvas that is as large as what can be seen.
//
// The canvas stays in place while its container scrolls over a space of the whole height; only agents in sight are
// drawn. Marks are painted once for a size and a colour scheme and then copied. Of an agent that changed, only the
// pages that changed are drawn again.

import { BEHIND, MARKS, PINNED, SHARED, plural, wordsOf } from "/static/state.js";

const GAP = 1;
const NARROW = 600;
const RIM = 4; // room for the ring that shows the focus
const CELLS = [[200, 22], [1000, 16], [3000, 13], [12_000, 10], [Infinity, 8]]; // up to so many pages: pixels of a mark
const NARROW_CELLS = [[200, 18], [1000, 14], [4000, 11], [Infinity, 8]];
const FONT = "12px system-ui, sans-serif";

export class ResidencyMap {
  #state;
  #canvas = document.getElementById("map");
  #scroll = document.getElementById("map-scroll");
  #space = document.getElementById("map-space");
  #info = document.getElementById("map-info");
  #tip = document.getElementById("tip");
  #paper = this.#canvas.getContext("2d", { alpha: false });
  #agents = []; // those shown, in order
  #rows = new Map(); // key -> {top, height, perRow, left, drawn, label}
  #dirty = new Set();
  #whole = true;
  #top = 0; // scrolled so far, in whole device pixels, when it was last drawn
  #laid = "";
  #marks = new Map(); // code -> canvas
  #colors = null;
  #cell = 10;
  #scale = 1;
  #width = 0;
  #height = 0;
  #chosen = null; // {key, index}
  #left = []; // pages that were chosen before and still have the outline
  #asked = 0;
  drawn = 0; // marks, since the page was loaded

  constructor(state) {
    this.#state = state;
    new ResizeObserver(() => this.all()).observe(this.#scroll);
    this.#scroll.addEventListener("scroll", () => this.#ask(), { passive: true });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolor());
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", () => (this.#tip.hidden = true));
    this.#canvas.addEventListener("keydown", (event) => this.#press(event));
    this.recolor();
  }

  /** The agents to show, in order. */
  show(agents) {
    this.#agents = agents;
    for (const agent of agents) {
      const row = this.#rows.get(agent.key);
      if (row) row.agent = agent; // one that went and came back is another object
    }
    this.all();
  }

  /** These agents changed. */
  changed(keys) {
    for (const key of keys) this.#dirty.add(key);
    this.#ask();
  }

  all() {
    this.#whole = true;
    this.#ask();
  }

  recolor() {
    const style = getComputedStyle(document.documentElement);
    const names = ["--card", "--ink", "--quiet", "--focus", ...Object.values(MARKS).map((mark) => mark.color), "--shared"];
    this.#colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
    this.#marks.clear();
    this.#legend();
    this.all();
  }

  /** What is shown of each agent, for whoever counts: marks by agent. */
  counts() {
    return Object.fromEntries(this.#agents.map((agent) => [agent.key, agent.cells.length]));
  }

  #ask() {
    if (!this.#asked) this.#asked = requestAnimationFrame(() => this.#draw());
  }

  // ---- where things are

  #layout() {
    const width = this.#scroll.clientWidth;
    const total = this.#agents.reduce((sum, agent) => sum + agent.cells.length, 0);
    const sizes = width < NARROW ? NARROW_CELLS : CELLS;
    const cell = sizes.find(([most]) => total <= most)[1];
    const key = [width, cell, devicePixelRatio, ...this.#agents.map((agent) => agent.key + agent.cells.length)].join("\n");
    if (key === this.#laid) return;
    this.#laid = key;
    if (cell !== this.#cell || devicePixelRatio !== this.#scale) this.#marks.clear();
    [this.#cell, this.#scale, this.#width] = [cell, devicePixelRatio, width];
    const beside = width >= NARROW;
    const left = beside ? this.#labelRoom(width) : RIM;
    const perRow = Math.max(8, Math.floor((width - left - RIM) / cell));
    this.#rows.clear();
    let top = RIM;
    for (const agent of this.#agents) {
      const lines = Math.max(1, Math.ceil(agent.cells.length / perRow));
      const label = beside ? 0 : 16;
      const height = Math.max(beside ? 16 : 0, lines * cell) + label + 4;
      this.#rows.set(agent.key, { top, height, perRow, left, label, drawn: null, agent });
      top += height;
    }
    top += RIM;
    this.#space.style.height = `${top}px`;
    this.#height = Math.min(top, Math.round(innerHeight * 0.62));
    this.#canvas.style.height = `${this.#height}px`;
    this.#canvas.width = Math.max(1, Math.round(width * this.#scale));
    this.#canvas.height = Math.max(1, Math.round(this.#height * this.#scale));
    this.#whole = true;
  }

  // as wide as the longest name, within bounds
  #labelRoom(width) {
    this.#paper.font = FONT;
    const widest = Math.max(0, ...this.#agents.map((agent) => this.#paper.measureText(agent.agent.slice(0, 40)).width));
    return Math.round(Math.min(width * 0.25, Math.max(60, widest + 40)));
  }

  #place(row, index) {
    return [row.left + (index % row.perRow) * this.#cell, row.top + row.label + Math.floor(index / row.perRow) * this.#cell];
  }

  // ---- drawing

  #draw() {
    this.#asked = 0;
    this.#layout();
    const top = Math.round(this.#scroll.scrollTop * this.#scale) / this.#scale;
    const moved = top - this.#top;
    if (Math.abs(moved) >= this.#height) this.#whole = true;
    this.#top = top;
    const bottom = top + this.#height;
    if (this.#whole) this.#strip(top, bottom);
    else {
      if (moved) this.#shift(moved);
      if (moved > 0) this.#strip(bottom - moved, bottom);
      if (moved < 0) this.#strip(top, top - moved);
      this.#paper.setTransform(this.#scale, 0, 0, this.#scale, 0, -top * this.#scale);
      for (const key of this.#dirty) {
        const row = this.#rows.get(key);
        if (row && row.top < bottom && row.top + row.height > top) this.#drawChanged(row);
      }
    }
    this.#dirty.clear();
    this.#whole = false;
    this.#paper.setTransform(this.#scale, 0, 0, this.#scale, 0, -top * this.#scale);
    this.#outline();
  }

  // what is drawn already moves as a picture
  #shift(moved) {
    this.#paper.setTransform(1, 0, 0, 1, 0, 0);
    this.#paper.drawImage(this.#canvas, 0, Math.round(-moved * this.#scale));
  }

  // everything between two heights
  #strip(from, to) {
    const paper = this.#paper;
    paper.setTransform(this.#scale, 0, 0, this.#scale, 0, -this.#top * this.#scale);
    paper.save();
    paper.beginPath();
    paper.rect(0, from, this.#width, to - from);
    paper.clip();
    paper.fillStyle = this.#colors["--card"];
    paper.fillRect(0, from, this.#width, to - from);
    for (const row of this.#rows.values()) {
      if (row.top < to && row.top + row.height > from) this.#drawAgent(row, from, to);
    }
    paper.restore();
  }

  #drawAgent(row, from, to) {
    const { agent, perRow } = row;
    this.#name(row);
    const line = (height) => perRow * Math.max(0, Math.floor((height - row.top - row.label) / this.#cell));
    const last = Math.min(agent.cells.length, line(to) + perRow);
    for (let index = line(from); index < last; index += 1) this.#mark(row, index, agent.cells[index]);
    row.drawn = agent.cells;
    row.words = this.#label(agent);
  }

  #drawChanged(row) {
    const { agent } = row; // what of it is out of sight is drawn when it comes in sight
    const drawn = row.drawn ?? [];
    const words = this.#label(agent);
    if (row.words !== words) {
      this.#paper.fillStyle = this.#colors["--card"];
      this.#paper.fillRect(0, row.top, row.label ? this.#width : row.left, row.label || row.height);
      this.#name(row);
      row.words = words;
    }
    for (let index = 0; index < agent.cells.length; index += 1) {
      if (agent.cells[index] !== drawn[index]) this.#mark(row, index, agent.cells[index], true);
    }
    row.drawn = agent.cells;
  }

  #label(agent) {
    return `${agent.pinned ? "◆ " : ""}${agent.state === "running" ? "▶ " : ""}${agent.agent}`;
  }

  #name(row) {
    const paper = this.#paper;
    paper.font = FONT;
    paper.textBaseline = "top";
    paper.fillStyle = this.#colors["--ink"];
    const room = (row.label ? this.#width : row.left) - 2 * RIM;
    let words = this.#label(row.agent).replace(/\p{C}/gu, "\u00b7"); // controls and marks of direction draw nothing wild
    if (paper.measureText(words).width > room) {
      while (words && paper.measureText(`${words}…`).width > room) words = words.slice(0, -1);
      words += "…";
    }
    paper.fillText(words, RIM, row.top + (row.label ? 1 : Math.max(1, Math.round((this.#cell - 13) / 2))));
  }

  #mark(row, index, code, over = false) {
    const [x, y] = this.#place(row, index);
    if (over) {
      this.#paper.fillStyle = this.#colors["--card"];
      this.#paper.fillRect(x, y, this.#cell, this.#cell);
    }
    this.#paper.drawImage(this.#stamp(code), x, y, this.#cell, this.#cell);
    this.drawn += 1;
  }

  #stamp(code) {
    let stamp = this.#marks.get(code);
    if (!stamp) {
      stamp = document.createElement("canvas");
      stamp.width = stamp.height = Math.max(1, Math.round(this.#cell * this.#scale));
      this.#paint(stamp, code, this.#state.states[code & 15]);
      this.#marks.set(code, stamp);
    }
    return stamp;
  }

  /** One mark. Shape tells the state, a slit that it is shared, a hole that it is pinned; colour repeats it. */
  #paint(stamp, code, name) {
    const mark = MARKS[name] ?? { shape: "cross", color: "--quiet" };
    const paper = stamp.getContext("2d");
    const size = stamp.width;
    const gap = Math.max(1, Math.round((GAP * size) / this.#cell));
    const side = size - gap;
    const color = code & SHARED && mark.color === "--ram" ? "--shared" : mark.color;
    paper.fillStyle = paper.strokeStyle = this.#colors[color];
    const line = (paper.lineWidth = Math.max(1, Math.round(side / 8)));
    if (code & BEHIND && mark.shape === "hollow") {
      const dot = Math.max(1, Math.round(side / 4));
      paper.fillRect((side - dot) / 2, (side - dot) / 2, dot, dot);
      return;
    }
    switch (mark.shape) {
      case "full":
        paper.fillRect(0, 0, side, side);
        break;
      case "top":
        paper.strokeRect(line / 2, line / 2, side - line, side - line);
        paper.fillRect(0, 0, side, Math.round(side / 2));
        break;
      case "half":
        paper.fillRect(0, Math.floor(side / 2), side, Math.ceil(side / 2));
        break;
      case "hollow":
        paper.strokeRect(line / 2, line / 2, side - line, side - line);
        break;
      case "low":
        paper.strokeRect(line / 2, Math.floor(side / 2) + line / 2, side - line, Math.ceil(side / 2) - line);
        break;
      case "diamond":
        paper.beginPath();
        paper.moveTo(side / 2, 0);
        paper.lineTo(side, side / 2);
        paper.lineTo(side / 2, side);
        paper.lineTo(0, side / 2);
        paper.fill();
        break;
      default:
        paper.beginPath();
        paper.moveTo(line / 2, line / 2);
        paper.lineTo(side - line / 2, side - line / 2);
        paper.moveTo(side - line / 2, line / 2);
        paper.lineTo(line / 2, side - line / 2);
        paper.stroke();
    }
    paper.globalCompositeOperation = "destination-out";
    if (code & SHARED) {
      paper.lineWidth = Math.max(1, Math.round(side / 6));
      paper.beginPath();
      paper.moveTo(0, side);
      paper.lineTo(side, 0);
      paper.stroke();
    }
    if (code & PINNED) {
      const hole = Math.max(2, Math.round(side / 3));
      paper.clearRect(Math.round((side - hole) / 2), Math.round((side - hole) / 2), hole, hole);
    }
    paper.globalCompositeOperation = "source-over";
  }

  #legend() {
    const list = document.getElementById("map-legend");
    const names = Object.keys(MARKS).filter((name) => !["packed", "loading_tail"].includes(name));
    const rows = names.map((name) => [0, name, MARKS[name].words]);
    rows.splice(1, 0, [SHARED, "clean", "shared"], [PINNED, "clean", "pinned"]);
    rows.push([BEHIND, "evicted", "behind the window"]);
    const before = [this.#cell, this.#scale];
    [this.#cell, this.#scale] = [14, Math.max(2, devicePixelRatio)];
    list.replaceChildren(
      ...rows.map(([flags, name, words]) => {
        const item = document.createElement("li");
        const picture = document.createElement("canvas");
        picture.width = picture.height = 14 * this.#scale;
        picture.setAttribute("aria-hidden", "true");
        this.#paint(picture, flags, name);
        item.append(picture, words);
        return item;
      }),
    );
    [this.#cell, this.#scale] = before;
  }

  // ---- pointing

  #point(event) {
    const box = this.#canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top + this.#scroll.scrollTop;
    const row = [...this.#rows.values()].find((each) => y >= each.top && y < each.top + each.height);
    const line = row ? Math.floor((y - row.top - row.label) / this.#cell) : -1;
    const column = row ? Math.floor((x - row.left) / this.#cell) : -1;
    const index = line * (row?.perRow ?? 0) + column;
    const hit = line >= 0 && column >= 0 && column < row.perRow && index < row.agent.cells.length;
    this.#tip.hidden = !hit || event.pointerType === "touch";
    if (!hit) return;
    this.#choose(row.agent.key, index);
    this.#tip.textContent = this.#info.textContent;
    const tip = this.#tip.getBoundingClientRect();
    this.#tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.width - 4))}px`;
    this.#tip.style.top = `${event.clientY + 18 + tip.height > innerHeight ? event.clientY - tip.height - 10 : event.clientY + 18}px`;
  }

  #press(event) {
    const rows = [...this.#rows.values()];
    if (!rows.length) return;
    const at = Math.max(0, rows.findIndex((row) => row.agent.key === this.#chosen?.key));
    const index = this.#chosen?.index ?? 0;
    const { perRow } = rows[at];
    const last = rows[at].agent.cells.length - 1;
    const moves = {
      ArrowLeft: [at, index - 1],
      ArrowRight: [at, index + 1],
      ArrowUp: index - perRow >= 0 ? [at, index - perRow] : [at - 1, Infinity],
      ArrowDown: index + perRow <= last ? [at, index + perRow] : [at + 1, 0],
      Home: [at, 0],
      End: [at, last],
      PageUp: [at - 1, 0],
      PageDown: [at + 1, 0],
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const row = rows[Math.max(0, Math.min(rows.length - 1, move[0]))];
    if (!row.agent.cells.length) return;
    this.#choose(row.agent.key, Math.max(0, Math.min(row.agent.cells.length - 1, move[1])));
    const [, y] = this.#place(row, this.#chosen.index);
    const { scrollTop, clientHeight } = this.#scroll;
    if (y < scrollTop) this.#scroll.scrollTop = row.top;
    else if (y + this.#cell > scrollTop + clientHeight) this.#scroll.scrollTop = y + this.#cell - clientHeight;
  }

  #choose(key, index) {
    if (this.#chosen?.key === key && this.#chosen.index === index) return;
    if (this.#chosen) this.#left.push(this.#chosen);
    this.#chosen = { key, index };
    this.#info.textContent = this.#tell();
    this.#ask();
  }

  #tell() {
    const { key, index } = this.#chosen;
    const agent = this.#state.agents.get(key);
    if (!agent) return "";
    const segment = agent.segments.find((each) => index < each.end);
    if (!segment) return "";
    const page = index - segment.start;
    const pages = segment.end - segment.start;
    const from = page * (this.#state.daemon.page_tokens ?? 256);
    const to = Math.min(agent.computed_tokens, from + (this.#state.daemon.page_tokens ?? 256)) - 1;
    const group = agent.segments.length > 1 ? `, layers ${segment.group}` : "";
    const name = this.#state.daemon.namespace === null ? `${agent.namespace}/${agent.agent}` : agent.agent;
    return `${name}: page ${page + 1} of ${plural(pages, "page")}${group}, tokens ${from}–${Math.max(from, to)}: ${wordsOf(agent.cells[index], this.#state.states)}`;
  }

  #outline() {
    for (const { key, index } of this.#left.splice(0)) {
      const row = this.#rows.get(key);
      if (row && index < row.agent.cells.length) this.#mark(row, index, row.agent.cells[index], true);
    }
    const row = this.#chosen && this.#rows.get(this.#chosen.key);
    if (!row || this.#chosen.index >= row.agent.cells.length) return;
    const [x, y] = this.#place(row, this.#chosen.index);
    this.#paper.strokeStyle = this.#colors["--ink"];
    this.#paper.lineWidth = 2;
    this.#paper.strokeRect(x + 1, y + 1, this.#cell - GAP - 2, this.#cell - GAP - 2);
  }
}
