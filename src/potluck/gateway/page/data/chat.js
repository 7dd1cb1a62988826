// The playground: a question to a model, its answer as it comes, and the way that it took.

import { $, h, text, seconds } from "/page/dom.js";
import { draws, shown, state } from "/page/state.js";
import { ask, chat, events } from "/page/stream.js";
import { steps, routeOf } from "/page/fall.js";

const form = $("chat"), answer = $("chat-answer"), route = $("chat-route"), models = $("chat-model");
let stopper = null;

draws($("playground"), ["models"], () => {
  const names = Object.keys(shown().models || {});
  if ([...models.options].map((each) => each.value).join() !== names.join()) models.replaceChildren(...names.map((each) => h("option", { value: each }, each)));
}, 1000);

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const asked = $("chat-text").value.trim();
  if (!asked || stopper) return;
  stopper = new AbortController();
  $("chat-stop").disabled = false;
  answer.replaceChildren(h("p", { class: "asked" }, asked));
  const said = h("p", { class: "said" });
  answer.append(said);
  route.replaceChildren();
  try {
    await reads(asked, said);
  } catch (error) {
    if (error.name !== "AbortError") answer.append(h("p", { class: "bad" }, error.message));
  } finally {
    stopper = null;
    $("chat-stop").disabled = true;
  }
});

$("chat-stop").addEventListener("click", () => stopper?.abort());
$("chat-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
});

async function reads(asked, said) {
  const body = { model: models.value, stream: true, max_tokens: Number($("chat-most").value) || 60, messages: [{ role: "user", content: asked }] };
  const reply = await chat(body, $("chat-key").value, stopper.signal);
  if (!reply.ok) {
    const wrong = await reply.json().catch(() => ({}));
    if (reply.status === 401) $("chat-key-label").hidden = false;
    throw new Error(wrong.error?.message || `was answered with ${reply.status}`);
  }
  let id = "", shownText = "";
  for await (const [, data] of events(reply)) {
    if (data === "[DONE]") break;
    const piece = JSON.parse(data);
    if (piece.error) throw new Error(piece.error.message);
    if (piece.id && !id) { id = piece.id.replace(/^(chatcmpl|cmpl)-/, ""); wayOf(id); }
    shownText += piece.choices?.[0]?.delta?.content || "";
    text(said, shownText);
  }
  if (id) setTimeout(() => wayOf(id), 300);
}

async function wayOf(id) {
  let row;
  try {
    row = await ask(`/request?id=${encodeURIComponent(id)}`);
  } catch {
    return; // its words are there all the same
  }
  row.id = id;
  route.replaceChildren(
    h("h3", {}, "Route"),
    h("p", { class: "way" }, routeOf(row)),
    steps(row, state.at_s),
    h("p", { class: "note" }, row.state === "done" ? `${row.prompt_tokens} prompt tokens, ${row.output_tokens} output tokens; TTFT ${seconds(row.first_s)}, E2E ${seconds(row.ended_s)}` : `${row.prompt_tokens} prompt tokens`),
  );
}
