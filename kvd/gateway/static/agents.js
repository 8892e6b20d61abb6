// The table of agents: one row each, their last turns as squares, and the text at which a prompt left the stored one.
//
// Everything here that an agent, its user or a model wrote becomes text, never markup. Cells are written only when
// their words change.

import { clock } from "/static/link.js";
import { bytes, count, hitRate, percent, plural } from "/static/state.js";
import { place } from "/static/timeline.js";

export const MOST_ROWS = 300;
const SQUARES = 16;
const COLUMNS = ["Agent", "State", "Tokens", "Hit rate", "In RAM", "Last turns", "Latest miss"];
const GLYPHS = { new: "N", exact: "=", extend: "+", diverge: "≠" };
const KINDS = { new: "new agent", exact: "same text", extend: "text went on", diverge: "text parted" };

export class Agents {
  #state;
  #body = document.querySelector("#agents tbody");
  #more = document.getElementById("agents-more");
  #rows = new Map(); // key -> Row
  #dirty = new Set();
  #shown = [];
  #asked = 0;
  #ordered = false;

  constructor(state) {
    this.#state = state;
    const legend = document.getElementById("turn-legend");
    for (const [kind, glyph] of Object.entries(GLYPHS)) {
      const item = make("span", "item");
      item.append(square(glyph, kind === "diverge" ? "miss" : kind === "new" ? "" : "hit"), KINDS[kind]);
      legend.append(item);
    }
    const item = make("span", "item");
    item.append(square("×", ""), "cancelled or failed");
    legend.append(item);
  }

  /** The agents to show, in order. */
  show(agents) {
    this.#shown = agents.slice(0, MOST_ROWS);
    this.#more.hidden = agents.length <= MOST_ROWS;
    this.#more.textContent = `${count(agents.length - MOST_ROWS)} more: the filter finds them.`;
    this.#ordered = false;
    this.#ask();
  }

  changed(keys) {
    for (const key of keys) this.#dirty.add(key);
    this.#ask();
  }

  #ask() {
    if (!this.#asked) this.#asked = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#asked = 0;
    const here = new Set(this.#shown.map((agent) => agent.key));
    for (const [key, row] of this.#rows) {
      if (!here.has(key)) {
        row.remove();
        this.#rows.delete(key);
      }
    }
    for (const agent of this.#shown) {
      const row = this.#rows.get(agent.key);
      if (!row) {
        this.#rows.set(agent.key, new Row(agent, this.#state));
        this.#ordered = false;
      } else if (this.#dirty.has(agent.key)) row.update(agent);
    }
    this.#dirty.clear();
    if (!this.#ordered) this.#order();
  }

  #order() {
    this.#ordered = true;
    let place = this.#body.firstElementChild;
    for (const agent of this.#shown) {
      for (const element of this.#rows.get(agent.key).elements()) {
        if (element === place) place = place.nextElementSibling;
        else this.#body.insertBefore(element, place);
      }
    }
  }
}

class Row {
  #state;
  #agent;
  #row = make("tr");
  #detail = null;
  #button = make("button");
  #note = make("span", "quiet");
  #cells;
  #bar = make("i");
  #ram = make("span");
  #turns = make("span", "turns");
  #words = new Map(); // element -> what it says

  constructor(agent, state) {
    this.#state = state;
    this.#row.setAttribute("role", "row");
    this.#cells = COLUMNS.map((name, at) => {
      const cell = make(at ? "td" : "th");
      cell.setAttribute("role", at ? "cell" : "rowheader");
      if (at) cell.dataset.name = name;
      cell.className = name === "State" ? "short" : name === "Tokens" || name === "Hit rate" ? "number short" : "";
      this.#row.append(cell);
      return cell;
    });
    this.#button.type = "button";
    this.#button.setAttribute("aria-expanded", "false");
    this.#button.addEventListener("click", () => this.#toggle());
    this.#cells[0].scope = "row";
    this.#cells[0].append(this.#button, " ", this.#note);
    const bar = make("span", "bar");
    bar.append(this.#bar);
    this.#cells[4].append(bar, this.#ram);
    this.#turns.setAttribute("role", "img");
    this.#cells[5].append(this.#turns);
    this.update(agent);
  }

  elements() {
    return this.#detail ? [this.#row, this.#detail] : [this.#row];
  }

  remove() {
    for (const element of this.elements()) element.remove();
  }

  update(agent) {
    this.#agent = agent;
    const named = this.#state.daemon.namespace === null ? `${agent.namespace}/${agent.agent}` : agent.agent;
    const notes = [agent.pinned && "pinned", agent.branches > 1 && plural(agent.branches, "branch").replace("hs", "hes")];
    this.#say(this.#button, named);
    this.#say(this.#note, notes.filter(Boolean).join(", "));
    this.#say(this.#cells[1], agent.durable ? agent.state : `${agent.state}, not durable`);
    this.#say(this.#cells[2], count(agent.tokens));
    const needed = agent.resident_pages + agent.swapped_pages + agent.lost_pages;
    const part = needed ? agent.resident_pages / needed : 0;
    this.#bar.style.transform = `scaleX(${part.toFixed(3)})`;
    this.#say(this.#ram, `${count(agent.resident_pages)} of ${plural(needed, "page")}, ${bytes(agent.resident_bytes)}`);
    this.#say(this.#cells[3], percent(hitRate(agent)));
    this.#squares(agent.history.slice(-SQUARES));
    this.#miss(agent.history.findLast((turn) => turn.divergence));
    if (this.#detail) this.#fill();
  }

  #say(element, words) {
    if (this.#words.get(element) === words) return;
    this.#words.set(element, words);
    element.textContent = words;
  }

  #squares(turns) {
    const words = JSON.stringify(turns);
    if (this.#words.get(this.#turns) === words) return;
    this.#words.set(this.#turns, words);
    this.#turns.replaceChildren(...turns.map((turn) => squareOf(turn)));
    const parted = turns.filter((turn) => turn.match === "diverge").length;
    this.#turns.setAttribute("aria-label", `${plural(turns.length, "turn")}, of ${parted} the text parted`);
  }

  #miss(turn) {
    const words = JSON.stringify(turn ?? null);
    if (this.#words.get(this.#cells[6]) === words) return;
    this.#words.set(this.#cells[6], words);
    this.#cells[6].replaceChildren(...(turn ? missOf(turn, this.#state) : []));
  }

  #toggle() {
    if (this.#detail) {
      this.#detail.remove();
      this.#detail = null;
    } else {
      this.#detail = make("tr", "more");
      this.#detail.setAttribute("role", "row");
      this.#fill();
      this.#row.after(this.#detail);
    }
    this.#button.setAttribute("aria-expanded", String(Boolean(this.#detail)));
  }

  #fill() {
    const cell = make("td");
    cell.setAttribute("role", "cell");
    cell.colSpan = COLUMNS.length;
    const list = make("ol");
    for (const turn of this.#agent.history.toReversed()) {
      const item = make("li");
      item.append(squareOf(turn), ` ${clock(new Date(turn.time_s * 1000))} ${tellTurn(turn)} `, ...missOf(turn, this.#state));
      list.append(item);
    }
    if (!list.children.length) list.append(Object.assign(make("li", "quiet"), { textContent: "no turn since the daemon's start" }));
    cell.append(list);
    this.#detail.replaceChildren(cell);
  }
}

function tellTurn(turn) {
  if (!turn.match) return turn.outcome ?? "";
  const reused = `${KINDS[turn.match] ?? turn.match}: ${count(turn.cached_tokens)} of ${plural(turn.prompt_tokens, "token")} reused`;
  const made = turn.completion_tokens ? `, ${count(turn.completion_tokens)} made` : "";
  const ended = turn.outcome && turn.outcome !== "ok" ? `, ${turn.outcome}` : "";
  return `${reused}${made}${ended}${turn.match_reason ? ` (${turn.match_reason})` : ""}`;
}

function missOf(turn, state) {
  const { divergence } = turn;
  if (!divergence) return [];
  const where = make("span", "quiet");
  where.textContent = `character ${count(divergence.character)}, token ${count(divergence.token)}: `;
  if (divergence.expected === undefined) {
    const hidden = make("span", "quiet");
    hidden.textContent = state.daemon.text ? "" : "text is shown with kvd gateway --show-divergence";
    return [where, hidden];
  }
  const stored = make("span", "text");
  stored.textContent = divergence.expected;
  const asked = make("span", "text asked");
  asked.textContent = divergence.found;
  return [where, stored, " then ", asked];
}

function squareOf(turn) {
  const failed = turn.outcome !== undefined && turn.outcome !== null && turn.outcome !== "ok";
  const glyph = failed ? "×" : GLYPHS[turn.match] ?? "…";
  const made = square(glyph, turn.match === "diverge" ? "miss" : turn.match && turn.match !== "new" && !failed ? "hit" : "");
  made.title = `${clock(new Date(turn.time_s * 1000))} ${tellTurn(turn)}${place(turn.divergence)}`;
  return made;
}

function square(glyph, kind) {
  const made = make("span", `turn ${kind}`);
  made.textContent = glyph;
  return made;
}

function make(name, kind = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  return element;
}
