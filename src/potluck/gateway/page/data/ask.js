// One dialog for all questions, and one line for what came of them.

import { $, text } from "/page/dom.js";

const dialog = $("ask");
let fades = 0;

function open(title, words, yes, input) {
  text($("ask-h"), title);
  text($("ask-text"), words);
  text($("ask-yes"), yes);
  $("ask-label").hidden = !input;
  $("ask-input").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes" ? $("ask-input").value : null), { once: true }));
}

export const confirm = async (title, words, yes) => (await open(title, words, yes, false)) !== null;
export const secret = (title, words) => open(title, words, "Use it", true);

export function toast(words, bad = false) {
  const line = $("toast");
  line.textContent = words;
  line.className = bad ? "shown bad" : "shown";
  clearTimeout(fades);
  fades = setTimeout(() => { line.className = ""; }, 6000);
}
