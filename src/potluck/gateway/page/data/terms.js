// Words of the glossary, explained where they stand: by a button with a note, and all of them below.

import { WORDS } from "/page/words.js";
import { $, h, text } from "/page/dom.js";

const EDGE = 330;
const note = h("div", { id: "term", popover: "auto", role: "note" });
document.body.append(note);

/** Elements that are marked with a word become buttons that tell what it means. */
for (const found of document.querySelectorAll("[data-term]")) {
  const says = WORDS.find(([words]) => words.includes(found.dataset.term))?.[1];
  if (!says) continue;
  const button = h("button", { type: "button", class: "term", title: says, onclick: () => {
    const box = button.getBoundingClientRect();
    note.style.setProperty("--x", `${Math.max(8, Math.min(box.left, innerWidth - EDGE))}px`);
    note.style.setProperty("--y", `${box.bottom + 6}px`);
    text(note, says);
  } }, ...found.childNodes);
  button.popoverTargetElement = note; // Enter opens, Escape closes
  found.replaceChildren(button);
}

$("words").querySelector("dl").replaceChildren(...WORDS.map(([words, says]) => h("div", {}, h("dt", {}, words.join(", ")), h("dd", {}, says))));
