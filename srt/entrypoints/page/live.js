// The live view of /page/stats: followed while the page is visible, reconnecting when the server goes away.

import { Chart, HISTORY_S } from "/page/chart.js";
import { at, call, element, eventsOf } from "/page/server.js";

const RETRY_MS = 2000;
const SILENCE_MS = 10000; // an event comes each second, or every four while the engine does not answer

const whole = (value) => value.toFixed(value > 0 && value < 10 ? 1 : 0);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const charts = [
  new Chart({
    title: "Tokens per second",
    series: [{ key: "decode", words: "generated" }, { key: "prompt", words: "prompt" }],
    format: whole,
  }),
  new Chart({
    title: "Requests",
    series: [{ key: "running", words: "running" }, { key: "waiting", words: "waiting" }],
    format: (value) => value.toFixed(0),
  }),
  new Chart({
    title: "Rows per step",
    series: [{ key: "decode_rows", words: "that generate" }, { key: "prompt_rows", words: "of prompts" }],
    stacked: true,
    format: whole,
  }),
  new Chart({
    title: "Step time",
    series: [{ key: "step_ms", words: "mean" }],
    format: (value) => `${value.toFixed(value < 10 ? 2 : 0)} ms`,
  }),
  new Chart({
    title: "Prefix hits",
    series: [{ key: "hit_rate", words: "of prompt tokens" }],
    most: 1,
    format: percent,
  }),
  new Chart({
    title: "KV memory in use",
    series: [{ key: "kv_running", words: "running" }, { key: "kv_cached", words: "cached" }],
    stacked: true,
    most: 1,
    format: percent,
  }),
];
const expertCharts = [
  new Chart({
    title: "Experts that a step takes",
    series: [{ key: "experts", words: "mean over layers" }],
    format: whole,
  }),
  new Chart({
    title: "Load of the busiest expert",
    series: [{ key: "peak_load", words: "multiple of the mean" }],
    format: (value) => `${value.toFixed(1)} ×`,
  }),
];
at("charts").append(...charts.map((chart) => chart.figure));

let watching = null; // the AbortController of the statistics' stream
let points = []; // the history of the last minutes

async function watch() {
  watching?.abort();
  if (document.hidden) return;
  const mine = (watching = new AbortController());
  let words = "";
  while (!mine.signal.aborted) {
    try {
      await followOnce(mine.signal);
      words = "The server has ended the connection.";
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error.status === 401) return setHealth("locked", "API key needed");
      words = error.message;
    }
    if (mine.signal.aborted) return;
    setHealth("lost", "connection lost");
    setTrouble(`${words} Trying again every ${RETRY_MS / 1000} seconds.`);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Follow a single connection, from the whole history to its end; throw an Error if nothing comes for too long. */
async function followOnce(signal) {
  const quiet = new AbortController();
  let timer = setTimeout(() => quiet.abort(), SILENCE_MS);
  try {
    const response = await call("/page/stats", { signal: AbortSignal.any([signal, quiet.signal]) });
    points = [];
    for await (const data of eventsOf(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => quiet.abort(), SILENCE_MS);
      show(JSON.parse(data));
    }
  } catch (error) {
    if (quiet.signal.aborted) throw new Error("The server sends nothing any more.");
    throw error.status || signal.aborted ? error : new Error("The connection to the server is lost.");
  } finally {
    clearTimeout(timer);
  }
}

function setHealth(health, words = health) {
  at("health").dataset.health = health;
  if (at("health").textContent !== words) at("health").textContent = words;
}

function setTrouble(words) {
  if (at("trouble").textContent !== words) at("trouble").textContent = words;
  at("trouble").hidden = words === "";
}

const NOT_ANSWERING = "The engine does not answer: a step hangs, or the host is overloaded.";

function show(stats) {
  setHealth(stats.health, stats.is_paused ? "paused" : stats.health);
  setTrouble(stats.trouble ?? (stats.health === "not answering" ? NOT_ANSWERING : ""));
  at("model").textContent = stats.model;
  at("running").textContent = stats.num_running ?? "–";
  at("waiting").textContent = stats.num_waiting ?? "–";
  showProcesses(stats.processes);
  points = [...points, ...stats.points].filter((point) => point.time > stats.time - HISTORY_S);
  if (stats.engine) showEngine(stats.engine, stats);
}

function showEngine(engine, stats) {
  const now = points.at(-1);
  at("decode").textContent = now ? whole(now.decode) : "–";
  at("prompt").textContent = now ? whole(now.prompt) : "–";
  at("step").textContent = now?.step_ms == null ? "–" : `${now.step_ms.toFixed(now.step_ms < 10 ? 2 : 0)} ms`;
  at("hits").textContent = engine.num_prompt_tokens ? percent(engine.num_cached_tokens / engine.num_prompt_tokens) : "–";
  showMemory(stats.memory, engine);
  if (!charts.includes(expertCharts[0]) && now?.experts != null) {
    charts.push(...expertCharts);
    at("charts").append(...expertCharts.map((chart) => chart.figure));
  }
  for (const chart of charts) chart.show(points);
  at("facts").textContent = `${engine.num_finished} requests finished, ${engine.num_generated_tokens} tokens generated, `
    + `${engine.num_preempted} preemptions. ${drafts(engine)}Live requests of frontend ${stats.frontend.index}: ${stats.frontend.live_requests}.`;
}

/** Say what drafts bring, if the engine drafts. */
function drafts(engine) {
  if (!engine.num_verified_rows) return "";
  const length = (engine.num_verified_ids / engine.num_verified_rows).toFixed(2);
  return `A row with drafts gets ${length} tokens a step; up to ${engine.row_tokens - 1} drafts a row now. `;
}

function showMemory(shares, engine) {
  for (const [state, share] of Object.entries(shares)) {
    at(state).textContent = percent(share);
    const part = at("memory").querySelector(`.${state}`);
    if (part) part.style.width = `${100 * share}%`;
  }
  const words = Object.entries(shares).map(([state, share]) => `${percent(share)} ${state.slice(3)}`);
  at("memory").ariaLabel = `KV memory: ${words.join(", ")}, of ${engine.num_total_pages * engine.page_size} tokens`;
}

/** Show a line for each process, with its state in words. */
function showProcesses(processes) {
  const lines = processes.map(({ name, is_well: isWell, words }) => {
    const line = element("li", isWell ? "well" : "unwell", `${name} `);
    line.append(element("b", "", words));
    return line;
  });
  at("processes").replaceChildren(...lines);
}

document.addEventListener("visibilitychange", watch);
document.addEventListener("key", watch);
watch();
