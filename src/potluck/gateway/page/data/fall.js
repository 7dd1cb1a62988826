// Requests as bars over time: queue, each segment, transfer, decode; failed attempts and where they went on.

import { $, h, seconds, short, legend, clock, count } from "/page/dom.js";
import { state, shown, draws } from "/page/state.js";

const MOST = 20, MOVED = 4;
const list = $("fall"), which = $("which"), pause = $("pause");
let held = null;
let opened = null;
let drawn = new Map();

/** What the reason of a refusal means. */
export const REFUSALS = { overloaded: "too busy", no_capacity: "no replica can take it", grammar: "its engine was lost before the first token, perhaps by its grammar", too_long: "too long for every replica", deadline: "its deadline has passed", retries: "failed too often", lost: "its replica was lost", unknown_model: "no such model", unknown_class: "no such class", limited: "over the key's limit", invalid: "invalid request", closing: "the gateway is closing", internal: "internal error", upstream: "the engine answered with an error" };
const refusal = (row) => `${REFUSALS[row.reason] || row.reason || "refused"}${row.why ? `: ${row.why}` : ""}`;

legend($("fall-legend"), [["queue", "queued"], ["prefill", "prefill"], ["kv", "KV transfer"], ["decode", "decode"], ["lost", "failed or refused"]]);

/** What happened when, of one request: [kind, from, to, words]. */
export function parts(row, now_s) {
  const found = [];
  const end = row.ended_s ?? Math.max(0, now_s - row.came_s);
  let last = 0;
  const name = (replica) => short(replica, shown().replicas);
  const add = (kind, from, to, words) => { if (to > from) found.push([kind, from, to, words]); last = Math.max(last, to); };
  if (!row.attempts.length) add("queue", 0, end, "queued");
  row.attempts.forEach((attempt, place) => {
    const next = row.attempts[place + 1];
    const over = attempt.ended_s ?? (next ? next.sent_s : end);
    add("queue", last, Math.max(last, attempt.sent_s), place ? "queued for a retry" : "queued");
    let from = Math.max(last, attempt.sent_s);
    attempt.segments.forEach((segment, at) => {
      if (at === attempt.segments.length - 1) {
        const first = attempt.first_s ?? over;
        add("prefill", from, first, `${name(segment.replica)} prefills ${at ? "the rest of the prompt" : "the prompt"}`);
        if (attempt.first_s !== undefined) add("decode", first, over, `${name(segment.replica)} decodes`);
        return;
      }
      const handed = segment.handed_s ?? Math.min(over, attempt.first_s ?? over);
      const computed = Math.min(segment.computed_s ?? handed, handed);
      add("prefill", from, computed, `${name(segment.replica)} prefills tokens ${segment.start} to ${segment.stop}`);
      add("kv", computed, handed, `KV transfer to ${name(attempt.segments[at + 1].replica)}`);
      from = Math.max(from, handed);
    });
    if (attempt.failed) found.push(["lost", over, over, `${attempt.where ? name(attempt.where) : "the attempt"} failed (${attempt.failed})`]);
    last = Math.max(last, over);
  });
  if (row.state === "refused") found.push(["lost", end, end, `refused, ${refusal(row)}`]);
  return { found, end };
}

export function routeOf(row) {
  const rows = shown().replicas;
  return row.attempts.map((each) => [...new Set(each.segments.map((one) => one.replica))].map((one) => short(one, rows)).join(" → ")).join("  ⤳  ");
}

function track(row, scale, now_s) {
  const { found } = parts(row, now_s);
  const bars = found.map(([kind, from, to, words]) => h("i", {
    class: `part ${kind}`, title: `${words}: ${seconds(to - from)}`,
    "--from": (from / scale).toFixed(4), "--part": ((to - from) / scale).toFixed(4),
  }));
  return h("span", { class: "bars", "aria-hidden": "true" }, bars);
}

export function steps(row, now_s) {
  return h("ul", { class: "steps" }, parts(row, now_s).found.map(([kind, from, to, words]) => h("li", {},
    h("i", { class: `key ${kind}`, "aria-hidden": "true" }), `after ${seconds(from)}: ${words}`, kind === "lost" ? "" : h("b", {}, ` ${seconds(to - from)}`))));
}

function line(row, scale, now_s) {
  const open = opened === row.id;
  const ttft = row.first_s;
  const refused = row.state === "refused";
  const words = refused ? row.ended_s < 0.05 ? "refused at once" : `refused after ${seconds(row.ended_s)}` : row.state === "done" ? `first token ${seconds(ttft)}, all ${seconds(row.ended_s)}` : row.state === "running" ? (ttft === undefined ? "prompt" : "writing") : row.state;
  const summary = h("button", { type: "button", class: "request", "aria-expanded": open, onclick: () => { opened = open ? null : row.id; drawn.clear(); repaint(); } },
    h("span", { class: "who" }, h("span", { class: "id" }, row.id.slice(0, 6)), ` ${count(row.prompt_tokens)} tok${row.tenant && row.tenant !== "default" ? ` · ${row.tenant}` : ""}`),
    track(row, scale, now_s),
    h("span", { class: refused ? "how bad" : "how" }, words),
    h("span", { class: refused ? "route bad" : "route" }, refused ? `${row.model} · ${refusal(row)}` : routeOf(row)));
  return h("li", { class: row.attempts.length > 1 ? "moved" : null, "data-id": row.id }, summary, open ? h("div", {}, h("p", { class: "note" }, `arrived at ${clock(row.came_s)}, model ${row.model}, class ${row.class}`), steps(row, now_s)) : null);
}

const refusalGroup = (row) => [row.model, row.tenant, row.class, row.reason].join("\t");

function slow(row) {
  const slo = (shown().models || {})[row.model]?.slo;
  return slo && row.first_s !== undefined && row.first_s > slo.ttft_s;
}

function picked() {
  const repeated = new Set(Object.values(shown().refusals || {}).filter((each) => each.count > 1).map(refusalGroup));
  // Of refusals that are counted in a line above only those are listed that somebody asks for.
  const kinds = { latest: (row) => row.state !== "refused" || !repeated.has(refusalGroup(row)), refused: (row) => row.state === "refused", moved: (row) => row.attempts.length > 1, slow, handed: (row) => row.attempts.some((each) => new Set(each.segments.map((one) => one.replica)).size > 1) };
  const wanted = kinds[which.value];
  const rows = [...state.requests.values()];
  // What has just moved is worth seeing before what has just come.
  const found = which.value === "latest" ? rows.filter((row) => row.attempts.length > 1 && state.at_s - row.came_s < 30).slice(-MOVED).reverse() : [];
  const moved = new Set(found);
  for (let at = rows.length - 1; at >= 0 && found.length < MOST; at--) if (wanted(rows[at]) && !moved.has(rows[at])) found.push(rows[at]);
  return found;
}

function axis(scale) {
  $("fall-axis").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => h("span", { "--at": part }, seconds(scale * part))));
}

let lastScale = 0;
function paint() {
  const rows = held || picked();
  $("fall-note").hidden = rows.length > 0;
  $("fall-axis").hidden = !rows.length;
  const now_s = state.at_s;
  let scale = 0.05;
  for (const row of rows) scale = Math.max(scale, row.ended_s ?? now_s - row.came_s);
  scale = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300].find((each) => each >= scale) || scale;
  if (scale !== lastScale) { axis(scale); lastScale = scale; drawn.clear(); }
  const focus = document.activeElement?.closest?.("#fall li")?.dataset.id;
  const kept = new Map();
  const items = rows.map((row) => {
    const before = drawn.get(row.id);
    const same = before && before.row === row && row.ended_s !== undefined;
    const item = same ? before.item : line(row, scale, now_s);
    kept.set(row.id, { row, item });
    return item;
  });
  drawn = kept;
  if (items.length !== list.children.length || items.some((item, at) => list.children[at] !== item)) list.replaceChildren(...items);
  if (focus) list.querySelector(`li[data-id="${CSS.escape(focus)}"] button`)?.focus({ preventScroll: true });
}

const repaint = draws($("requests"), ["requests", "refusals"], paint, 500);
which.addEventListener("change", () => { held = null; pause.setAttribute("aria-pressed", "false"); repaint(); });
pause.addEventListener("click", () => {
  held = held ? null : picked();
  pause.setAttribute("aria-pressed", String(Boolean(held)));
  repaint();
});
