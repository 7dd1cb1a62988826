// The page as a whole: its head, the time that is shown, the key, light and dark.

import { $, h, text, usd, count, percent, clock } from "/page/dom.js";
import { state, shown, draws, touched } from "/page/state.js";
import { ask, listen, hasKey, setKey } from "/page/stream.js";
import { secret, toast } from "/page/ask.js";
import "/page/map.js";
import { repaint as repaintPlots } from "/page/plots.js";
import "/page/fall.js";
import "/page/chat.js";
import { lately } from "/page/panels.js";
import "/page/terms.js";

// Light and dark.

const THEME = "potluck-theme";
function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  text($("theme"), theme ? `Theme: ${theme}` : "Theme: auto");
  repaintPlots();
}
let theme = localStorage.getItem(THEME) || "";
dress(theme);
$("theme").addEventListener("click", () => {
  theme = { "": "light", light: "dark", dark: "" }[theme];
  if (theme) localStorage.setItem(THEME, theme); else localStorage.removeItem(THEME);
  dress(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintPlots);

// The head.

let link = "connecting";
const LINKS = { live: "live", away: "the gateway does not answer", key: "the operators' key is needed", full: "too many watch already", connecting: "connecting" };
function say(what) {
  link = what;
  head();
  if (what === "key" && !$("ask").open) askKey();
}

const figures = new Map();
function figure(name, value) {
  let found = figures.get(name);
  if (!found) {
    found = h("dd", {});
    figures.set(name, found);
    $("figures").append(h("div", {}, h("dt", {}, name), found));
  }
  text(found, value);
}

function head() {
  text($("link"), state.past ? `as it was at ${clock(state.past.at_s)}` : LINKS[link]);
  $("link").className = `pill ${state.past ? "past" : link}`;
  const tables = shown();
  const models = Object.entries(tables.models || {});
  if (!models.length) return;
  const replicas = Object.values(tables.replicas || {});
  const sum = (name) => models.reduce((total, [model]) => total + (lately(model, name, 15) || 0), 0);
  const all = sum("ended_per_s");
  const lost = replicas.filter((each) => each.state === "lost").length;
  figure("replicas ready", `${replicas.filter((each) => each.state === "ready").length} of ${replicas.length - lost}${lost ? `, ${lost} lost` : ""}`);
  figure("requests", `${count(all)}/s, ${models.reduce((total, [, each]) => total + each.running + each.waiting, 0)} open`);
  figure("in time", all ? percent(sum("in_time_per_s") / all) : "–");
  figure("tokens", `${count(sum("tokens_per_s"))}/s`);
  figure("cost", `${usd(tables.plan?.now?.now_usd_per_h)}/h`);
}
draws($("figures"), ["models", "replicas", "points", "plan"], head, 500);

// The key.

async function askKey() {
  const given = await secret("Operators' key", hasKey() ? "Another key, or an empty one to forget it." : "It lies beside the service's state, in the file admin.key. It stays in this tab.");
  if (given === null) return;
  setKey(given.trim());
  await tryKey();
}

async function tryKey() {
  if (hasKey()) {
    try {
      await ask("/fleet");
      toast("The key is right: orders can be given.");
    } catch (error) {
      setKey("");
      toast(error.status === 401 ? "That is not the operators' key." : error.message, true);
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
  touched("replicas", "models", "plan", "deployments", "tenants", "links", "flows", "regions", "events", "points");
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
