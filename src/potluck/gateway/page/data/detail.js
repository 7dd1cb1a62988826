// One replica in words, and what can be asked of it. Orders need the operators' key, here and at the gateway.

import { $, h, percent, gpu, short } from "/page/dom.js";
import { state, shown } from "/page/state.js";
import { ask, hasKey } from "/page/stream.js";
import { confirm, toast } from "/page/ask.js";

const box = $("detail");
let drawn = "";

export function detail(name, choose) {
  const rows = shown().replicas || {};
  const row = name ? rows[name] : null;
  if (!row) {
    box.hidden = true;
    drawn = "";
    return;
  }
  const now = JSON.stringify([name, { ...row, busy: 0, prompt_tokens_per_s: 0, output_tokens_per_s: 0 }, hasKey(), Boolean(state.past)]); // but for what is not told here
  if (now === drawn) return;
  const before = document.activeElement?.dataset?.order;
  drawn = now;
  box.hidden = false;
  box.replaceChildren(
    h("h3", {}, short(name, rows)),
    h("button", { type: "button", class: "close", onclick: () => choose(null), "data-order": "close" }, "Close"),
    h("p", { class: "mono" }, name),
    facts(row),
    controls(name, row),
  );
  if (before) box.querySelector(`[data-order="${before}"]`)?.focus();
}

function facts(row) {
  const said = [
    ["model", row.model],
    ["role", row.role === row.planned_role ? row.role : `${row.role} (planned: ${row.planned_role})`],
    ["state", `${row.state}${row.doubted && row.state !== "lost" ? ", doubted: a request failed there" : ""}${row.cordoned ? ", cordoned: gets no new requests" : ""}${row.by_hand ? ", set by hand" : ""}`],
    ["requests", `${row.open} open: ${row.running} running, ${row.waiting} queued`],
    ["KV memory", `${percent(row.kv)} used`],
    ["pace", row.pace === null ? "unknown: no planned speed" : row.pace === 1 ? "as planned" : `${row.pace} times the planned step time`],
    ["GPUs", stages(row)],
    ["template", row.template],
  ];
  if (row.why) said.splice(3, 0, ["why", row.why]);
  return h("dl", {}, said.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function stages(row) {
  return row.stages.map((stage) => `${row.stages.length > 1 ? `${stage.layers} layers on ` : ""}${stage.nodes.map(([node, tp]) => `${gpu(node)}${tp > 1 ? `, over ${tp} GPUs` : ""}`).join(" and ")}`).join(", then ");
}

function controls(name, row) {
  const able = hasKey() && !state.past && row.state !== "lost";
  const other = row.role === "prefill" ? "decode" : "prefill";
  const order = (label, path, body, sure) => h("button", {
    type: "button", disabled: !able, "data-order": path,
    onclick: async () => {
      if (!(await confirm(label, sure, label))) return;
      try {
        await ask(path, body);
        toast(`${label}: asked for`);
      } catch (error) {
        toast(error.message, true);
      }
    },
  }, label);
  return h("div", { class: "row" },
    order("Drain", "/drain", { replica: name }, `${short(name, shown().replicas)} gets no new requests and finishes its ${row.open} open requests; then its engine is replaced. The other replicas of its copy are drained too.`),
    row.cordoned
      ? order("Uncordon", "/uncordon", { replica: name }, "It gets new requests again.")
      : order("Cordon", "/cordon", { replica: name }, `It gets no new requests, finishes its ${row.open} open requests, and is not replaced.`),
    order(`Flip to ${other}`, "/flip", { replica: name, role: other }, `Its role is ${other} until it is flipped back.`),
    order("Kill", "/kill", { replica: name }, `Its engine is killed at once. Its ${row.open} open requests are retried elsewhere, and another engine is started.`),
    able ? null : h("p", { class: "note" }, state.past ? "This is a past state: no changes." : row.state === "lost" ? "The replica is lost." : "Changes need the operator key (top right)."));
}
