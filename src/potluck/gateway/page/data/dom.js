// Elements and words. Text is only ever set as text: nothing that a prompt, a model or a name says becomes markup.

export const $ = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Sets a text only where it is another, so that nothing is laid out anew for nothing. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function attribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.floor(value / 60)} min${value % 60 >= 0.5 ? ` ${Math.round(value % 60)} s` : ""}`;
}

/** A figure on an axis: 2 s, not 2.00 s. */
export const brief = (words) => words.startsWith("$") ? words.replace(/\.00$/, "") : words.replace(/\.(\d*?)0+(?=\D|$)/, (_, rest) => (rest ? `.${rest}` : ""));

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  return value >= 1e3 ? Math.round(value).toLocaleString("en") : Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}

export const known = (value) => value !== null && value !== undefined;
export const usd = (value) => (value === null || value === undefined ? "–" : `$${value.toFixed(2)}`);
export const percent = (value) => `${Math.round(value * 100)} %`;
export const clock = (at_s) => new Date(at_s * 1000).toLocaleTimeString([], { hour12: false });

export function mbit(value) {
  return value >= 1000 ? `${(value / 1000).toPrecision(2)} Gbit/s` : `${value < 10 ? value : Math.round(value)} Mbit/s`;
}

/** A node's name as people say it: 1xA10 is an A10, 4xL40S four of them. */
export const gpu = (name) => name.replace(/(^|\s)1x/g, "$1").replace(/(\d)x/g, "$1×");

/** Which copy of its template a replica is of, and which of the copy's, where that tells two apart. */
export function copy(name, rows) {
  const place = /#(\d+)\/(\d+)$/.exec(name), row = rows?.[name];
  if (!place) return "";
  const alike = row && row.members > 1 ? Object.values(rows).some((each) => each !== row && each.unit === row.unit && each.gpu === row.gpu) : false;
  return `#${place[1]}${alike ? `.${place[2]}` : ""}`;
}

/** A replica's name as people would say it: its GPU, its region, and which copy it is of. */
export function short(name, rows) {
  const row = rows?.[name];
  if (row) return `${gpu(row.gpu)} ${row.region} ${copy(name, rows)}`.trim();
  return plain(name);
}

/** The same of names in a line that somebody else wrote: "words: decode 1xL4 tp1@near#3/0 is ready". */
export function plain(line) {
  return line.replace(/(?:[^\s:;,()]+: )?(?:[^@:;,()]*? )?(\d+x[^\s@]+)[^@:;,()]*@([^\s#]+)#(\d+)\/\d+/g, (_, node, region, number) => `${gpu(node)} ${region} #${number}`).replaceAll("->", " → ");
}

export function ago(at_s, now_s) {
  const value = Math.max(0, now_s - at_s);
  return value < 60 ? `${Math.round(value)} s` : value < 3600 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function table(element, columns, rows, caption) {
  element.replaceChildren(
    h("caption", { class: "sr" }, caption),
    h("thead", {}, h("tr", {}, columns.map((each) => h("th", { scope: "col", class: each.right ? "n" : null }, each.name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) => {
      const kind = columns[place].right ? "n" : null;
      return place === 0 ? h("th", { scope: "row", class: kind }, cell) : h("td", { class: kind }, cell);
    })))),
  );
}

export function legend(element, items) {
  element.replaceChildren(...items.map(([kind, words]) => h("li", {}, h("i", { class: `key ${kind}`, "aria-hidden": "true" }), words)));
}
