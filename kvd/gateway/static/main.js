// Puts the page together: the link's pictures go into the state, and each view draws what changed in its own frame.

import { Agents } from "/static/agents.js";
import { Figures } from "/static/figures.js";
import { Link, clock } from "/static/link.js";
import { ResidencyMap } from "/static/map.js";
import { State, hitRate, plural } from "/static/state.js";
import { TimeLine } from "/static/timeline.js";

const ORDERS = {
  name: (a, b) => compare(a.namespace, b.namespace) || compare(a.agent, b.agent),
  resident: (a, b) => b.resident_bytes - a.resident_bytes,
  tokens: (a, b) => b.tokens - a.tokens,
  hits: (a, b) => (hitRate(b) ?? -1) - (hitRate(a) ?? -1),
  last: (a, b) => lastTurn(b) - lastTurn(a),
};
const REORDER_MS = 2000;

const element = (id) => document.getElementById(id);
const names = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => names.compare(a, b);
const lastTurn = (agent) => agent.history.at(-1)?.time_s ?? 0;

const state = new State();
const map = new ResidencyMap(state);
const time = new TimeLine(state);
const agents = new Agents(state);
const figures = new Figures(state);
const link = new Link({ picture, status: show, key: ask });
let reordering = 0;

function picture(told) {
  if (told.full) time.clear();
  const change = state.apply(told);
  if (change.listed) list();
  else if (change.changed.size && element("sort").value !== "name") listSoon();
  if (change.changed.size) {
    map.changed(change.changed);
    agents.changed(change.changed);
    total();
  }
  if (change.events) time.ask();
  if (change.figures) {
    figures.ask();
    tellUntold();
  }
  if (told.daemon) {
    element("model").textContent = [state.daemon.model, state.daemon.kv_format].filter(Boolean).join(", ");
    if (told.full) map.recolor(); // the names of states may be others
  }
  tellLink();
}

// rows must not jump under a reader's eyes with every change
function listSoon() {
  if (reordering) return;
  reordering = setTimeout(() => {
    reordering = 0;
    list();
  }, REORDER_MS);
}

function list() {
  const wanted = element("filter").value.trim().toLowerCase();
  const found = [...state.agents.values()].filter((agent) => `${agent.namespace}/${agent.agent}`.toLowerCase().includes(wanted));
  map.show(found.toSorted(ORDERS.name));
  agents.show(found.sort(ORDERS[element("sort").value] ?? ORDERS.name));
  element("map-empty").hidden = found.length > 0;
  element("map-empty").textContent = state.agents.size ? "No agent has that name." : "No agents yet.";
  element("map-scroll").hidden = found.length === 0;
  element("agents-count").textContent = found.length === state.agents.size ? plural(found.length, "agent") : `${found.length} of ${plural(state.agents.size, "agent")}`;
  total();
}

function total() {
  let pages = 0;
  let resident = 0;
  for (const agent of state.agents.values()) {
    pages += agent.cells.length;
    resident += agent.resident_pages;
  }
  element("map-count").textContent = `${plural(pages, "page")} of ${plural(state.agents.size, "agent")}, ${resident.toLocaleString("en")} in RAM`;
}

// figures are of the whole daemon, so a viewer of one namespace is told no more than that there are such
function tellUntold() {
  const untold = state.figures.agents_untold ?? 0;
  element("agents-untold").hidden = untold === 0;
  element("agents-untold").textContent = `${plural(untold, "more agent")} of the daemon, asleep since its start, in whatever namespace: not shown until used.`;
}

function tellLink() {
  const { daemon } = state;
  const back = link.reconnects ? `, reconnected ${plural(link.reconnects, "time")}` : "";
  const since = clock(new Date((daemon.since_s - state.offset_s) * 1000));
  if (daemon.up === false) show("away", `daemon away since ${since}: ${daemon.reason}`);
  else if (daemon.up === null) show("connecting", "waiting for the daemon");
  else if (daemon.status && daemon.status !== "ready") show("warn", `daemon is ${daemon.status}`);
  else {
    const returns = daemon.returns ? `, daemon back since ${since} (${plural(daemon.returns, "time")})` : "";
    show("live", `live${returns}${back}`);
  }
}

function show(kind, said) {
  const pill = element("link");
  pill.dataset.state = kind;
  if (pill.textContent !== said) pill.textContent = said;
  document.title = kind === "live" ? "kvd" : `${kind === "away" ? "✕" : "◌"} kvd`;
}

function ask(wrong) {
  element("ask-wrong").textContent = wrong ? "This key is not known here." : "";
  element("ask-key").value = "";
  if (!element("ask").open) element("ask").showModal();
}

element("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  element("ask").close();
  link.useKey(element("ask-key").value);
  element("ask-key").value = "";
});
element("ask").addEventListener("cancel", (event) => event.preventDefault());
element("filter").addEventListener("input", list);
element("sort").addEventListener("change", list);

link.start();

// for whoever tests or measures
globalThis.kvd = { state, map, link };
