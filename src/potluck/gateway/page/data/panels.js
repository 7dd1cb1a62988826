// The plan and why, planned beside observed, tenants, and the log of decisions.

import { $, h, text, table, usd, seconds, count, percent, clock, gpu, plain, brief } from "/page/dom.js";
import { state, shown, draws } from "/page/state.js";

const KINDS = { pair: "two GPUs share each prompt", pipeline: "layers spread over nodes", group: "a group of machines" };
const CONFIDENCE = { measured: "measured GPUs", transferred: "figures carried over from like GPUs", assumed: "figures assumed" };

draws($("plan"), ["plan", "deployments", "models", "points"], () => {
  const tables = shown();
  const plan = tables.plan?.now;
  if (!plan) return;
  const sure = plan.gap <= 0.0001 ? "proven to be the cheapest of its kind" : `at most ${(plan.gap * 100).toFixed(1)} % above the cheapest of its kind`;
  const whole = plan.fraction < 1 ? ` It can serve only ${percent(plan.fraction)} of what is asked for, on averages.` : "";
  text($("plan-why"), `Version ${plan.version}, strategy ${plan.strategy}: ${plan.usd_per_h === null ? "servers that others run, at an unknown price" : `${usd(plan.usd_per_h)}/h planned, ${usd(plan.now_usd_per_h)}/h rented now; ${sure}`}.${whole} ${reason(tables)} Why now: ${plan.why}. ${plan.thinks ? `Scaling (${plan.scaling}): ${plan.thinks}.` : `Scaling: ${plan.scaling}.`}`);
  const rows = Object.entries(tables.deployments || {}).sort().map(([, each]) => [
    h("span", {}, `${each.count} × `, h("b", {}, each.replicas.map((one) => `${gpu(one.gpu)}${one.role === "mixed" ? "" : ` (${one.role})`}`).join(" + ")), h("div", { class: "note" }, `${doing(each)}; ${CONFIDENCE[each.confidence] || each.confidence}`), stageBars(each)),
    each.region, each.model, takes(each), usd(each.usd_per_h)]);
  table($("deployments"), [{ name: "What" }, { name: "Where" }, { name: "Model" }, { name: "Takes" }, { name: "$/h", right: true }], rows, "What the plan deploys");
  promises(tables);
}, 1500);

/** Which part of requests a copy does, by the roles of its replicas. */
export function doing(each) {
  const roles = new Set(each.replicas.map((one) => one.role));
  const part = roles.has("mixed") ? "whole requests" : roles.size > 1 ? "prompts apart from answers" : roles.has("prefill") ? "prompts only" : "answers only";
  return KINDS[each.kind] ? `${part}, ${KINDS[each.kind]}` : part;
}

function reason(tables) {
  const said = Object.entries(tables.models || {}).filter(([, each]) => each.planned && each.slo).map(([name, each]) => `${count(each.planned.demand_per_s)} requests/s of ${name} (${count(each.planned.capacity_per_s)}/s possible), first tokens within ${brief(seconds(each.slo.ttft_s))} and ${brief(seconds(each.slo.tpot_s))} per token`);
  return said.length ? `It is for ${said.join("; ")}.` : "";
}

function stageBars(each) {
  return each.replicas.filter((one) => one.stages.length > 1).map((one) => h("div", { class: "stages", role: "img", "aria-label": one.stages.map((stage) => `${stage.layers} layers on ${stage.nodes.map(([node]) => gpu(node)).join(", ")}`).join("; ") },
    one.stages.map((stage) => h("i", { "--layers": stage.layers }, `${stage.layers} · ${stage.nodes.map(([node]) => gpu(node)).join("+")}`))));
}

function takes(each) {
  const found = new Map();
  for (const share of each.shares) found.set(share.phase, (found.get(share.phase) || 0) + share.rate_per_s);
  const longest = Math.max(0, ...each.shares.map((share) => share.up_to_tokens || 0));
  const words = { prefill: "prompts", decode: "answers", closed: "whole requests" };
  const said = [...found].filter(([, rate]) => rate > 0).map(([phase, rate]) => `${count(rate)}/s ${words[phase]}`);
  return said.length ? `${said.join(", ")}${longest ? `, prompts up to ${count(longest)} tokens` : ""}` : "what comes";
}

export function lately(model, figure, over_s = 60) {
  const { at_s, models } = state.points;
  const values = models[model]?.[figure] || [];
  const until = state.past ? state.past.at_s : Infinity;
  const found = [];
  for (let at = at_s.length - 1; at >= 0; at--) {
    if (at_s[at] > until) continue;
    if (at_s[at] < Math.min(until, at_s[at_s.length - 1]) - over_s) break;
    if (values[at] !== null && values[at] !== undefined) found.push(values[at]);
  }
  return found.length ? found.reduce((sum, each) => sum + each, 0) / found.length : null;
}

/** Goodput of each class, where there are several: [all, in time] a second. */
function perClass(model, slo) {
  const sums = new Map();
  const { at_s, models } = state.points;
  const until = state.past ? state.past.at_s : at_s.at(-1) ?? 0;
  (models[model]?.classes || []).forEach((each, at) => {
    if (!each || at_s[at] > until || at_s[at] < until - 60) return;
    for (const [name, [all, kept]] of Object.entries(each)) {
      const sum = sums.get(name) || [0, 0];
      sums.set(name, [sum[0] + all, sum[1] + kept]);
    }
  });
  if (sums.size < 2) return [];
  return [...sums].sort().map(([name, [all, kept]]) => [`${model}: in time, class ${name}`, slo ? percent(slo.attainment) : "–", "–", all ? percent(kept / all) : "–", ""]);
}

function promises(tables) {
  const rows = [];
  for (const [name, each] of Object.entries(tables.models || {})) {
    const said = each.planned, slo = each.slo;
    const all = lately(name, "ended_per_s"), timely = lately(name, "in_time_per_s");
    const verdict = (value, limit) => (value === null || !limit ? "" : value <= limit ? "✓ kept" : h("span", { class: "bad" }, "✗ missed"));
    const ttft = lately(name, "ttft_p90_s"), tpot = lately(name, "tpot_p90_s");
    rows.push(
      [`${name}: time to first token, 9 of 10`, seconds(slo?.ttft_s), seconds(said?.ttft_s), seconds(ttft), verdict(ttft, slo?.ttft_s)],
      [`${name}: time per token, 9 of 10`, seconds(slo?.tpot_s), seconds(said?.tpot_s), seconds(tpot), verdict(tpot, slo?.tpot_s)],
      [`${name}: requests`, "–", said ? `${count(said.demand_per_s)}/s of ${count(said.capacity_per_s)}/s` : "–", all === null ? "–" : `${count(all)}/s`, ""],
      [`${name}: in time`, slo ? percent(slo.attainment) : "–", "–", all ? percent(timely / all) : "–", all && slo ? (timely / all >= slo.attainment ? "✓ kept" : h("span", { class: "bad" }, "✗ missed")) : ""],
      ...perClass(name, slo),
      [`${name}: cost`, "–", "–", each.usd_per_h === null ? "unknown" : `${usd(each.usd_per_h)}/h, ${usd(lately(name, "usd_per_mtok"))} per million tokens`, ""]);
  }
  table($("promises"), [{ name: "" }, { name: "Objective", right: true }, { name: "Planned", right: true }, { name: "Observed", right: true }, { name: "" }], rows, "Planned beside observed");
}

draws($("tenants"), ["tenants"], () => {
  const rows = shown().tenants || {};
  const weights = Object.values(rows).reduce((sum, each) => sum + each.weight, 0) || 1;
  table($("tenant-table"), [{ name: "Tenant" }, { name: "Share: due and used" }, { name: "Tokens/min", right: true }, { name: "Running", right: true }, { name: "Waiting", right: true }],
    Object.entries(rows).map(([name, each]) => [name,
      h("span", { class: "shares", role: "img", "aria-label": `due ${percent(each.weight / weights)}, used ${percent(each.share)}` },
        h("span", { class: "track" }, h("i", { class: "bar due", "--part": (each.weight / weights).toFixed(3) })),
        h("span", { class: "track" }, h("i", { class: "bar used", "--part": each.share })),
        h("small", {}, `${percent(each.weight / weights)} due, ${percent(each.share)} used`)),
      count(each.tokens_last_min), String(each.running), String(each.waiting)]), "Tenants and their shares");
}, 1000);

const MOST_LINES = 200;
const kind = $("event-kind"), find = $("event-find"), list = $("event-list");
const known = new Set();

function eventLine(each) {
  return h("li", { class: `event ${each.kind}` },
    h("a", { href: `#t=${Math.floor(each.at_s)}` }, clock(each.at_s)),
    h("span", { class: "kind" }, each.kind),
    h("span", { class: "what", title: each.what }, plain(each.what)),
    each.why ? h("span", { class: "why" }, plain(each.why)) : null);
}

let first = null;
const repaintEvents = draws($("events"), ["events"], () => {
  for (const each of state.events) if (!known.has(each.kind)) { known.add(each.kind); kind.append(h("option", { value: each.kind }, each.kind)); }
  const until = state.past ? state.past.at_s + 1 : Infinity;
  const wanted = find.value.trim().toLowerCase();
  const found = [];
  for (let at = state.events.length - 1; at >= 0 && found.length < MOST_LINES; at--) {
    const each = state.events[at];
    if (each.at_s > until || (kind.value && each.kind !== kind.value)) continue;
    if (wanted && !`${each.what} ${each.why}`.toLowerCase().includes(wanted)) continue;
    found.push(each);
  }
  const now = JSON.stringify(found.map((each) => each.number));
  if (now === first) return;
  first = now;
  list.replaceChildren(...found.map(eventLine), found.length ? "" : h("li", { class: "note" }, "Nothing like that was decided."));
}, 500);
kind.addEventListener("change", repaintEvents);
find.addEventListener("input", repaintEvents);

// The story: what happens, what was chosen, what came of it; the lines of an act, or the latest decision.

const TOLD = { act: "What happens", outcome: "What came of it", saving: "What it saved", end: "The end", note: "Note" };
const CAUSES = ["lost", "market", "order"];
const QUIET = ["ready", "start", "stop", "cache", "drain", "replan", "recast"];
const MOST_CHOSEN = 3;

function storyLine(each) {
  return h("p", { class: each.kind }, h("a", { href: `#t=${Math.floor(each.at_s)}` }, clock(each.at_s)),
    h("b", {}, TOLD[each.kind] || (CAUSES.includes(each.kind) ? "What happened" : "What was chosen")),
    h("span", {}, each.kind === "act" ? h("strong", {}, sentence(each.what)) : sentence(plain(each.what)), each.why ? h("span", { class: "why" }, ` ${sentence(plain(each.why))}`) : null));
}

const sentence = (words) => `${words.charAt(0).toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;

let told = "";
draws(null, ["events"], () => {
  const until = state.past ? state.past.at_s + 1 : Infinity;
  const loud = state.events.filter((each) => each.at_s <= until && !QUIET.includes(each.kind));
  const act = loud.findLastIndex((each) => each.kind === "act");
  let lines = loud.slice(-1);
  if (act >= 0 && (loud.at(-1).kind !== "note" || loud.length - act < 40)) {
    const since = loud.slice(act + 1);
    // Of what is said again and again, how far prompts may go or who changes sides, only the latest.
    const choices = since.filter((each, at) => !(each.kind in TOLD) && since.findLastIndex((one) => one.kind === each.kind) === at);
    // What came of the act before it stays to be read: it was told only a moment before this one began.
    const last = loud.slice(0, act).findLast((each) => each.kind in TOLD);
    lines = [...(last && last.kind !== "act" && last.kind !== "note" ? [last] : []), loud[act], ...choices.slice(-MOST_CHOSEN), ...since.filter((each) => each.kind in TOLD).slice(-1)];
  }
  const now = JSON.stringify(lines.map((each) => each.number));
  if (now === told) return;
  told = now;
  $("story").hidden = !lines.length;
  $("story").replaceChildren(...lines.map(storyLine));
}, 800);

draws(null, ["plan"], () => {
  const lines = shown().plan?.now?.notices || [];
  if ([...$("notices").children].map((each) => each.textContent).join() === lines.join()) return;
  $("notices").hidden = !lines.length;
  $("notices").replaceChildren(...lines.map((each) => h("li", {}, each)));
}, 500);
