// OpenAI's npm package, against the server at SRT_CLIENTS_URL. The package lies in SRT_CLIENTS_NPM.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const OpenAI = createRequire(process.env.SRT_CLIENTS_NPM + "/")("openai");
const url = process.env.SRT_CLIENTS_URL + "/v1";
const api = new OpenAI({ baseURL: url, apiKey: "none", timeout: 60_000 });
const ask = (content) => ({ model: "tiny", temperature: 0, messages: [{ role: "user", content }] });

/** A client that notes the status of each answer that it receives. */
function noting(seen) {
  const fetchAndNote = async (...words) => {
    const answer = await fetch(...words);
    seen.push(answer.status);
    return answer;
  };
  return new OpenAI({ baseURL: url, apiKey: "none", timeout: 60_000, fetch: fetchAndNote });
}

test("npm's openai lists the model", async () => {
  const ids = [];
  for await (const model of api.models.list()) ids.push(model.id);
  assert.deepEqual(ids, ["tiny"]);
});

test("npm's openai chats", async () => {
  const answer = await api.chat.completions.create(ask("What is 12 + 30?"));
  assert.equal(answer.choices[0].message.content, "12 + 30 = 42");
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("npm's openai streams a chat that equals the whole one", async () => {
  const question = ask("Sort: pear, fig, apple");
  const stream = api.chat.completions.stream({ ...question, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (piece) => (text += piece));
  const final = await stream.finalChatCompletion();
  const whole = await api.chat.completions.create(question);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
  assert.ok(final.usage.completion_tokens > 0);
});

test("npm's openai completes, whole and streamed", async () => {
  const wanted = { model: "tiny", prompt: "Once upon a time", max_tokens: 8, temperature: 0 };
  const whole = await api.completions.create(wanted);
  let text = "";
  for await (const chunk of await api.completions.create({ ...wanted, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, whole.choices[0].text);
  assert.ok(text.length > 0);
});

test("npm's openai leaves a stream early", async () => {
  const stream = await api.chat.completions.create({ ...ask("Sort: pear, fig, apple"), stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.choices);
    break;
  }
  assert.equal((await api.chat.completions.create(ask("What is 12 + 30?"))).choices[0].message.content, "12 + 30 = 42");
});

test("npm's openai raises its own errors at once", async () => {
  const seen = [];
  const strict = noting(seen);
  await assert.rejects(strict.chat.completions.create({ ...ask("Hello"), temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.match(error.message, /temperature/);
    return true;
  });
  await assert.rejects(strict.chat.completions.create({ ...ask("Hello"), model: "gpt-4" }), OpenAI.NotFoundError);
  await assert.rejects(strict.embeddings.create({ model: "tiny", input: "Hello" }), /embeddings/);
  assert.deepEqual(seen, [400, 404, 501]);
});
