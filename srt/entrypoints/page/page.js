// The page at /: a chat over /v1/chat/completions, and the engine's counters from /page/stats. Text reaches the document as text only.

const at = (id) => document.getElementById(id);
const KEY = "srt-api-key";
const HISTORY_S = 180;
const RETRY_MS = 2000;

// ---- The server

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The response; an Error with the server's words if it is not a success. */
async function call(path, options) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`);
  if (response.status === 401) askForKey(error.message);
  throw Object.assign(error, { status: response.status });
}

/** The data of each server-sent event, wherever the network cuts the bytes. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function askForKey(words) {
  at("key-words").textContent = words;
  at("key-panel").hidden = false;
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key-panel").hidden = true;
  watch();
});

// ---- The chat

let model;
let messages = []; // what the next request brings, without the system prompt
let running = null; // the AbortController of the answer that is being written

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Change the log; it stays at its end if it was there. */
function inLog(change) {
  const log = at("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change(log);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function addMessage(role, text) {
  const message = element("article", `message ${role}`);
  const words = element("div", "words", text);
  message.append(element("h3", "", role === "user" ? "You" : "Model"), words);
  inLog((log) => log.append(message));
  return { message, words };
}

/** The fields that are filled in, as JSON members. A seed has up to 64 bits, so it stays text on its way. */
function requestBody() {
  const form = at("parameters").elements;
  const system = form.system.value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"]) {
    if (form[name].value !== "") body[name] = Number(form[name].value);
  }
  const seed = form.seed.value.trim();
  const json = JSON.stringify(body);
  return seed === "" ? json : `${json.slice(0, -1)},"seed":${BigInt(seed)}}`;
}

/** Follow the answer to its end: `onText` takes each piece, `end` what the server says about it. */
async function follow(body, signal, end, onText) {
  const response = await call("/v1/chat/completions", { method: "POST", body, signal });
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    if (choice?.delta?.content) onText(choice.delta.content);
    end.finish = choice?.finish_reason ?? end.finish;
    end.tokens = chunk.usage?.completion_tokens ?? end.tokens;
    end.seed = /"seed":(\d+)/.exec(data)?.[1] ?? end.seed; // in strings the quotes are escaped; as a number it would lose digits
  }
  throw new Error("The connection ended before the answer did.");
}

function describe(message, end, beganAt, firstAt) {
  const took = (performance.now() - beganAt) / 1000;
  const parts = [end.finish === "length" ? "cut at the length limit" : end.finish];
  if (end.tokens !== null) parts.push(`${end.tokens} tokens`);
  if (firstAt) parts.push(`first after ${((firstAt - beganAt) / 1000).toFixed(2)} s`);
  parts.push(`${took.toFixed(2)} s`);
  const line = element("p", "quiet", parts.filter(Boolean).join(" · "));
  if (end.seed !== null) {
    const seed = element("button", "seed", `seed ${end.seed}`);
    seed.type = "button";
    seed.title = "Use this seed for the next answers";
    seed.addEventListener("click", () => { at("parameters").elements.seed.value = end.seed; });
    line.append(" · ", seed);
  }
  message.append(line);
}

async function ask(question) {
  const controller = new AbortController();
  setRunning(controller);
  at("hint").hidden = true;
  messages.push({ role: "user", content: question });
  const asked = addMessage("user", question);
  at("log").scrollTop = at("log").scrollHeight;
  const { message, words } = addMessage("assistant", "");
  message.ariaBusy = "true"; // read out once it is whole
  const beganAt = performance.now();
  let firstAt = 0;
  const end = { finish: "stopped", tokens: null, seed: null };
  let failure = null;
  try {
    await follow(requestBody(), controller.signal, end, (text) => {
      firstAt ||= performance.now();
      inLog(() => words.append(text));
    });
  } catch (error) {
    if (!controller.signal.aborted) failure = error;
  }
  if (!message.isConnected) return; // a new conversation has begun meanwhile
  message.ariaBusy = "false";
  const isNothing = words.textContent === "" && (failure !== null || controller.signal.aborted);
  inLog((log) => {
    if (isNothing) takeBack(question, asked.message, message);
    else messages.push({ role: "assistant", content: words.textContent });
    if (failure) log.append(Object.assign(element("p", "error", failure.message), { role: "alert" }));
    else if (!isNothing) describe(message, end, beganAt, firstAt);
  });
  setRunning(null);
}

/** Nothing was answered: the question is to be asked again. */
function takeBack(question, ...shown) {
  messages.pop();
  for (const message of shown) message.remove();
  at("text").value ||= question;
}

function setRunning(controller) {
  running = controller;
  at("send").disabled = controller !== null;
  at("stop").disabled = controller === null;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("text").value.trim();
  if (!question || running || !at("parameters").reportValidity()) return;
  at("text").value = "";
  ask(question);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("stop").addEventListener("click", () => {
  running?.abort();
  at("text").focus();
});
at("new").addEventListener("click", () => {
  running?.abort();
  setRunning(null);
  messages = [];
  at("log").replaceChildren(at("hint"));
  at("hint").hidden = false;
  at("text").focus();
});
at("parameters").addEventListener("submit", (event) => event.preventDefault());

// ---- The live view

let watching = null; // the AbortController of the statistics' stream
let last = null; // the counters one event ago
let points = []; // of the last minutes: {time, speed, step, rows}

/** Follow the statistics while the page is seen, whatever happens to the server. */
async function watch() {
  watching?.abort();
  if (document.hidden) return;
  const mine = (watching = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await call("/page/stats", { signal: mine.signal });
      for await (const data of eventsOf(response)) show(JSON.parse(data));
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error.status === 401) return setHealth("connecting", "API key needed");
    }
    if (mine.signal.aborted) return;
    setHealth("lost", "connection lost");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function setHealth(health, words = health) {
  at("health").dataset.health = health;
  if (at("health").textContent !== words) at("health").textContent = words;
}

function show(stats) {
  setHealth(stats.health, stats.is_paused ? "paused" : stats.health);
  model = stats.model;
  at("model").textContent = model;
  at("running").textContent = stats.num_running ?? "–";
  at("waiting").textContent = stats.num_waiting ?? "–";
  if (stats.engine) showEngine(stats.engine, stats);
}

function showEngine(engine, stats) {
  if (last && engine.num_steps < last.engine.num_steps) [last, points] = [null, []]; // another server at the same address
  if (last && stats.time > last.time) points.push(difference(engine, last.engine, stats.time, stats.time - last.time));
  last = { engine, time: stats.time };
  points = points.filter((point) => point.time > stats.time - HISTORY_S);
  const now = points.at(-1);
  at("speed").textContent = now ? now.speed.toFixed(now.speed < 10 ? 1 : 0) : "–";
  at("hits").textContent = engine.num_prompt_tokens ? percent(engine.num_cached_tokens / engine.num_prompt_tokens) : "–";
  showMemory(engine);
  draw("speed", (point) => point.speed, (value) => value.toFixed(0));
  draw("step", (point) => point.step, (value) => `${value.toFixed(1)} ms`);
  draw("rows", (point) => point.rows, (value) => value.toFixed(1));
  at("facts").textContent = `${engine.num_finished} requests finished, ${engine.num_generated_tokens} tokens generated, `
    + `${engine.num_preempted} preemptions. Live requests of frontend ${stats.frontend.index}: ${stats.frontend.live_requests}.`;
}

function difference(engine, before, time, seconds) {
  const steps = engine.num_steps - before.num_steps;
  return {
    time,
    speed: (engine.num_generated_tokens - before.num_generated_tokens) / seconds,
    step: steps ? (engine.step_us - before.step_us) / steps / 1000 : null,
    rows: steps ? (engine.num_rows - before.num_rows) / steps : null,
  };
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function showMemory(engine) {
  const { num_total_pages: total, num_free_pages: free } = engine;
  const cached = engine.num_cached_pages - engine.num_pinned; // those that requests use are theirs
  const shares = { running: (total - free - cached) / total, cached: cached / total, free: free / total };
  for (const [state, share] of Object.entries(shares)) {
    at(`kv-${state}`).textContent = percent(share);
    const part = at("memory").querySelector(`.${state}`);
    if (part) part.style.width = `${100 * share}%`;
  }
  const words = Object.entries(shares).map(([state, share]) => `${percent(share)} ${state}`);
  at("memory").ariaLabel = `KV memory: ${words.join(", ")}, of ${total * engine.page_size} tokens`;
}

/** A line from the oldest point on the left to now on the right, from 0 to the greatest value; broken where nothing ran. */
function draw(name, valueOf, words) {
  const canvas = at(`${name}-line`);
  const scale = devicePixelRatio;
  const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale].map(Math.round);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  const values = points.map(valueOf);
  const most = Math.max(0, ...values);
  at(`${name}-range`).textContent = most > 0 ? `up to ${words(most)}` : "";
  canvas.ariaLabel = `${name === "step" ? "Step time" : name === "rows" ? "Rows per step" : "Tokens per second"} over the last `
    + `${HISTORY_S / 60} minutes: ${most > 0 ? `up to ${words(most)}` : "nothing ran"}`;
  if (!(most > 0)) return;
  pen.strokeStyle = pen.fillStyle = getComputedStyle(canvas).color;
  pen.lineWidth = 1.5 * scale;
  const x = (point) => width - 2 * scale - ((points.at(-1).time - point.time) / HISTORY_S) * (width - 4 * scale);
  const y = (value) => height - 2 * scale - (value / most) * (height - 5 * scale);
  pen.beginPath();
  points.forEach((point, index) => {
    if (values[index] === null) return;
    const isJoined = index > 0 && values[index - 1] !== null;
    if (isJoined) pen.lineTo(x(point), y(values[index]));
    else pen.moveTo(x(point), y(values[index]));
    pen.fillRect(x(point) - scale, y(values[index]) - scale, 2 * scale, 2 * scale);
  });
  pen.stroke();
}

document.addEventListener("visibilitychange", watch);
watch();
at("text").focus();
