// What the stream says, kept as it is now; and one list of who draws what, so that little is drawn twice.

export const MOST_REQUESTS = 600;
export const MOST_EVENTS = 1000;

export const state = {
  tables: {}, requests: new Map(), events: [], points: { at_s: [], models: {} },
  past: null, // a moment of the past that is shown instead of now
  at_s: 0, offset_s: 0,
  window_s: 15, // over which a point's rates and percentiles are taken, as the stream says
};

const FRAME_MS = 5; // of painters' work in one frame; what is left is drawn in the next, so that no frame takes long
const OFFSCREEN_MS = 2000; // outside the viewport a section is drawn no more often, but it is: captures and prints show it
const TOGETHER = "points"; // its painters draw in one frame: a tile and a plot of the same figure never differ
const painters = [];
const dirty = new Set();

/**
 * `paint` is called when one of these topics changed, not more often than every_ms, and OFFSCREEN_MS where its element
 * is outside the viewport. Where it says "more" it is called again in the next frame.
 */
export function draws(element, topics, paint, every_ms = 500) {
  const painter = { element, topics: new Set(topics), paint, every_ms, last: 0, due: true, seen: true };
  painters.push(painter);
  if ("IntersectionObserver" in window && element) {
    painter.seen = false;
    new IntersectionObserver((entries) => {
      painter.seen = entries[entries.length - 1].isIntersecting;
      if (painter.seen && painter.due) soon();
    }, { rootMargin: "80px" }).observe(element);
  }
  return () => { painter.due = true; painter.last = 0; soon(); };
}

export function touched(...topics) {
  for (const topic of topics) dirty.add(topic);
  soon();
}

let timer = 0;
function soon() {
  if (!timer) timer = setTimeout(() => requestAnimationFrame(paintAll), 60);
}

/** `everything`: what is due is drawn in this frame, however long that takes, and wherever it is. */
function paintAll(now, everything = false) {
  timer = 0;
  const together = dirty.has(TOGETHER);
  for (const painter of painters) {
    if (!painter.due) for (const topic of dirty) if (painter.topics.has(topic)) { painter.due = true; break; }
  }
  dirty.clear();
  let later = Infinity;
  const began = performance.now();
  for (const painter of painters) {
    if (!painter.due) continue;
    const once = everything || (together && painter.topics.has(TOGETHER));
    const every_ms = once ? 0 : painter.seen ? painter.every_ms : Math.max(painter.every_ms, OFFSCREEN_MS);
    const wait = painter.last + every_ms - now;
    if (wait > 4) { later = Math.min(later, wait); continue; }
    if (!once && performance.now() - began > FRAME_MS) { later = 0; continue; }
    painter.due = false;
    painter.last = now;
    if (painter.paint() === "more") { painter.due = true; painter.last = -Infinity; later = 0; }
  }
  if (later === 0 && !timer) timer = requestAnimationFrame(paintAll);
  else if (later < Infinity && !timer) timer = setTimeout(() => requestAnimationFrame(paintAll), later);
}

/** Before a print everything is drawn at once: no frame comes between this event and the print. */
addEventListener("beforeprint", () => {
  dirty.clear();
  for (const painter of painters) {
    painter.due = false;
    painter.last = performance.now();
    while (painter.paint() === "more");
  }
});

/** The tables of the moment that is shown. */
export const shown = () => (state.past ? state.past.tables : state.tables);

export function whole(said) {
  state.tables = said.tables;
  state.points = said.points;
  state.events = said.events;
  state.at_s = said.at_s;
  state.window_s = said.window_s ?? state.window_s;
  addRequests(said.requests);
  for (const topic of [...Object.keys(said.tables), "points", "events", "requests"]) dirty.add(topic);
  paintAll(performance.now(), true); // a capture may come before the next frame
}

export function news(said) {
  state.at_s = said.at_s;
  const topics = [];
  for (const [table, rows] of Object.entries(said.set || {})) {
    const mine = (state.tables[table] ||= {});
    for (const [name, row] of Object.entries(rows)) mine[name] = { ...mine[name], ...row };
    topics.push(table);
  }
  for (const [table, names] of Object.entries(said.gone || {})) {
    for (const name of names) delete state.tables[table]?.[name];
    topics.push(table);
  }
  if (said.requests) { addRequests(said.requests); topics.push("requests"); }
  if (said.events) {
    state.events = state.events.concat(said.events).slice(-MOST_EVENTS);
    topics.push("events");
  }
  if (said.point) { addPoint(said.point); topics.push("points"); }
  touched(...topics);
}

/** The last point at or before the moment that is shown; -1 where there is none. */
export function lastPoint() {
  const { at_s } = state.points;
  const until = state.past ? state.past.at_s : Infinity;
  return at_s.findLastIndex((each) => each <= until);
}

/** A model's figure over the last `window_s`: the last value of its plot, and what tiles show. */
export const figureNow = (model, name) => state.points.models[model]?.[name]?.[lastPoint()] ?? null;

export const windowWords = () => `last ${state.window_s} s`;

function addRequests(rows) {
  for (const [id, row] of Object.entries(rows)) {
    row.id = id;
    state.requests.set(id, row);
  }
  if (state.requests.size > MOST_REQUESTS) {
    for (const id of state.requests.keys()) {
      state.requests.delete(id);
      if (state.requests.size <= MOST_REQUESTS * 0.8) break;
    }
  }
}

function addPoint(point) {
  const { points } = state;
  points.at_s.push(point.at_s);
  const count = points.at_s.length;
  for (const [model, figures] of Object.entries(point.models)) {
    const mine = (points.models[model] ||= {});
    for (const [name, value] of Object.entries(figures)) {
      const list = (mine[name] ||= new Array(count - 1).fill(null));
      list.push(value);
    }
  }
  if (count > 1900) {
    points.at_s.splice(0, 100);
    for (const mine of Object.values(points.models)) for (const list of Object.values(mine)) list.splice(0, 100);
  }
}
