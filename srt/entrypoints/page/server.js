// Shared by chat and live view: requests with the API key, and server-sent events read by fetch (an EventSource cannot send a key).

const KEY = "srt-api-key";

export const at = (id) => document.getElementById(id);

/** Return a new element. Its text is never interpreted as markup. */
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** Return the response; throw an Error in words if it is not a success. */
export async function call(path, options) {
  const response = await fetch(path, { ...options, headers: headers() }).catch((error) => {
    throw options.signal?.aborted ? error : new Error("The server cannot be reached.");
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`);
  if (response.status === 401) askForKey(error.message);
  throw Object.assign(error, { status: response.status, parameter: body?.error?.param ?? null });
}

/** Yield the data of each server-sent event, however the network splits the bytes. */
export async function* eventsOf(response) {
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
  if (!at("key-panel").hidden) return;
  at("key-panel").hidden = false;
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key").value = "";
  at("key-panel").hidden = true;
  at("text").focus();
  document.dispatchEvent(new Event("key"));
});
