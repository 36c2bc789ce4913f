// The conversation: what was said, what is being said, and the buttons around it.

import { streamEvents } from "./api.js";
import { byId, html } from "./elements.js";
import { count, short } from "./numbers.js";
import { offerSettings, readSettings } from "./settings.js";

const transcript = byId("transcript");
const box = byId("message");
const stop = byId("stop");

const welcome = byId("welcome"); // comes back with every new conversation

let model; // what /page/model says
let turns = []; // {role, content}; of a model without a template: texts that follow one another
let running = null; // AbortController of the answer that is being written

export function startChat(served) {
  model = served;
  byId("welcome-title").textContent = `${model.has_chat_template ? "Chat" : "Write"} with ${model.name}`;
  if (!model.has_chat_template) {
    byId("welcome-text").textContent =
      "This model has no chat template, so it does not answer: it continues the text that you begin.";
    box.placeholder = "Begin a text";
    byId("system-field").hidden = true;
  }
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  box.addEventListener("keydown", onKey);
  box.addEventListener("input", fitBox);
  stop.addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("new").addEventListener("click", startAnew);
  offerSettings(model.defaults);
  box.focus({ preventScroll: true });
}

function onKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
}

function startAnew() {
  running?.abort();
  turns = [];
  transcript.replaceChildren(welcome);
  byId("context").textContent = "";
  box.focus();
}

async function send() {
  const text = box.value;
  if (running || !text.trim()) return;
  setBox("");
  welcome.remove();
  const question = addTurn("user", "You", text);
  const answer = addTurn("assistant", model.name, "");
  const controller = new AbortController();
  begin(controller);
  const conversation = turns;
  const outcome = await receive(text, answer, controller.signal);
  if (running === controller) end();
  if (conversation !== turns) return; // a new conversation has begun meanwhile
  if (outcome.text) {
    turns.push({ role: "user", content: text }, { role: "assistant", content: outcome.text });
  } else {
    // As if it had not been said, or the next request would have two questions in a row.
    question.classList.add("unsent");
    if (!box.value) setBox(text);
  }
  answer.note(outcome);
}

/** Streams an answer into its place. Resolves to what became of it, errors included. */
async function receive(text, answer, signal) {
  const outcome = { text: "", reason: null, usage: null, error: null, started: performance.now() };
  try {
    const [path, body] = request(text);
    for await (const event of streamEvents(path, body, signal)) {
      outcome.usage = event.usage ?? outcome.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const piece = choice.delta ? choice.delta.content : choice.text;
      outcome.reason = choice.finish_reason ?? outcome.reason;
      if (!piece) continue;
      outcome.ended = performance.now();
      outcome.first ??= { time: outcome.ended, tokens: outcome.usage?.completion_tokens ?? 1 };
      outcome.text += piece;
      answer.append(piece);
    }
  } catch (error) {
    if (error.name === "AbortError") outcome.reason = "stopped";
    else outcome.error = error.message;
  }
  return outcome;
}

function request(text) {
  const { system, ...sampling } = readSettings();
  const common = {
    model: model.name,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...sampling,
  };
  if (!model.has_chat_template) {
    const prompt = [...turns.map((turn) => turn.content), text].join("");
    return ["v1/completions", { max_tokens: Math.min(256, Math.floor(model.max_model_len / 2)), ...common, prompt }];
  }
  const opening = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...common, messages: [...opening, ...turns, { role: "user", content: text }] }];
}

function begin(controller) {
  running = controller;
  transcript.setAttribute("aria-busy", "true"); // screen readers read the answer when it is whole
  stop.hidden = false;
  byId("send").hidden = true;
}

function end() {
  running = null;
  transcript.removeAttribute("aria-busy");
  if (document.activeElement === stop) box.focus();
  stop.hidden = true;
  byId("send").hidden = false;
}

function addTurn(role, name, text) {
  const words = document.createTextNode(text);
  const content = html("div", { class: "words" }, words);
  const element = html("article", { class: `turn ${role}` }, html("h3", {}, name), content);
  const waiting = html("span", { class: "waiting", "aria-label": "waiting" });
  if (role === "assistant") content.append(waiting);
  transcript.append(element);
  transcript.scrollTop = transcript.scrollHeight;
  return Object.assign(element, {
    append(piece) {
      const atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
      words.appendData(piece);
      if (atEnd) transcript.scrollTop = transcript.scrollHeight;
    },
    note(outcome) {
      waiting.remove();
      if (outcome.error) {
        element.lastChild.after(html("p", { class: "error", role: "alert" }, outcome.error));
      } else {
        element.lastChild.after(html("p", { class: "note" }, describe(outcome)));
      }
      if (!outcome.text) content.remove();
      if (outcome.usage) {
        const used = `${count(outcome.usage.total_tokens)} of ${count(model.max_model_len)}`;
        byId("context").replaceChildren(used, html("span", {}, " tokens"));
      }
      transcript.scrollTop = transcript.scrollHeight;
    },
  });
}

/** 58 tokens · first after 0.21 s · 18.7 tokens/s · stopped */
function describe({ text, reason, usage, started, first, ended }) {
  const parts = [];
  if (text && usage) {
    const tokens = usage.completion_tokens;
    parts.push(`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
    parts.push(`first after ${short((first.time - started) / 1000)} s`);
    const rate = (tokens - first.tokens) / ((ended - first.time) / 1000);
    if (Number.isFinite(rate) && rate > 0) parts.push(`${short(rate)} tokens/s`);
  }
  if (reason === "length") parts.push("cut at the limit of tokens");
  if (reason === "stopped") parts.push("stopped");
  return parts.join(" · ") || "nothing was said";
}

function setBox(text) {
  box.value = text;
  fitBox();
}

function fitBox() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
