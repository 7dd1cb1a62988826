// Four small plots: lines over time, with the objective and what was planned named at the edge. SVG, dressed by base.css.

import { $, h, svg, seconds, usd, count, clock, legend, text, brief, known } from "/page/dom.js";
import { state, draws, shown, touched, windowWords } from "/page/state.js";

const PLOTS = [
  { term: "TTFT", name: "TTFT", lines: ["ttft_p50_s", "ttft_p90_s"], level: (row) => [row.slo?.ttft_s, row.planned?.ttft_s], says: seconds, cuts: true },
  { term: "TPOT", name: "TPOT", lines: ["tpot_p50_s", "tpot_p90_s"], level: (row) => [row.slo?.tpot_s, row.planned?.tpot_s], says: seconds, cuts: true },
  { name: "Requests ended", lines: ["in_time_per_s", "ended_per_s"], level: (row) => [null, row.planned?.capacity_per_s, "capacity"], says: (value) => `${count(value)} req/s` },
  { name: "Cost per million prompt + output tokens", lines: ["usd_per_mtok"], level: () => [], says: usd, cuts: true },
];
const NAMES = { ttft_p50_s: "p50", ttft_p90_s: "p90", tpot_p50_s: "p50", tpot_p90_s: "p90", ended_per_s: "all", in_time_per_s: "within SLO", usd_per_mtok: "cost" };
const HIGH = 124, LEFT = 52, RIGHT = 124, UP = 12, BOTTOM = 20;
const SPIKE = 2.5; // times the objective, or what nine of ten points are below: what is beyond is cut off, and marked
const grid = $("plot-grid");
const model = $("plot-model"), span = $("plot-span");
let pointer = null;

legend($("plot-legend"), [["line-a", "p50; within SLO"], ["line-b", "p90; all"], ["line-bad", "over the SLO"], ["line-slo", "SLO"], ["line-plan", "planned"]]);

const boxes = PLOTS.map((plot, number) => {
  const chart = svg("svg", { class: "plot", role: "img", tabindex: "0" });
  const value = h("span", { class: "value" });
  grid.append(h("figure", {}, h("figcaption", {}, h("span", plot.term ? { "data-term": plot.term } : {}, plot.name), value), chart));
  const at = (place) => { pointer = place === null ? null : Math.min(1, Math.max(0, place)); repaint(); };
  chart.addEventListener("pointermove", (event) => at((event.clientX - chart.getBoundingClientRect().left - LEFT) / (chart.clientWidth - LEFT - RIGHT)));
  chart.addEventListener("pointerleave", () => at(null));
  chart.addEventListener("blur", () => at(null));
  chart.addEventListener("keydown", (event) => {
    const step = event.key === "ArrowLeft" ? -0.03 : event.key === "ArrowRight" ? 0.03 : 0;
    if (!step) return;
    event.preventDefault();
    at((pointer ?? 1) + step);
  });
  return { plot, chart, value, number };
});

function nice(top) {
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((each) => each * power).find((each) => each >= top * 0.999) || top;
}

/** Up to where it is drawn: all that was seen, but for a few spikes that would flatten the rest. */
function ceiling(values, levels, cuts) {
  if (!values.some((each) => each > 0)) return nice(Math.max(0, ...levels) * 1.1 || 1);
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted[sorted.length - 1], usual = sorted[Math.floor(sorted.length * 0.9)];
  const near = levels.filter((each) => each <= most * 4); // one far above all that was seen would flatten it as well
  const bound = SPIKE * Math.max(usual, ...near);
  return nice(Math.max(cuts && bound > 0 && most > bound ? Math.max(usual * 1.2, ...near.map((each) => each * 1.5)) : most * 1.08, ...near.map((each) => each * 1.08), 1e-6));
}

function path(times, values, x, y) {
  let last = -Infinity, found = "";
  values.forEach((each, at) => {
    if (!known(each)) return;
    found += `${times[at] - last > 30 ? "M" : "L"}${x(times[at]).toFixed(1)} ${y(each).toFixed(1)}`;
    last = times[at];
  });
  return found;
}

function draw({ plot, chart, value, number }) {
  const row = (shown().models || {})[model.value] || {};
  const { at_s, models } = state.points;
  const figures = models[model.value] || {};
  const wide = Math.max(240, chart.clientWidth), edge = wide - RIGHT, base = HIGH - BOTTOM;
  const end = at_s.length ? at_s[at_s.length - 1] : state.at_s;
  const begin = Math.max(end - Number(span.value), Math.min(at_s[0] ?? end, end - 60));
  let first = at_s.findIndex((each) => each >= begin - 2);
  if (first < 0) first = at_s.length;
  const times = at_s.slice(first);
  const series = plot.lines.map((name) => ({ name, values: (figures[name] || []).slice(first) }));
  const [slo, planned, label = "planned"] = plot.level(row);
  const levels = [["SLO", slo, "slo"], [label, planned, "plan"]].filter((each) => each[1]);
  const top = ceiling(series.flatMap((each) => each.values.filter(known)), levels.map((each) => each[1]), plot.cuts);
  const x = (at) => LEFT + ((at - begin) / (end - begin)) * (edge - LEFT);
  const y = (each) => base - Math.min(1.02, each / top) * (base - UP);
  const parts = [];
  const add = (tag, attributes, ...inside) => parts.push(svg(tag, attributes, ...inside));
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(top * part)) + 0.5;
    add("path", { class: part ? "grid" : "axis", d: `M${LEFT} ${at}H${edge}` });
    add("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, brief(plot.says(top * part)));
    add("text", { x: LEFT + (edge - LEFT) * part, y: HIGH - 4, "text-anchor": ["start", "middle", "end"][part * 2] }, clock(begin + (end - begin) * part));
  }
  drawLines(add, series, times, x, y, { slo: slo < top ? slo : null, edge, number });
  drawSpikes(add, series, times, x, top, plot.says, slo ? "late" : "c0");
  drawLevels(add, levels, y, top, edge, plot.says);
  const mark = (at) => add("path", { class: "cursor", d: `M${x(at)} ${UP}V${base}` });
  if (state.past) mark(state.past.at_s);
  let at = times.length - 1;
  const pointed = pointer !== null && times.length > 0;
  if (pointed) {
    const wanted = begin + pointer * (end - begin);
    at = times.reduce((best, each, place) => (Math.abs(each - wanted) < Math.abs(times[best] - wanted) ? place : best), 0);
    mark(times[at]);
  }
  chart.setAttribute("viewBox", `0 0 ${wide} ${HIGH}`);
  chart.replaceChildren(...parts);
  const words = series.map((each) => `${NAMES[each.name]} ${known(each.values[at]) ? plot.says(each.values[at]) : "–"}`).join(" · ");
  text(value, `${pointed ? `${clock(times[at])}  ` : ""}${words}`);
  chart.setAttribute("aria-label", `${plot.name}: ${words}${levels.map(([name, each]) => `, ${name} ${plot.says(each)}`).join("")}`);
}

/** The first is filled and thick, the second thin; what is beyond the objective is red. */
function drawLines(add, series, times, x, y, { slo, edge, number }) {
  if (slo) add("clipPath", { id: `late-${number}` }, svg("rect", { x: LEFT, y: 0, width: edge - LEFT, height: y(slo) }));
  series.forEach(({ values }, place) => {
    const d = path(times, values, x, y);
    if (!d) return;
    if (!place) {
      const solid = d.split("M").slice(1).map((each) => `M${each}V${HIGH - BOTTOM}H${each.split(" ")[0]}Z`).join("");
      add("path", { class: "area c0", d: solid });
    }
    const kind = place ? "line thin c0" : "line c0";
    add("path", { class: kind, d });
    if (slo) add("path", { class: kind.replace("c0", "late"), d, "clip-path": `url(#late-${number})` });
  });
}

/** What is beyond the top: a mark for each run of points, with the highest value where the next mark leaves room. */
function drawSpikes(add, series, times, x, top, says, kind) {
  const highest = times.map((_, at) => Math.max(...series.map((each) => each.values[at] ?? 0)));
  const peaks = [];
  highest.forEach((each, at) => {
    if (each <= top) return;
    if (at && highest[at - 1] > top) { if (each > highest[peaks.at(-1)]) peaks[peaks.length - 1] = at; } else peaks.push(at);
  });
  peaks.forEach((at, place) => {
    const here = x(times[at]), next = place + 1 < peaks.length ? x(times[peaks[place + 1]]) : Infinity;
    add("path", { class: `spike ${kind}`, d: `M${here - 5} ${UP}L${here} ${UP - 8}L${here + 5} ${UP}Z` }, svg("title", {}, `${says(highest[at])} at ${clock(times[at])}, beyond what is drawn`));
    if (next - here > 64) add("text", { class: `cut ${kind}`, x: here + 8, y: UP - 1 }, says(highest[at]));
  });
}

/** Their names stand to the right of all points, never above each other. */
function drawLevels(add, levels, y, top, edge, says) {
  const named = levels.map(([name, each, kind]) => ({ name, each, kind, at: each > top ? UP : y(each), far: each > top })).sort((a, b) => a.at - b.at);
  named.forEach((one, place) => {
    if (!one.far) add("path", { class: `level ${one.kind}`, d: `M${LEFT} ${one.at}H${edge + 4}` });
    one.says = Math.max(one.at, place ? named[place - 1].says + 13 : -Infinity);
  });
  for (const one of named) add("text", { class: `named ${one.kind}`, x: edge + 8, y: one.says + 4 }, `${one.name} ${brief(says(one.each))}${one.far ? " ↑" : ""}`);
}

function paint() {
  const names = Object.keys(shown().models || {});
  if ([...model.options].map((each) => each.value).join() !== names.join()) {
    const before = model.value;
    model.replaceChildren(...names.map((each) => h("option", { value: each }, each)));
    if (names.includes(before)) model.value = before;
    model.parentElement.hidden = names.length < 2;
  }
  text($("plot-window"), `(each point: ${windowWords()})`);
  for (const box of boxes) draw(box);
}

const repaint = draws($("plots"), ["points"], paint, 200);
model.addEventListener("change", () => touched("points")); // the tiles name its TTFT too
span.addEventListener("change", repaint);
new ResizeObserver(repaint).observe(grid);
export const currentModel = () => model.value;
