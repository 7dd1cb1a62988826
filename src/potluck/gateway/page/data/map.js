// The fleet: regions, nodes by GPU type, a box for each replica, and KV that flows between them.

import { $, h, svg, text, attribute, gpu, usd, percent, mbit, legend, short, copy } from "/page/dom.js";
import { state, shown, draws } from "/page/state.js";
import { detail } from "/page/detail.js";

const ROLES = { prefill: ["P", "prefill"], decode: ["D", "decode"], mixed: ["M", "prefill + decode"] };
const DENSE = 24, TINY = 60;
const MOST_AT_ONCE = 50; // boxes that are dressed in one frame
const map = $("map");
const tiles = new Map();
const paths = new Map();
const overlay = svg("svg", { class: "flows", "aria-hidden": "true" });
const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8z", class: "tip" }));
overlay.append(svg("defs", {}, arrow));
const links = h("ul", { class: "links", "aria-label": "KV on the move, and links between regions" });
let built = "";
let places = new Map();
let chosen = null;
let waiting = [];

legend($("map-legend"), [["prefill", "P computes prompts"], ["decode", "D writes answers"], ["mixed", "M does both"],
  ["starting", "starting"], ["draining", "draining"], ["lost", "lost"], ["kv", "KV on the move"]]);

function structure(rows, regions) {
  tiles.clear();
  const byRegion = new Map();
  for (const [name, row] of Object.entries(rows)) {
    const groups = byRegion.get(row.region) || byRegion.set(row.region, new Map()).get(row.region);
    (groups.get(row.gpu) || groups.set(row.gpu, []).get(row.gpu)).push(name);
  }
  for (const name of Object.keys(regions)) if (!byRegion.has(name)) byRegion.set(name, new Map());
  const many = Object.keys(rows).length, dense = many > DENSE;
  const boxes = [...byRegion].sort().map(([region, groups]) => h("section", { class: "region", "aria-label": `Region ${region}` },
    h("h3", {}, region),
    h("div", { class: "groups" }, [...groups].sort().map(([node, names]) => h("div", { class: "group" },
        h("h4", {}, gpu(node), h("span", { class: "offer" }, offer(regions[region], node))),
        h("div", { class: "tiles" }, names.sort(byNumber).map((each) => tile(each, rows, dense))))),
      ), unused(regions[region], groups)));
  map.className = many > TINY ? "dense tiny" : dense ? "dense" : "";
  map.replaceChildren(h("div", { class: "regions" }, boxes), overlay, links);
}

function byNumber(a, b) {
  return a.localeCompare(b, undefined, { numeric: true });
}

function offer(region, node) {
  const found = region?.offers.find((each) => each.node === node);
  return found ? `${usd(found.usd_per_h)}/h each, ${found.rented} of ${found.available} rented` : "";
}

function unused(region, groups) {
  const free = (region?.offers || []).filter((each) => !groups.has(each.node) && each.available > each.rented);
  if (!free.length) return null;
  return h("p", { class: "unused" }, `Could be rented: ${free.map((each) => `${each.available - each.rented} ${gpu(each.node)} at ${usd(each.usd_per_h)}/h`).join(", ")}`);
}

function tile(name, rows, dense) {
  const number = copy(name, rows);
  const parts = {
    letter: h("b", { class: "letter" }),
    name: h("span", { class: "name" }, dense ? number.slice(1) : `${rows[name].model} ${number}`),
    words: h("span", { class: "words" }),
    bar: h("i", { class: "bar" }),
    more: h("span", { class: "sr" }),
  };
  const button = h("button", { type: "button", class: "tile", "data-replica": name, onclick: () => choose(name) },
    h("span", { class: "top" }, parts.letter, parts.name), parts.words, h("span", { class: "track" }, parts.bar), parts.more);
  tiles.set(name, { button, parts, row: null });
  return button;
}

function dress(name, rows, models) {
  const row = rows[name];
  const found = tiles.get(name);
  found.row = row;
  const { button, parts } = found;
  const [letter, words] = ROLES[row.role] || ["?", row.role];
  const kind = row.standby ? "standby" : row.state !== "ready" ? row.state : row.cordoned ? "cordoned" : row.doubted ? "doubted" : row.state;
  attribute(button, "data-role", row.role);
  attribute(button, "data-state", kind);
  text(parts.letter, row.state === "lost" ? "✕" : letter);
  const busy = row.state === "ready" && !row.standby;
  const says = busy ? `${row.open} open · KV ${Math.round(row.kv * 100)} %` : kind === "ready" ? "ready" : kind;
  parts.bar.style.transform = `scaleX(${row.state === "lost" ? 0 : row.busy})`;
  if (map.className) attribute(button, "title", `${short(name, rows)}: ${kind}, ${row.open} open`);
  const spoken = `, ${short(name, rows)}, ${models > 1 ? `${row.model}, ` : ""}${words}, ${kind}, ${row.open} open requests, busy ${percent(row.busy)}`;
  if (map.classList.contains("tiny")) attribute(button, "aria-label", `${parts.letter.textContent}${spoken}`); // laid out never
  else {
    text(parts.words, map.className ? (busy ? String(row.open) : "") : says);
    text(parts.more, spoken);
  }
  attribute(button, "aria-pressed", chosen === name);
}

function measure() {
  const base = map.getBoundingClientRect();
  overlay.setAttribute("width", base.width);
  overlay.setAttribute("height", base.height);
  places = new Map();
  for (const [name, { button }] of tiles) {
    const box = button.getBoundingClientRect();
    places.set(name, { x: box.left - base.left, y: box.top - base.top, w: box.width, h: box.height });
  }
}

function curve(from, to) {
  const right = to.x > from.x + 1;
  const side = Math.abs(to.x - from.x) < from.w;
  if (side) { // one above the other: around the right-hand side
    const x = Math.max(from.x + from.w, to.x + to.w);
    const y1 = from.y + from.h * 0.6, y2 = to.y + to.h * 0.4;
    return `M${x} ${y1}C${x + 26} ${y1} ${x + 26} ${y2} ${x} ${y2}`;
  }
  const x1 = right ? from.x + from.w : from.x, x2 = right ? to.x : to.x + to.w;
  const y1 = from.y + from.h / 2, y2 = to.y + to.h / 2;
  const bend = Math.max(18, Math.abs(x2 - x1) * 0.4) * (right ? 1 : -1);
  return `M${x1} ${y1}C${x1 + bend} ${y1 - 6} ${x2 - bend} ${y2 - 6} ${x2} ${y2}`;
}

function flows(rows) {
  const wanted = new Set();
  for (const [key, flow] of Object.entries(rows)) {
    const from = places.get(flow.source), to = places.get(flow.target);
    if (!from || !to) continue;
    wanted.add(key);
    let path = paths.get(key);
    if (!path) {
      path = svg("path", { "marker-end": "url(#arrow)" });
      paths.set(key, path);
      overlay.append(path);
    }
    attribute(path, "d", curve(from, to));
    attribute(path, "stroke-width", (1.2 + Math.min(5, Math.log10(1 + flow.mbit_per_s) * 1.3)).toFixed(1));
  }
  for (const [key, path] of paths) {
    if (wanted.has(key)) continue;
    path.remove();
    paths.delete(key);
  }
}

const MOST_LINES = 6;
let listed = "";

/** The busiest, in words. */
function linkList(rows, moved, replicas) {
  const now = JSON.stringify([rows, moved]);
  if (now === listed) return;
  listed = now;
  const all = Object.values(rows);
  const busiest = all.filter((each) => all.length <= 4 || each.used >= 0.01 || each.gbps < each.planned_gbps * 0.98).sort((a, b) => b.used - a.used).slice(0, MOST_LINES);
  const largest = Object.values(moved).sort((a, b) => b.mbit_per_s - a.mbit_per_s).slice(0, MOST_LINES);
  links.replaceChildren(...largest.map((each) => h("li", {}, h("i", { class: "key kv", "aria-hidden": "true" }),
    `${short(each.source, replicas)} → ${short(each.target, replicas)}: ${mbit(each.mbit_per_s)}`)), ...busiest.map((each) => h("li", {},
    h("span", {}, `${each.source} → ${each.target}`),
    h("span", { class: "track", role: "img", "aria-label": `used ${percent(each.used)}` }, h("i", { class: "bar kv", "--part": each.used })),
    h("span", {}, `${percent(each.used)} of ${mbit(each.gbps * 1000)}${each.gbps < each.planned_gbps * 0.98 ? ` (${mbit(each.planned_gbps * 1000)} planned)` : ""}${each.waiting_mb >= 1 ? `, ${each.waiting_mb} MB wait` : ""}`))));
}

function paint() {
  const tables = shown();
  const rows = tables.replicas || {}, regions = tables.regions || {};
  const key = JSON.stringify([Object.entries(rows).map(([name, row]) => [name, row.gpu, row.region]), regions]);
  const anew = key !== built;
  if (anew) {
    built = key;
    for (const path of paths.values()) path.remove();
    paths.clear();
    structure(rows, regions);
  }
  const models = Object.keys(tables.models || {}).length;
  // A row that changed is another one. Those that change meanwhile have their turn with the next drawing.
  if (anew || !waiting.length) waiting = Object.keys(rows).filter((name) => tiles.has(name) && tiles.get(name).row !== rows[name]);
  for (const name of waiting.splice(0, anew ? Infinity : MOST_AT_ONCE)) if (rows[name]) dress(name, rows, models);
  if (waiting.length) return "more";
  if (anew) measure(); // boxes have their words, and so their size
  flows(tables.flows || {});
  linkList(tables.links || {}, tables.flows || {}, rows);
  if (chosen && !rows[chosen]) choose(null);
  detail(chosen, choose);
  return "";
}

export function choose(name) {
  const before = chosen;
  chosen = name === chosen ? null : name;
  for (const each of [before, chosen]) if (tiles.has(each)) attribute(tiles.get(each).button, "aria-pressed", each === chosen);
  repaint();
  detail(chosen, choose);
  if (!chosen && before) tiles.get(before)?.button.focus();
}

const repaint = draws($("fleet"), ["replicas", "regions", "flows", "links", "models"], paint, 500);
new ResizeObserver(() => { measure(); flows(shown().flows || {}); }).observe(map);
