// The dashboard, put together: asks for the metrics every second and shows what they say.

import { errorRecord, get, key } from "./api.js";
import { Chart, spanOf } from "./chart.js";
import { byId, el } from "./dom.js";
import { History, MAX_POSITIONS, QUANTILES, TIERS } from "./history.js";
import { labelValues, parseMetrics, total } from "./prometheus.js";
import { exactTime, FORMATS } from "./units.js";

const PERIOD = 1000; // milliseconds
const TIMEOUT = 4000;

const percentiles = (name) => Object.keys(QUANTILES).map((label) => ({ name: label, figure: `${name}_${label}` }));
const CHARTS = [
  { title: "Generation", axis: "tokens per second", unit: "rate", series: [{ name: "generated", figure: "generation" }] },
  { title: "Prompts", axis: "tokens per second", unit: "rate", series: [{ name: "prompt", figure: "prompt" }] },
  {
    title: "Requests",
    axis: "at this moment",
    unit: "count",
    series: [
      { name: "running", figure: "running" },
      { name: "waiting", figure: "waiting" },
    ],
  },
  { title: "KV cache", axis: "share in use", unit: "share", top: 1, series: [{ name: "in use", figure: "kv" }] },
  { title: "Time to first token", axis: "of the last 30 s", unit: "seconds", series: percentiles("ttft") },
  { title: "Time between tokens", axis: "of the last 30 s", unit: "seconds", series: percentiles("itl") },
  { title: "Whole requests", axis: "duration, of the last 30 s", unit: "seconds", series: percentiles("e2e") },
  {
    title: "Prefix cache",
    axis: "share of prompt tokens found, by tier",
    unit: "share",
    top: 1,
    stacked: true,
    series: TIERS.map((tier) => ({ name: tier, figure: `hit_${tier}` })),
  },
  {
    title: "Speculation",
    axis: "share of drafts accepted, by position",
    unit: "share",
    top: 1,
    series: Array.from({ length: MAX_POSITIONS }, (_, at) => ({ name: `${at + 1}`, figure: `accepted_${at}` })),
  },
];
const TILES = [
  { name: "Generation", figure: "generation", unit: "rate", of: "tokens/s" },
  { name: "Prompts", figure: "prompt", unit: "rate", of: "tokens/s" },
  { name: "Running", figure: "running", unit: "count", of: "requests" },
  { name: "Waiting", figure: "waiting", unit: "count", of: "requests" },
  { name: "KV cache", figure: "kv", unit: "share", of: "in use" },
  { name: "First token", figure: "ttft_p50", unit: "seconds", of: "median" },
  { name: "Prefix cache", figure: "hit_any", unit: "share", of: "of prompts found" },
  { name: "Speculation", figure: "per_step", unit: "rate", of: "tokens per step" },
];
const ROWS = [
  ...CHARTS.flatMap(({ title, axis, unit, series }) => series.map((one) => ({ ...one, unit, name: `${title}, ${one.name}`, axis }))),
  { name: "Prefix cache, any tier", axis: "share of prompt tokens found", unit: "share", figure: "hit_any" },
  { name: "Speculation, tokens per step", axis: "of the last 30 s", unit: "rate", figure: "per_step" },
];

const history = new History();
let paused = false;
let timer = null;

const charts = CHARTS.map((options) => new Chart({ ...options, onpoint }));
byId("charts").append(...charts.map((chart) => chart.element));

const tiles = TILES.map(({ name, of }) => {
  const value = el("span", { class: "figure" }, "–");
  byId("tiles").append(el("div", { class: "card tile" }, el("dt", {}, name), el("dd", {}, value, el("span", { class: "muted" }, of))));
  return value;
});

const rows = ROWS.map(({ name, axis }) => {
  const cells = [el("td"), el("td"), el("td")];
  const row = el("tr", {}, el("th", { scope: "row" }, name, el("span", { class: "muted" }, ` ${axis}`)), ...cells);
  byId("rows").append(row);
  return { row, cells };
});

/** All charts point at the same time. */
function onpoint(time) {
  for (const chart of charts) chart.point(time);
}

async function poll() {
  const start = performance.now();
  let metrics = null;
  try {
    metrics = parseMetrics(await (await get("metrics", AbortSignal.timeout(TIMEOUT))).text());
    if (total(metrics, "glm5:engine_up") === 0) showState("down", "Engine not up", "No requests are answered; /health says why.");
    else showState("live", "Live", "");
    byId("model").textContent = labelValues(metrics, "vllm:generation_tokens_total", "model_name").join(", ");
  } catch (error) {
    const { title, message } = errorRecord(error);
    showState("down", "No metrics", `${title}: ${message}`);
    byId("key-form").hidden = !(error.status === 401 || error.status === 403) && byId("key-form").hidden;
  }
  // It may have been paused while the request was on its way.
  if (paused) return;
  history.add(Date.now() / 1000, metrics);
  showFigures();
  timer = setTimeout(poll, Math.max(0, PERIOD - (performance.now() - start)));
}

function showState(state, text, problem) {
  if (paused) return;
  document.body.dataset.state = state;
  // Only a change is said to screen readers.
  if (byId("status").textContent !== text) byId("status").textContent = text;
  if (byId("problem").textContent !== problem) byId("problem").textContent = problem;
  byId("problem").hidden = problem === "";
  if (problem === "") byId("key-form").hidden = true;
}

function showFigures() {
  const { samples } = history;
  const now = samples.at(-1);
  for (const chart of charts) chart.draw(samples);
  for (const [at, { figure, unit }] of TILES.entries()) tiles[at].textContent = FORMATS[unit](now.figures[figure]);
  for (const [at, { figure, unit }] of ROWS.entries()) {
    const values = samples.map((sample) => sample.figures[figure]).filter(Number.isFinite);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const shown = [now.figures[figure], mean, values.length ? Math.max(...values) : null];
    rows[at].row.hidden = figure.startsWith("accepted_") && values.length === 0;
    for (const [column, value] of shown.entries()) rows[at].cells[column].textContent = FORMATS[unit](value);
  }
  byId("updated").textContent = exactTime(now.time);
  const minutes = spanOf(samples) / 60;
  byId("span").textContent = minutes === 1 ? "minute" : `${minutes} minutes`;
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  clearTimeout(timer);
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) {
    document.body.dataset.state = "paused";
    byId("status").textContent = "Paused";
  } else {
    poll();
  }
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
});
poll();
