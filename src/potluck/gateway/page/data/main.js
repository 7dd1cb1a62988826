// The page as a whole: its head, the time that is shown, the key, light and dark.

import { $, h, text, usd, count, percent, clock, seconds, brief } from "/page/dom.js";
import { state, shown, draws, touched, figureNow, windowWords } from "/page/state.js";
import { ask, listen, hasKey, setKey } from "/page/stream.js";
import { secret, toast } from "/page/ask.js";
import "/page/map.js";
import { currentModel } from "/page/plots.js";
import "/page/fall.js";
import "/page/chat.js";
import "/page/panels.js";
import "/page/terms.js";

// Light and dark.

const THEME = "potluck-theme";
function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  text($("theme"), theme ? `Theme: ${theme}` : "Theme: auto");
}
let theme = localStorage.getItem(THEME) || "";
dress(theme);
$("theme").addEventListener("click", () => {
  theme = { "": "light", light: "dark", dark: "" }[theme];
  if (theme) localStorage.setItem(THEME, theme); else localStorage.removeItem(THEME);
  dress(theme);
});

// The head.

let link = "connecting";
const LINKS = { live: "live", away: "connection lost; retrying", bye: "ended", key: "the operator key is needed", full: "too many viewers", connecting: "connecting" };
function say(what, last) {
  link = what;
  if (last) {
    text($("bye-what"), last.what);
    $("bye-why").replaceChildren(...last.why.split("`").map((each, at) => (at % 2 ? h("code", {}, each) : each)));
  }
  $("bye").hidden = what !== "bye";
  head();
  if (what === "key" && !$("ask").open) askKey();
}

const figures = new Map();
/** A large number, its unit, and what it is beside. `over` says which time its value covers. */
function figure(name, over, value, unit, note, bad = false) {
  let found = figures.get(name);
  if (!found) {
    found = { box: h("div", { class: "figure" }), over: h("span", { class: "over" }), value: h("b"), unit: h("span"), note: h("small") };
    found.box.append(h("h2", {}, name, ", ", found.over), h("p", {}, found.value, " ", found.unit), found.note);
    figures.set(name, found);
    $("figures").append(found.box);
  }
  text(found.over, over);
  text(found.value, value);
  text(found.unit, unit);
  text(found.note, note);
  found.box.classList.toggle("bad", bad);
}

function head() {
  text($("link"), state.past ? `as it was at ${clock(state.past.at_s)}` : LINKS[link]);
  $("link").className = `pill ${state.past ? "past" : link}`;
  const tables = shown();
  const models = Object.entries(tables.models || {});
  if (!models.length) return;
  const replicas = Object.values(tables.replicas || {});
  const sum = (name) => models.reduce((total, [model]) => total + (figureNow(model, name) || 0), 0);
  const now = (name) => models.reduce((total, [, each]) => total + each[name], 0);
  const all = sum("ended_per_s"), timely = all ? sum("in_time_per_s") / all : null;
  const least = Math.max(0, ...models.map(([, each]) => each.slo?.attainment || 0));
  const one = tables.models[currentModel()] ? currentModel() : models[0][0];
  const ttft = figureNow(one, "ttft_p90_s"), limit = tables.models[one].slo?.ttft_s;
  const usd_per_mtok = figureNow(one, "usd_per_mtok");
  const over = windowWords(), ofModel = models.length > 1 ? `${one}, ` : "";
  const [waited, unit = ""] = seconds(ttft).split(" ");
  const off = ["lost", "starting", "draining"].map((kind) => [kind, replicas.filter((each) => each.state === kind).length]);
  const ready = replicas.filter((each) => each.state === "ready").length;
  figure("SLO attainment", over, timely === null ? "–" : String(Math.round(timely * 100)), timely === null ? "" : "%", least ? `SLO ${percent(least)}` : "no SLO", timely !== null && timely < least);
  figure("TTFT p90", over, waited, unit, `${ofModel}${limit ? `SLO ${brief(seconds(limit))}` : "no SLO"}`, ttft !== null && limit !== undefined && ttft > limit);
  figure("Requests ended", over, count(all), "req/s", `now ${now("running")} running, ${now("waiting")} waiting`);
  figure("Output tokens", over, count(sum("output_tokens_per_s")), "tok/s", `prompt: ${count(sum("prompt_tokens_per_s"))} tok/s`);
  figure("Cost", "now", usd(tables.plan?.now?.now_usd_per_h), "/h", tables.plan?.now?.now_usd_per_h === null ? "price unknown" : usd_per_mtok === null ? "no tokens yet" : `${ofModel}${usd(usd_per_mtok)} per million prompt + output tokens, ${over}`);
  figure("Replicas", "now", String(ready), "ready", off.filter(([, many]) => many).map(([kind, many]) => `${many} ${kind}`).join(", ") || "all", off[0][1] > 0);
}
draws($("figures"), ["models", "replicas", "points", "plan"], head, 500);

// The key.

async function askKey() {
  const given = await secret("Operators' key", hasKey() ? "Another key, or none to forget it." : "The key is in the file admin.key of the state folder. It is kept in this tab only.");
  if (given === null) return;
  setKey(given.trim());
  await tryKey();
}

async function tryKey() {
  if (hasKey()) {
    try {
      await ask("/fleet");
      toast("The key is valid: changes are allowed.");
    } catch (error) {
      setKey("");
      toast(error.status === 401 ? "The operator key is wrong." : error.message, true);
    }
  }
  text($("key"), hasKey() ? "Key: in use" : "Operators' key");
  touched("replicas");
}
$("key").addEventListener("click", askKey);
text($("key"), hasKey() ? "Key: in use" : "Operators' key");

// Now, or a moment of the last hour: #t=SECONDS.

async function goTo(at_s) {
  if (at_s === null) {
    state.past = null;
    if (location.hash) history.replaceState(null, "", location.pathname);
  } else {
    try {
      state.past = await ask(`/moment?at=${at_s}`);
    } catch (error) {
      toast(error.message, true);
      state.past = null;
    }
  }
  $("live").hidden = !state.past;
  text($("moment"), state.past ? clock(state.past.at_s) : "now");
  $("scrub").value = state.past ? String(Math.round(state.past.at_s - Date.now() / 1000)) : "0";
  head();
  touched("replicas", "models", "plan", "deployments", "tenants", "links", "flows", "flow_groups", "refusals", "regions", "events", "points");
}

function fromHash() {
  const found = /^#t=(\d+(?:\.\d+)?)$/.exec(location.hash);
  if (found) goTo(Number(found[1])); else if (state.past) goTo(null);
}
addEventListener("hashchange", fromHash);
$("scrub").addEventListener("change", () => {
  const back_s = -Number($("scrub").value);
  if (back_s < 3) goTo(null);
  else location.hash = `t=${Math.round(Date.now() / 1000 - back_s)}`;
});
$("scrub").addEventListener("input", () => {
  const back_s = -Number($("scrub").value);
  text($("moment"), back_s < 3 ? "now" : clock(Date.now() / 1000 - back_s));
});
$("live").addEventListener("click", () => goTo(null));
$("share").addEventListener("click", async () => {
  const at_s = Math.floor(state.past ? state.past.at_s : Date.now() / 1000);
  const url = `${location.origin}/#t=${at_s}`;
  try {
    await navigator.clipboard.writeText(url);
    toast(`Copied ${url}`);
  } catch {
    toast(url);
  }
});
$("export").addEventListener("click", async () => {
  try {
    const said = await ask("/history");
    said.requests = Object.fromEntries(state.requests);
    said.tables = shown();
    const url = URL.createObjectURL(new Blob([JSON.stringify(said)], { type: "application/json" }));
    const anchor = h("a", { href: url, download: `potluck-${new Date().toISOString().slice(0, 19).replace(/:/g, "")}.json` });
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } catch (error) {
    toast(error.message, true);
  }
});

listen(say);
fromHash();
