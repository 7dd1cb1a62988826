// The fleet: a lane for each region, a row for each replica: prefill on the left, decode on the right. Up to MOST_ARCS
// replicas, each pair with a KV transfer has an arc, wider for more. Beyond it arcs would cross everywhere: transfers are
// listed by group (GPU, role, region) instead, and arcs are drawn for the chosen replica only.

import { $, h, svg, text, attribute, gpu, usd, percent, mbit, count, legend, short, copy } from "/page/dom.js";
import { shown, draws } from "/page/state.js";
import { detail } from "/page/detail.js";

const ROLES = { prefill: ["P", "prefill", "Prefill"], decode: ["D", "decode", "Decode"], mixed: ["M", "prefill + decode", "Mixed"] };
const DENSE = 24, TINY = 60, MOST_ARCS = 10;
const MOST_AT_ONCE = 50; // rows that are dressed in one frame
const map = $("map");
const tiles = new Map();
const arcs = new Map();
const overlay = svg("svg", { class: "flows", "aria-hidden": "true" });
const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8z", class: "tip" }));
overlay.append(svg("defs", {}, arrow));
const links = h("ul", { class: "links", "aria-label": "KV transfers, and links between regions" });
const groups = h("div", { class: "flow-groups" });
let built = "";
let places = new Map();
let chosen = null;
let waiting = [];

legend($("map-legend"), [["prefill", "P Prefill"], ["decode", "D Decode"], ["mixed", "M Mixed"],
  ["lost", "✕ lost"], ["starting", "starting, draining"], ["kv", "KV transfer"]]);

function structure(rows, regions) {
  tiles.clear();
  const names = Object.keys(rows).sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const many = names.length;
  map.className = many > TINY ? "dense tiny" : many > DENSE ? "dense" : "";
  const byRegion = new Map(Object.keys(regions).map((each) => [each, []]));
  for (const name of names) (byRegion.get(rows[name].region) || byRegion.set(rows[name].region, []).get(rows[name].region)).push(name);
  const lanes = [...byRegion].sort().map(([region, mine]) => {
    let left = mine.filter((name) => rows[name].role === "prefill");
    if (!left.length) left = mine.slice(0, Math.ceil(mine.length / 2)); // nobody hands on here: both sides are filled
    const right = mine.filter((name) => !left.includes(name));
    const side = (those, name) => h("div", { class: `side ${name}` }, those.map((each) => tile(each, rows, many > DENSE)));
    return h("section", { class: "region", "aria-label": `Region ${region}` },
      h("h3", {}, h("span", {}, region), h("span", { class: "offer" }, offers(regions[region], many > DENSE))),
      h("div", { class: "lane", "--columns": many > DENSE && right.length ? `${left.length}fr ${right.length}fr` : null }, side(left, "left"), right.length ? side(right, "right") : null));
  });
  map.replaceChildren(overlay, ...lanes, groups, links);
}

/** What is rented where for how much, and, where there is room to say it, what could be. */
function offers(region, dense) {
  return (region?.offers || []).filter((each) => each.rented || (each.available && !dense))
    .map((each) => `${gpu(each.node)} ${usd(each.usd_per_h)}/h, ${each.rented} of ${Math.max(each.available, each.rented)}${dense ? "" : " rented"}`).join(" · ");
}

function tile(name, rows, dense) {
  const number = copy(name, rows);
  const parts = {
    letter: h("b", { class: "letter" }),
    name: h("span", { class: "name" }, dense ? number.slice(1) : `${gpu(rows[name].gpu)} ${number}`),
    words: h("span", { class: "words" }),
    rate: h("span", { class: "rate" }),
    bar: h("i", { class: "bar" }),
    more: h("span", { class: "sr" }),
  };
  const button = h("button", { type: "button", class: "tile", "data-replica": name, onclick: () => choose(name) },
    parts.letter, parts.name, parts.words, parts.rate, h("span", { class: "track" }, parts.bar), parts.more);
  tiles.set(name, { button, parts, row: null });
  return button;
}

function dress(name, rows, models) {
  const row = rows[name];
  const found = tiles.get(name);
  found.row = row;
  const { button, parts } = found;
  const [letter, words] = ROLES[row.role] || ["?", row.role];
  const kind = row.state !== "ready" ? row.state : row.cordoned ? "cordoned" : row.doubted ? "doubted" : row.state;
  attribute(button, "data-role", row.role);
  attribute(button, "data-state", kind);
  text(parts.letter, row.state === "lost" ? "✕" : letter);
  const works = row.state === "ready";
  const rate = rates(row);
  parts.bar.style.transform = `scaleX(${row.state === "lost" ? 0 : row.busy})`;
  if (map.className) attribute(button, "title", `${short(name, rows)}: ${kind}, ${row.open} open, ${rate}`);
  const spoken = `, ${short(name, rows)}, ${models > 1 ? `${row.model}, ` : ""}${words}, ${kind}, ${row.open} open requests, busy ${percent(row.busy)}`;
  if (map.classList.contains("tiny")) attribute(button, "aria-label", `${parts.letter.textContent}${spoken}`); // laid out never
  else {
    text(parts.words, map.className ? (works ? String(row.open) : "") : `${models > 1 ? `${row.model} · ` : ""}${works ? `${row.open} open · KV ${Math.round(row.kv * 100)} %` : kind}`);
    text(parts.rate, works && !map.className ? rate : "");
    text(parts.more, spoken);
  }
  attribute(button, "aria-pressed", chosen === name);
}

/** Of prompt tokens that were computed and output tokens that were streamed, those that its role has. */
function rates(row) {
  const prompt = `prompt ${count(row.prompt_tokens_per_s)} tok/s`, output = `output ${count(row.output_tokens_per_s)} tok/s`;
  return row.role === "prefill" ? prompt : row.role === "decode" ? output : `${prompt}, ${output}`;
}

function measure() {
  const base = map.getBoundingClientRect();
  overlay.setAttribute("width", base.width);
  overlay.setAttribute("height", base.height);
  places = new Map();
  for (const [name, { button }] of tiles) {
    const box = button.getBoundingClientRect();
    const left = button.parentElement.classList.contains("left"); // so its right edge is at the channel
    places.set(name, { x: left ? box.right - base.left : box.left - base.left, y: box.top - base.top, h: box.height, out: left ? 1 : -1 });
  }
}

/** Ends of arcs share an edge evenly, in the order of where they go, so that each can be followed. */
function flows(rows, replicas) {
  const few = !many(replicas);
  const there = Object.entries(rows).filter(([, each]) => places.has(each.source) && places.has(each.target) && (few || each.source === chosen || each.target === chosen));
  const ends = new Map();
  for (const [key, each] of there) {
    for (const [name, other] of [[each.source, each.target], [each.target, each.source]]) {
      (ends.get(name) || ends.set(name, []).get(name)).push([places.get(other).y, key]);
    }
  }
  for (const mine of ends.values()) mine.sort((a, b) => a[0] - b[0] || (a[1] < b[1] ? -1 : 1));
  const end = (name, key) => {
    const mine = ends.get(name), { x, y, h: high, out } = places.get(name);
    return { x, y: y + (high * (mine.findIndex((each) => each[1] === key) + 1)) / (mine.length + 1), out };
  };
  const wanted = new Set();
  for (const [key, each] of there) {
    wanted.add(key);
    let path = arcs.get(key);
    if (!path) {
      path = svg("path", { "marker-end": "url(#arrow)" }, svg("title"));
      arcs.set(key, path);
      overlay.append(path);
    }
    const from = end(each.source, key), to = end(each.target, key);
    const bend = from.out === to.out ? Math.min(90, 18 + Math.abs(to.y - from.y) * 0.25) : Math.abs(to.x - from.x) * 0.6;
    attribute(path, "d", `M${from.x} ${from.y}C${from.x + from.out * bend} ${from.y} ${to.x + to.out * bend} ${to.y} ${to.x} ${to.y}`);
    attribute(path, "stroke-width", (1 + Math.min(2.2, Math.log10(1 + each.mbit_per_s) * 0.6)).toFixed(1));
    text(path.firstChild, flowWords(each, replicas));
  }
  for (const [key, path] of arcs) {
    if (wanted.has(key)) continue;
    path.remove();
    arcs.delete(key);
  }
}

const flowWords = (each, replicas) => `${short(each.source, replicas)} → ${short(each.target, replicas)}: ${mbit(each.mbit_per_s)}`;
const MOST_LINES = 6;
let listed = "", grouped = "";

/** Whether arcs would be too many. A replica that was lost has none, so that a replacement changes nothing. */
const many = (rows) => Object.values(rows).filter((each) => each.state !== "lost").length > MOST_ARCS;

/** KV transfers by group; drawn on the screen where arcs are not, and always in print. */
function flowGroups(rows) {
  const all = Object.entries(rows).map(([key, each]) => ({ ...each, other: key === "other" })).sort((a, b) => a.other - b.other || b.mbit_per_s - a.mbit_per_s);
  const byGroup = many(shown().replicas || {});
  const now = JSON.stringify([all, byGroup]);
  if (now === grouped) return;
  grouped = now;
  groups.classList.toggle("print-only", !byGroup);
  groups.hidden = !all.length;
  const most = Math.max(...all.filter((each) => !each.other).map((each) => each.mbit_per_s), 1e-9);
  groups.replaceChildren(h("h3", {}, "KV transfers by GPU, role and region", h("span", { class: "note" }, byGroup ? " · choose a replica to see its own" : "")),
    h("ol", {}, all.map((each) => h("li", {},
      h("span", { class: "ends" }, each.other ? "all other groups" : [h("span", {}, groupName(each.source)), " → ", h("span", {}, groupName(each.target))]),
      h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: "bar kv", "--part": Math.min(1, each.mbit_per_s / most).toFixed(3) })),
      h("span", { class: "amount" }, h("b", {}, mbit(each.mbit_per_s)), ` ${each.pairs} ${each.pairs === 1 ? "pair" : "pairs"}`)))));
}

const groupName = (name) => gpu(name).replace(/\b(prefill|decode|mixed)\b/, (role) => ROLES[role][2]);

/** The busiest, in words. */
function linkList(rows, moved, replicas) {
  const now = JSON.stringify([rows, moved]);
  if (now === listed) return;
  listed = now;
  const all = Object.values(rows);
  const busiest = all.filter((each) => all.length <= 4 || each.used >= 0.01 || each.gbps < each.planned_gbps * 0.98).sort((a, b) => b.used - a.used).slice(0, MOST_LINES);
  const largest = Object.values(moved).sort((a, b) => b.mbit_per_s - a.mbit_per_s).slice(0, MOST_LINES);
  links.replaceChildren(...largest.map((each) => h("li", { class: "sr" }, flowWords(each, replicas))), ...busiest.map((each) => h("li", {},
    h("b", {}, `${each.source} → ${each.target}`),
    h("span", { class: "track", role: "img", "aria-label": `used ${percent(each.used)}` }, h("i", { class: "bar kv", "--part": each.used })),
    h("span", {}, `${percent(each.used)} of ${mbit(each.gbps * 1000)}${each.gbps < each.planned_gbps * 0.98 ? ` (${mbit(each.planned_gbps * 1000)} planned)` : ""}${each.waiting_mb >= 1 ? `, ${Math.round(each.waiting_mb)} MB wait` : ""}, ${each.connections} connections a transfer`))));
}

function paint() {
  const tables = shown();
  const rows = tables.replicas || {}, regions = tables.regions || {};
  const key = JSON.stringify([Object.entries(rows).map(([name, row]) => [name, row.gpu, row.region, row.role === "prefill"]), regions]);
  const anew = key !== built;
  if (anew) {
    built = key;
    for (const path of arcs.values()) path.remove();
    arcs.clear();
    structure(rows, regions);
  }
  const models = Object.keys(tables.models || {}).length;
  // A row that changed is another one. Those that change meanwhile have their turn with the next drawing.
  if (anew || !waiting.length) waiting = Object.keys(rows).filter((name) => tiles.has(name) && tiles.get(name).row !== rows[name]);
  for (const name of waiting.splice(0, anew ? Infinity : MOST_AT_ONCE)) if (rows[name]) dress(name, rows, models);
  if (waiting.length) return "more";
  if (anew) measure(); // rows have their words, and so their size
  flows(tables.flows || {}, rows);
  flowGroups(tables.flow_groups || {});
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

const repaint = draws($("fleet"), ["replicas", "regions", "flows", "flow_groups", "links", "models"], paint, 500);
new ResizeObserver(() => { measure(); flows(shown().flows || {}, shown().replicas || {}); }).observe(map);
