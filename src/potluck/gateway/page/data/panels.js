// The plan and why, planned beside observed, tenants, refusals, and the log of decisions.

import { $, h, text, table, usd, seconds, count, percent, clock, gpu, plain, brief, known } from "/page/dom.js";
import { state, shown, draws } from "/page/state.js";
import { REFUSALS } from "/page/fall.js";

const KINDS = { pair: "two GPUs share each prompt", pipeline: "layers spread over nodes", group: "a group of machines" };
const CONFIDENCE = { measured: "performance measured on this GPU", transferred: "performance transferred from related GPUs", assumed: "performance assumed" };

draws($("plan"), ["plan", "deployments", "models"], () => {
  const tables = shown();
  const plan = tables.plan?.now;
  if (!plan) return;
  const sure = plan.gap <= 0.0001 ? "proven cheapest of its templates for mean traffic" : `at most ${(plan.gap * 100).toFixed(1)} % above the cheapest of its templates for mean traffic`;
  const whole = plan.fraction < 1 ? ` It serves only ${percent(plan.fraction)} of the demand.` : "";
  text($("plan-why"), `Version ${plan.version}, strategy ${plan.strategy}: ${plan.usd_per_h === null ? "existing servers at an unknown price" : `${usd(plan.usd_per_h)}/h planned, ${usd(plan.now_usd_per_h)}/h rented now; ${sure}`}.${whole} ${reason(tables)} Why now: ${plan.why}. ${plan.thinks ? `Scaling (${plan.scaling}): ${plan.thinks}.` : `Scaling: ${plan.scaling}.`}`);
  const rows = Object.entries(tables.deployments || {}).sort().map(([, each]) => [
    h("span", {}, `${each.count} × `, h("b", {}, each.replicas.map((one) => `${gpu(one.gpu)}${one.role === "mixed" ? "" : ` (${one.role})`}`).join(" + ")), h("div", { class: "note" }, `${doing(each)}; ${CONFIDENCE[each.confidence] || each.confidence}`), stageBars(each)),
    each.region, each.model, takes(each), usd(each.usd_per_h)]);
  table($("deployments"), [{ name: "Copies" }, { name: "Region" }, { name: "Model" }, { name: "Planned load" }, { name: "$/h", right: true }], rows, "What the plan deploys");
  promises(tables);
}, 1500);

/** Which part of requests a copy does, by the roles of its replicas. */
export function doing(each) {
  const roles = new Set(each.replicas.map((one) => one.role));
  const part = roles.has("mixed") ? "Mixed (prefill + decode)" : roles.size > 1 ? "Prefill and Decode apart" : roles.has("prefill") ? "Prefill only" : "Decode only";
  return KINDS[each.kind] ? `${part}, ${KINDS[each.kind]}` : part;
}

function reason(tables) {
  const said = Object.entries(tables.models || {}).filter(([, each]) => each.planned && each.slo).map(([name, each]) => `${count(each.planned.demand_per_s)} req/s of ${name} (capacity ${count(each.planned.capacity_per_s)} req/s), TTFT ${brief(seconds(each.slo.ttft_s))}, TPOT ${brief(seconds(each.slo.tpot_s))}`);
  return said.length ? `Planned for ${said.join("; ")}.` : "";
}

function stageBars(each) {
  return each.replicas.filter((one) => one.stages.length > 1).map((one) => h("div", { class: "stages", role: "img", "aria-label": one.stages.map((stage) => `${stage.layers} layers on ${stage.nodes.map(([node]) => gpu(node)).join(", ")}`).join("; ") },
    one.stages.map((stage) => h("i", { "--layers": stage.layers }, `${stage.layers} · ${stage.nodes.map(([node]) => gpu(node)).join("+")}`))));
}

function takes(each) {
  const found = new Map();
  for (const share of each.shares) found.set(share.phase, (found.get(share.phase) || 0) + share.rate_per_s);
  const longest = Math.max(0, ...each.shares.map((share) => share.up_to_tokens || 0));
  const words = { prefill: "prefill", decode: "decode", closed: "prefill + decode" };
  const said = [...found].filter(([, rate]) => rate > 0).map(([phase, rate]) => `${count(rate)} req/s ${words[phase]}`);
  return said.length ? `${said.join(", ")}${longest ? `, prompts up to ${count(longest)} tokens` : ""}` : "any";
}

/** SLO attainment of each class, where there are several. */
function perClass(model, slo, classes) {
  const rows = Object.entries(classes || {});
  if (rows.length < 2) return [];
  return rows.map(([name, [requests, inTime]]) => [`${model}: SLO attainment, class ${name}`, slo ? percent(slo.attainment) : "–", "–", requests ? percent(inTime / requests) : "–", ""]);
}

function promises(tables) {
  const rows = [];
  const verdict = (kept) => (kept ? "✓ met" : h("span", { class: "bad" }, "✗ missed"));
  for (const [name, each] of Object.entries(tables.models || {})) {
    const { planned, slo, last_min: seen } = each;
    const within = (value, limit) => (!known(value) || !limit ? "" : verdict(value <= limit));
    const attained = seen?.requests ? seen.in_time / seen.requests : null;
    rows.push(
      [`${name}: TTFT p90`, seconds(slo?.ttft_s), seconds(planned?.ttft_s), seconds(seen?.ttft_p90_s), within(seen?.ttft_p90_s, slo?.ttft_s)],
      [`${name}: TPOT p90`, seconds(slo?.tpot_s), seconds(planned?.tpot_s), seconds(seen?.tpot_p90_s), within(seen?.tpot_p90_s, slo?.tpot_s)],
      [`${name}: requests`, "–", planned ? `${count(planned.demand_per_s)} of ${count(planned.capacity_per_s)} req/s` : "–", seen ? `${count(seen.requests_per_s)} req/s` : "–", ""],
      [`${name}: SLO attainment`, slo ? percent(slo.attainment) : "–", "–", attained === null ? "–" : percent(attained), attained !== null && slo ? verdict(attained >= slo.attainment) : ""],
      ...perClass(name, slo, seen?.classes),
      [`${name}: cost`, "–", "–", each.usd_per_h === null ? "unknown" : `${usd(each.usd_per_h)}/h, ${usd(seen?.usd_per_mtok)} per million prompt + output tokens`, ""]);
  }
  table($("promises"), [{ name: "" }, { name: "SLO", right: true }, { name: "Planned", right: true }, { name: "Observed, last 60 s", right: true }, { name: "" }], rows, "Planned beside observed");
}

draws($("tenants"), ["tenants"], () => {
  const rows = shown().tenants || {};
  const weights = Object.values(rows).reduce((sum, each) => sum + each.weight, 0) || 1;
  table($("tenant-table"), [{ name: "Tenant" }, { name: "Fair share and use" }, { name: "Prompt tok/min", right: true }, { name: "Output tok/min", right: true }, { name: "Running", right: true }, { name: "Waiting", right: true }],
    Object.entries(rows).map(([name, each]) => [name,
      h("span", { class: "shares", role: "img", "aria-label": `fair share ${percent(each.weight / weights)}, used ${percent(each.share)}` },
        h("span", { class: "track" }, h("i", { class: "bar due", "--part": (each.weight / weights).toFixed(3) })),
        h("span", { class: "track" }, h("i", { class: "bar used", "--part": each.share })),
        h("small", {}, `fair share ${percent(each.weight / weights)}, used ${percent(each.share)}`)),
      count(each.prompt_tokens_last_min), count(each.output_tokens_last_min), String(each.running), String(each.waiting)]), "Tenants and their shares");
}, 1000);

// Refused and failed requests of the last minute: one line for all of the same model, tenant, class and reason.

draws($("requests"), ["refusals"], () => {
  const groups = Object.entries(shown().refusals || {}).sort(([a, one], [b, other]) => (a === "other") - (b === "other") || other.count - one.count);
  $("refusals").hidden = !groups.length;
  $("refusals").replaceChildren(...groups.map(([key, each]) => h("li", { "data-reason": each.reason },
    h("b", { class: "times" }, `${count(each.count)}×`),
    key === "other" ? h("span", { class: "what" }, "of other models, tenants or reasons") : h("span", { class: "what" },
      h("b", {}, each.model || "no model"), " ", h("code", {}, each.reason), ` ${REFUSALS[each.reason] || ""}`,
      h("span", { class: "note" }, `${each.tenant ? ` · tenant ${each.tenant}` : ""}${each.class ? ` · class ${each.class}` : ""}${each.why ? ` · latest: ${each.why}` : ""}`)),
    h("span", { class: "note" }, `last ${clock(each.last_s)}`))));
}, 1000);

const MOST_LINES = 200;
const kind = $("event-kind"), find = $("event-find"), list = $("event-list");
const listedKinds = new Set();

function eventLine(each) {
  return h("li", { class: `event ${each.kind}` },
    h("a", { href: `#t=${Math.floor(each.at_s)}` }, clock(each.at_s)),
    h("span", { class: "kind" }, each.kind),
    h("span", { class: "what", title: each.what }, plain(each.what)),
    each.why ? h("span", { class: "why" }, plain(each.why)) : null);
}

let first = null;
const repaintEvents = draws($("events"), ["events"], () => {
  for (const each of state.events) if (!listedKinds.has(each.kind)) { listedKinds.add(each.kind); kind.append(h("option", { value: each.kind }, each.kind)); }
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
  list.replaceChildren(...found.map(eventLine), found.length ? "" : h("li", { class: "note" }, "No matching decisions."));
}, 500);
kind.addEventListener("change", repaintEvents);
find.addEventListener("input", repaintEvents);

// The story: what happens, what was chosen, what came of it; the lines of an act, or the latest decision.

const TOLD = { act: "Event", outcome: "Outcome", saving: "Savings", end: "End", note: "Note" };
const CAUSES = ["lost", "market", "order"];
const QUIET = ["ready", "start", "stop", "cache", "drain", "replan", "recast"];
const MOST_CHOSEN = 3;

function storyLine(each) {
  return h("p", { class: each.kind }, h("a", { href: `#t=${Math.floor(each.at_s)}` }, clock(each.at_s)),
    h("b", {}, TOLD[each.kind] || (CAUSES.includes(each.kind) ? "Event" : "Decision")),
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
