// The chat, over /v1/chat/completions. The conversation and the parameters survive a reload, until the tab is closed.

import { Answer } from "/page/answer.js";
import { at, call, element, eventsOf } from "/page/server.js";

const STORE = "srt-chat";
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
  "repetition_penalty"];
const ENDS = { length: "cut at the length limit", tool_calls: "calls tools" };
const PASTED = { schema: "response_format", tools: "tools" }; // fields with JSON, and the parameters that they become

let messages = []; // the messages of the next request, without the system prompt
let running = null; // {controller, answer} of the answer being written: its AbortController and its Answer
let isLeaving = false;

// ---- The log

/** Change the log; keep it scrolled to its end if it was. */
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

/** Show a message of the conversation so far. */
function showMessage({ role, content, reasoning_content, tool_calls }) {
  if (role === "user") {
    addMessage(role, content);
    return;
  }
  const { message, words } = addMessage(role, "");
  new Answer(message, words).add({
    reasoning_content,
    content,
    tool_calls: tool_calls?.map((made, index) => ({ index, ...made })),
  });
}

function describe(message, end, beganAt, firstAt) {
  const took = (performance.now() - beganAt) / 1000;
  const parts = [ENDS[end.finish] ?? end.finish];
  if (end.tokens !== null) parts.push(`${end.tokens} tokens`);
  if (firstAt) parts.push(`first after ${((firstAt - beganAt) / 1000).toFixed(2)} s`);
  parts.push(`${took.toFixed(2)} s`);
  const line = element("p", "quiet", parts.filter(Boolean).join(" · "));
  if (end.seed !== null) {
    const seed = element("button", "seed", `seed ${end.seed}`);
    seed.type = "button";
    seed.title = "Use this seed for the next answers";
    seed.addEventListener("click", () => {
      at("parameters").elements.seed.value = end.seed;
      store();
    });
    line.append(" · ", seed);
  }
  message.append(line);
}

// ---- Storage

function store() {
  if (isLeaving) return; // from here on the browser ends the answer
  const kept = running && !running.answer.isEmpty ? [...messages, running.answer.toMessage()] : messages;
  const fields = Object.fromEntries(new FormData(at("parameters")));
  try {
    sessionStorage.setItem(STORE, JSON.stringify({ messages: kept, fields }));
  } catch {
    sessionStorage.removeItem(STORE); // too long to store: drop it rather than keep an outdated part
  }
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
  for (const [name, value] of Object.entries(kept.fields ?? {})) {
    if (at("parameters").elements[name]) at("parameters").elements[name].value = value;
  }
  messages = kept.messages ?? [];
  at("hint").hidden = messages.length > 0;
  messages.forEach(showMessage);
  if (messages.at(-1)?.role === "user") { // the page was left during an answer
    at("text").value = messages.pop().content;
    at("log").lastElementChild.remove();
  }
}

// ---- One answer

/** Return the filled-in fields as JSON members. Seed, schema and tools are put in as text: a number would lose digits. */
function requestBody() {
  const form = at("parameters").elements;
  const system = form.system.value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const name of NUMBERS) {
    if (form[name].value !== "") body[name] = Number(form[name].value);
  }
  const stop = form.stop.value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  const [seed, schema, tools] = ["seed", "schema", "tools"].map((name) => form[name].value.trim());
  const written = [
    seed && `"seed":${BigInt(seed)}`,
    schema && `"response_format":{"type":"json_schema","json_schema":{"name":"answer","schema":${schema}}}`,
    tools && `"tools":${tools}`,
  ];
  return `${[JSON.stringify(body).slice(0, -1), ...written.filter(Boolean)].join()}}`;
}

/** Say beside a field with pasted JSON what is wrong with it; with null, that nothing is. */
function setFlaw(name, reason) {
  at(`${name}-flaw`).textContent = reason;
  at(`${name}-flaw`).hidden = reason === null;
  if (reason !== null) at("extras").open = true;
}

/** Tell whether the pasted fields hold JSON, and say beside each one that does not. */
function isPastedJson() {
  let isJson = true;
  for (const name of Object.keys(PASTED)) {
    setFlaw(name, null);
    try {
      JSON.parse(at("parameters").elements[name].value.trim() || "null");
    } catch (error) {
      setFlaw(name, `This is not JSON: ${error.message}`);
      isJson = false;
    }
  }
  return isJson;
}

/** Name beside their section which of the pasted fields are filled in: they count while it is folded, too. */
function showInUse() {
  const used = Object.keys(PASTED).filter((name) => at("parameters").elements[name].value.trim());
  at("in-use").textContent = used.length ? `(${used.join(" and ")} in use)` : "";
}

/** Say where it can be seen why the server refused or broke off: beside the pasted field at fault, or in the log. */
function tell(error) {
  const pasted = Object.keys(PASTED).find((name) => PASTED[name] === error.parameter?.split(/[.[]/)[0]);
  if (pasted) setFlaw(pasted, error.message);
  else at("log").append(Object.assign(element("p", "error", error.message), { role: "alert" }));
}

/** Read the answer to its end: pass each piece with the usage so far to `onDelta`, and collect the finish reason and counts in `end`. */
async function follow(body, signal, end, onDelta) {
  const response = await call("/v1/chat/completions", { method: "POST", body, signal });
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    if (choice?.delta) onDelta(choice.delta, chunk.usage);
    end.finish = choice?.finish_reason ?? end.finish;
    end.tokens = chunk.usage?.completion_tokens ?? end.tokens;
    end.seed = /"seed":(\d+)/.exec(data)?.[1] ?? end.seed; // as text: a number loses digits; strings escape their quotes
  }
  throw new Error("The connection ended before the answer did.");
}

async function ask(question) {
  const controller = new AbortController();
  at("hint").hidden = true;
  messages.push({ role: "user", content: question });
  const asked = addMessage("user", question);
  at("log").scrollTop = at("log").scrollHeight;
  const { message, words } = addMessage("assistant", "");
  const answer = new Answer(message, words);
  setRunning({ controller, answer });
  message.ariaBusy = "true"; // screen readers read it once it is complete
  const schema = at("parameters").elements.schema.value.trim();
  const beganAt = performance.now();
  let firstAt = 0;
  const end = { finish: "stopped", tokens: null, seed: null };
  let failure = null;
  try {
    await follow(requestBody(), controller.signal, end, (delta, usage) => {
      if (delta.content || delta.reasoning_content || delta.tool_calls) firstAt ||= performance.now();
      inLog(() => {
        answer.add(delta);
        if (usage?.reasoning_tokens) answer.countReasoning(usage.reasoning_tokens);
      });
    });
  } catch (error) {
    if (!controller.signal.aborted) failure = error;
  }
  if (!message.isConnected) return; // a new conversation has begun in the meantime
  message.ariaBusy = "false";
  const isNothing = answer.isEmpty && (failure !== null || controller.signal.aborted);
  inLog(() => {
    if (isNothing) takeBack(question, asked.message, message);
    else messages.push(answer.toMessage());
    if (failure) tell(failure);
    else if (!isNothing) {
      if (schema && !controller.signal.aborted) answer.judge(JSON.parse(schema));
      describe(message, end, beganAt, firstAt);
    }
  });
  setRunning(null);
  store();
}

/** Take back a question without an answer, to be asked again. */
function takeBack(question, ...shown) {
  messages.pop();
  for (const message of shown) message.remove();
  at("text").value ||= question;
}

function setRunning(answer) {
  running = answer;
  at("send").disabled = answer !== null;
  at("stop").disabled = answer === null;
}

function stop() {
  running?.controller.abort();
}

// ---- User input

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("text").value.trim();
  if (!question || running || !at("parameters").reportValidity() || !isPastedJson()) return;
  at("text").value = "";
  ask(question);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("stop").addEventListener("click", () => {
  stop();
  at("text").focus();
});
at("new").addEventListener("click", () => {
  stop();
  setRunning(null);
  messages = [];
  at("log").replaceChildren(at("hint"));
  at("hint").hidden = false;
  store();
  at("text").focus();
});
at("parameters").addEventListener("submit", (event) => event.preventDefault());
for (const fields of ["parameters", "extras"]) at(fields).addEventListener("input", store);
at("extras").addEventListener("input", (event) => {
  setFlaw(event.target.name, null);
  showInUse();
});
addEventListener("pagehide", () => {
  store();
  isLeaving = true;
});
addEventListener("pageshow", () => { isLeaving = false; });

restore();
showInUse();
at("text").focus();
