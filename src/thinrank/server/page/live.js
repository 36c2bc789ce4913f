// The running engine: asks /stats once a second while somebody looks, and shows what happened in between.

import { getJSON } from "./api.js";
import { byId, html, svg } from "./elements.js";
import { bytes, count, percent, short } from "./numbers.js";

const PERIOD = 1000; // ms
const WINDOW = 3; // samples back: rates are taken over as many seconds
const HISTORY = 60; // samples in the picture

const samples = [];
const tiles = {};

export function startLive() {
  poll();
  document.addEventListener("visibilitychange", () => samples.splice(0)); // nobody asked while it was hidden
}

async function poll() {
  if (!document.hidden) {
    try {
      show(await getJSON("stats"));
    } catch (error) {
      setState("failed", error.message);
      samples.splice(0);
    }
  }
  setTimeout(poll, PERIOD);
}

function show(stats) {
  const last = samples.at(-1);
  if (last && stats.generation_tokens < last.generation_tokens) samples.splice(0); // another server
  samples.push(stats);
  if (samples.length > HISTORY + 1) samples.shift();
  const before = samples.at(-1 - Math.min(WINDOW, samples.length - 1));
  const difference = (name) => stats[name] - before[name];

  const seconds = difference("time");
  const rate = seconds ? difference("generation_tokens") / seconds : 0;
  const waiting = stats.num_requests_waiting;
  if (!stats.num_requests_running && !waiting) setState("idle", "idle");
  else setState("busy", `${short(rate)} tokens/s`);

  byId("device").textContent = `${stats.device}, ${stats.dtype}`;
  tile("Tokens/s", short(rate), `all requests together, mean of the last ${WINDOW} s; the engine's count`, {
    picture: sparkline(),
  });

  const steps = difference("decode_steps");
  const step = steps ? difference("decode_seconds") / steps : null;
  tile("Decode step", step ? `${short(1e3 * step)} ms` : "–", "mean of the steps that processed no prompt; the server's clock");

  if (stats.read_bandwidth !== null) {
    const mbu = step ? stats.decode_step_bytes / step / stats.read_bandwidth : null;
    const read = `${bytes(stats.decode_step_bytes)} a step, from the model's shapes and the contexts in the cache`;
    const measured = `${short(stats.read_bandwidth / 1e12)} TB/s, measured when the server started`;
    tile("MBU", mbu ? percent(mbu) : "–", `${read}; ${measured}`, { share: mbu ?? 0 });
  }

  tile("Weights", bytes(stats.weight_bytes), `${bytes(stats.decode_step_bytes)} read a decode step; from the model's shapes`);
  tile("KV cache", percent(stats.kv_cache_usage), `of ${bytes(stats.kv_cache_bytes)}, in blocks that requests hold`, {
    share: stats.kv_cache_usage,
  });
  if (stats.device_memory_total !== null) {
    const { device_memory_used: used, device_memory_total: total } = stats;
    tile("GPU memory", bytes(used), `of ${bytes(total)}, whoever uses it; the driver's count`, { share: used / total });
  }
  tile(
    "Requests",
    count(stats.num_requests_running),
    waiting ? `running, ${count(waiting)} waiting` : "running, none waiting",
  );
  const looked = stats.prefix_cache_queries;
  tile(
    "Prefix cache",
    looked ? percent(stats.prefix_cache_hits / looked) : "–",
    `of ${count(looked)} prompt tokens were known, since the start`,
  );
}

/** Writes a tile, which is made on first use. share: 0 to 1, as a bar. picture: beside the value. */
function tile(name, value, source, { share, picture } = {}) {
  tiles[name] ??= makeTile(name);
  const { number, bar, beside, note } = tiles[name];
  number.data = value;
  note.data = source;
  bar.hidden = share === undefined;
  if (share !== undefined) bar.firstChild.style.width = `${100 * Math.min(1, share)}%`;
  if (picture) beside.replaceChildren(picture);
}

function makeTile(name) {
  const number = document.createTextNode("");
  const note = document.createTextNode("");
  const bar = html("div", { class: "bar", "aria-hidden": "true" }, html("div"));
  const beside = html("span", { class: "beside" });
  byId("tiles").append(
    html(
      "div",
      { class: "tile" },
      html("dt", {}, name),
      html("dd", { class: "value" }, html("span", {}, number), beside),
      html("dd", { class: "source" }, bar, note),
    ),
  );
  return { number, bar, beside, note };
}

function sparkline() {
  const rates = samples.slice(1).map((sample, index) => {
    const before = samples[index];
    return (sample.generation_tokens - before.generation_tokens) / (sample.time - before.time);
  });
  const highest = Math.max(...rates, 1e-9);
  const x = (index) => HISTORY - rates.length + index + 1;
  const points = rates.map((rate, index) => `${x(index)},${(19 - (17 * rate) / highest).toFixed(2)}`);
  const label = `Tokens/s in the last minute, at most ${short(rates.length ? highest : 0)}`;
  const chart = svg("svg", { viewBox: `0 0 ${HISTORY} 20`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (points.length > 1) {
    chart.append(
      svg("polygon", { points: `${x(0)},20 ${points.join(" ")} ${HISTORY},20` }),
      svg("polyline", { points: points.join(" ") }),
    );
  }
  return chart;
}

function setState(state, text) {
  const element = byId("state");
  element.dataset.state = state;
  if (element.textContent !== text) element.textContent = text;
}
