// Everything that is asked of the gateway. The operators' key stays in this tab, and goes nowhere else.

import { whole, news } from "/page/state.js";

const KEPT = "potluck-key";
let key = sessionStorage.getItem(KEPT) || "";
let again = null, flows = false;

export const hasKey = () => key !== "";
export function setKey(given) {
  key = given;
  if (given) sessionStorage.setItem(KEPT, given); else sessionStorage.removeItem(KEPT);
  if (!flows) again?.abort(); // it may be let in now
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** One question; what is wrong is thrown as one line. */
export async function ask(path, body) {
  const options = body === undefined ? { headers: headers() }
    : { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(said.error?.message || `was answered with ${answer.status}`), { status: answer.status });
  return said;
}

/** The lines of a stream of server-sent events: [event, data]. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const block = text.slice(0, end);
      text = text.slice(end + 2);
      let event = "message", data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) yield [event, data];
    }
  }
}

/** Reads the stream until the page closes; begins anew when it breaks. `said` hears live, key, full, away, or bye with
    what the gateway said before it ended, after which its silence is no surprise. */
export async function listen(said) {
  let ended = false;
  for (let wait_ms = 500; ; wait_ms = Math.min(5000, wait_ms * 2)) {
    const away = () => { if (!ended) said("away"); };
    again = new AbortController();
    try {
      const answer = await fetch("/live", { headers: headers(), signal: again.signal });
      if (answer.ok) {
        for await (const [event, data] of events(answer)) {
          const body = JSON.parse(data);
          if (event === "whole") { flows = true; ended = false; whole(body); said("live"); wait_ms = 500; }
          else if (event === "news") news(body);
          else if (event === "bye") { ended = true; said("bye", body); }
        }
        away();
      } else if (answer.status === 401 || answer.status === 429) said(answer.status === 401 ? "key" : "full");
      else away();
    } catch {
      away();
    }
    flows = false;
    await new Promise((done) => { again.signal.addEventListener("abort", done); setTimeout(done, wait_ms); });
  }
}

export async function chat(body, clientKey, signal) {
  const more = { "Content-Type": "application/json" };
  if (clientKey) more["X-Potluck-Client-Key"] = clientKey;
  return fetch("/chat", { method: "POST", headers: headers(more), body: JSON.stringify(body), signal });
}
