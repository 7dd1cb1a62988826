// Four small plots on canvases of our own: lines over time, the objective and what was planned as levels.

import { $, h, seconds, usd, count, clock, legend, text } from "/page/dom.js";
import { state, draws, shown } from "/page/state.js";

const PLOTS = [
  { id: "ttft", term: "TTFT", name: "Time to first token", lines: [["ttft_p50_s", "a"], ["ttft_p90_s", "b"]], level: (row) => [row.slo?.ttft_s, row.planned?.ttft_s], says: seconds },
  { id: "tpot", term: "TPOT", name: "Time per output token", lines: [["tpot_p50_s", "a"], ["tpot_p90_s", "b"]], level: (row) => [row.slo?.tpot_s, row.planned?.tpot_s], says: seconds },
  { id: "goodput", name: "Requests per second", lines: [["ended_per_s", "b"], ["in_time_per_s", "a"]], level: (row) => [null, row.planned?.capacity_per_s, "capacity"], says: (value) => `${count(value)}/s` },
  { id: "cost", name: "Cost of a million tokens", lines: [["usd_per_mtok", "a"]], level: () => [null, null], says: usd, smooth: 15 },
];
const NAMES = { ttft_p50_s: "median", ttft_p90_s: "9 of 10", tpot_p50_s: "median", tpot_p90_s: "9 of 10", ended_per_s: "all", in_time_per_s: "in time", usd_per_mtok: "cost" };
const grid = $("plot-grid");
const model = $("plot-model"), span = $("plot-span");
let pointer = null;

legend($("plot-legend"), [["line-a", "median; in time"], ["line-b", "9 of 10; all"], ["line-slo", "objective"], ["line-plan", "planned"]]);

const boxes = PLOTS.map((plot) => {
  const canvas = h("canvas", { role: "img", tabindex: "0" });
  const value = h("span", { class: "value" });
  grid.append(h("figure", {}, h("figcaption", {}, h("span", plot.term ? { "data-term": plot.term } : {}, plot.name), value), canvas));
  const move = (event) => { pointer = (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth; repaint(); };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerleave", () => { pointer = null; repaint(); });
  canvas.addEventListener("keydown", (event) => {
    const step = event.key === "ArrowLeft" ? -0.03 : event.key === "ArrowRight" ? 0.03 : 0;
    if (!step) return;
    event.preventDefault();
    pointer = Math.min(1, Math.max(0, (pointer ?? 1) + step));
    repaint();
  });
  canvas.addEventListener("blur", () => { pointer = null; repaint(); });
  return { plot, canvas, value };
});

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { a: of("--blue"), b: of("--ink"), slo: of("--bad"), plan: of("--green"), text: of("--dim"), line: of("--line"), ink: of("--ink"), paper: of("--card") };
}

/** Means over a few points, for what jumps. */
function smoothed(values, width) {
  if (!width) return values;
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - width + 1), at + 1).filter((each) => each !== null && each !== undefined);
    return near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : null;
  });
}

function nice(top) {
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= top * 0.999) || top;
}

function draw({ plot, canvas, value }, ink) {
  const row = (shown().models || {})[model.value] || {};
  const { at_s, models } = state.points;
  const figures = models[model.value] || {};
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const scale = Math.min(2, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  const end = at_s.length ? at_s[at_s.length - 1] : state.at_s;
  const begin = Math.max(end - Number(span.value), Math.min(at_s[0] ?? end, end - 60));
  let first = at_s.findIndex((each) => each >= begin - 2);
  if (first < 0) first = at_s.length;
  const times = at_s.slice(first);
  const series = plot.lines.map(([name, colour]) => ({ name, colour: ink[colour], values: smoothed((figures[name] || []).slice(first), plot.smooth) }));
  const [slo, planned, label = "planned"] = plot.level(row);
  const all = series.flatMap((each) => each.values.filter((one) => one !== null && one !== undefined));
  const seen = all.length ? Math.max(...all) : 0;
  // A level far above all that was seen would flatten it; it is then told at the edge.
  const levels = [slo, planned].filter((each) => each && (each <= seen * 4 || !seen));
  const top = nice(Math.max(seen * 1.1, ...levels.map((each) => each * 1.08), 1e-6));
  const left = 52, bottom = 18, right = 6, up = 6;
  const x = (at) => left + ((at - begin) / (end - begin)) * (width - left - right);
  const y = (each) => up + (1 - each / top) * (height - up - bottom);
  pen.fillStyle = ink.text;
  pen.strokeStyle = ink.line;
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(top * part)) + 0.5;
    pen.beginPath(); pen.moveTo(left, at); pen.lineTo(width - right, at); pen.stroke();
    pen.textAlign = "right";
    pen.fillText(plot.says(top * part), left - 6, at);
  }
  pen.textBaseline = "alphabetic";
  for (const part of [0, 0.5, 1]) {
    pen.textAlign = part === 0 ? "left" : part === 1 ? "right" : "center";
    pen.fillText(clock(begin + (end - begin) * part), left + (width - left - right) * part, height - 4);
  }
  const levelLine = (each, colour, dash, words, below) => {
    if (!each) return;
    const beyond = each > top;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.textAlign = "right";
    if (!beyond) {
      pen.setLineDash(dash); pen.lineWidth = 1.5;
      pen.beginPath(); pen.moveTo(left, y(each)); pen.lineTo(width - right, y(each)); pen.stroke();
      pen.setLineDash([]);
    }
    const said = `${words} ${plot.says(each)}${beyond ? " ↑" : ""}`;
    const at = beyond ? up + 10 : below ? y(each) + 13 : y(each) - 5;
    const long = pen.measureText(said).width;
    pen.fillStyle = ink.paper;
    pen.globalAlpha = 0.85;
    pen.fillRect(width - right - long - 6, at - 10, long + 6, 13);
    pen.globalAlpha = 1;
    pen.fillStyle = colour;
    pen.fillText(said, width - right - 2, at);
  };
  pen.save();
  pen.beginPath(); pen.rect(left, 0, width - left - right, height - bottom + 1); pen.clip();
  for (const { values, colour } of series) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1.8;
    pen.beginPath();
    let last = -Infinity;
    values.forEach((each, at) => {
      if (each === null || each === undefined) return;
      if (times[at] - last > 30) pen.moveTo(x(times[at]), y(each)); else pen.lineTo(x(times[at]), y(each));
      last = times[at];
    });
    pen.stroke();
  }
  pen.restore();
  levelLine(slo, ink.slo, [6, 4], "objective", false);
  levelLine(planned, ink.plan, [2, 3], label, slo && planned && planned < slo && slo - planned < top * 0.2);
  if (state.past) { pen.strokeStyle = ink.ink; pen.beginPath(); pen.moveTo(x(state.past.at_s), up); pen.lineTo(x(state.past.at_s), height - bottom); pen.stroke(); }
  let at = times.length - 1;
  if (pointer !== null && times.length) {
    const wanted = begin + (Math.min(1, Math.max(0, (pointer * width - left) / (width - left - right)))) * (end - begin);
    at = times.reduce((best, each, place) => (Math.abs(each - wanted) < Math.abs(times[best] - wanted) ? place : best), 0);
    pen.strokeStyle = ink.text;
    pen.beginPath(); pen.moveTo(x(times[at]), up); pen.lineTo(x(times[at]), height - bottom); pen.stroke();
  }
  const near = (values) => { for (let place = at; place >= Math.max(0, at - 5); place--) if (values[place] !== null && values[place] !== undefined) return values[place]; return null; };
  const words = series.map((each) => `${NAMES[each.name]} ${plot.says(near(each.values))}`).join(" · ");
  text(value, `${pointer !== null && times.length ? `${clock(times[at])}  ` : ""}${words}`);
  canvas.setAttribute("aria-label", `${plot.name}: ${words}${slo ? `, objective ${plot.says(slo)}` : ""}${planned ? `, ${label} ${plot.says(planned)}` : ""}`);
}

function paint() {
  const names = Object.keys(shown().models || {});
  if ([...model.options].map((each) => each.value).join() !== names.join()) {
    const before = model.value;
    model.replaceChildren(...names.map((each) => h("option", { value: each }, each)));
    if (names.includes(before)) model.value = before;
    model.parentElement.hidden = names.length < 2;
  }
  const ink = colours();
  for (const box of boxes) draw(box, ink);
}

export const repaint = draws($("plots"), ["points", "models"], paint, 200);
model.addEventListener("change", repaint);
span.addEventListener("change", repaint);
new ResizeObserver(repaint).observe(grid);
export const currentModel = () => model.value;
