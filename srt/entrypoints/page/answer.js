// One message of the model in the log, as it grows: reasoning that is folded away, text, and calls of tools.

import { element } from "/page/server.js";
import { flawOf } from "/page/schema.js";

const MOST_LEVELS = 20; // deeper brackets are not indented further

export class Answer {
  #reasoning = null; // {fold, title, words}, from the first piece of reasoning on
  #calls = []; // {call, shown, indent}: the call as the API has it, and the element that shows its arguments

  /** Show an answer in `message`; its text goes into `words`, which is in the message already. */
  constructor(message, words) {
    this.message = message;
    this.words = words;
  }

  get isEmpty() {
    return this.words.textContent === "" && this.#reasoning === null && this.#calls.length === 0;
  }

  /** Add a piece of the answer, in the form of a delta of the API. */
  add(delta) {
    if (delta.reasoning_content) this.#addReasoning(delta.reasoning_content);
    if (delta.content) this.words.append(delta.content);
    for (const call of delta.tool_calls ?? []) this.#addCall(call);
  }

  /** Show how many tokens the reasoning has. */
  countReasoning(count) {
    if (this.#reasoning) this.#reasoning.title.textContent = `Reasoning, ${count} ${count === 1 ? "token" : "tokens"}`;
  }

  /** Return the message as the API takes it back. */
  toMessage() {
    return {
      role: "assistant",
      content: this.words.textContent,
      ...(this.#reasoning ? { reasoning_content: this.#reasoning.words.textContent } : {}),
      ...(this.#calls.length ? { tool_calls: this.#calls.map(({ call }) => call) } : {}),
    };
  }

  /** Say below the text whether it is valid for the schema. */
  judge(schema) {
    if (this.words.textContent === "" && this.#calls.length) return; // a call of a tool came in its place
    const [kind, line] = judgement(this.words.textContent, schema);
    this.message.append(element("p", `mark ${kind}`, line));
  }

  #addReasoning(text) {
    if (this.#reasoning === null) {
      const fold = element("details", "reasoning");
      const [title, words] = [element("summary", "", "Reasoning"), element("div", "")];
      fold.append(title, words);
      this.words.before(fold);
      this.#reasoning = { title, words };
    }
    this.#reasoning.words.append(text);
  }

  #addCall({ index, id, function: { name, arguments: piece } }) {
    if (!this.#calls[index]) {
      const [block, shown] = [element("div", "call"), element("code", "")];
      block.append(element("b", "", name), shown);
      this.message.append(block);
      const call = { id, type: "function", function: { name, arguments: "" } };
      this.#calls[index] = { call, shown, indent: indenter() };
    }
    const { call, shown, indent } = this.#calls[index];
    call.function.arguments += piece ?? "";
    shown.append(indent(piece ?? ""));
  }
}

/** Return whether a text is JSON that is valid for the schema: valid, invalid or unchecked, and the sentence to show. */
function judgement(text, schema) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return ["invalid", "not JSON, or not all of it"];
  }
  try {
    const flaw = flawOf(value, schema);
    return flaw === null ? ["valid", "valid JSON for the schema"] : ["invalid", `not valid for the schema: ${flaw}`];
  } catch (error) {
    return ["unchecked", `JSON, not checked against the schema: ${error.message}`];
  }
}

/** Return a function that indents JSON which comes in pieces: called with the next piece, it returns what to show of it. */
export function indenter() {
  let depth = 0;
  let isInString = false;
  let isEscaped = false;
  let isJustOpened = false; // the last sign was an opening bracket
  const newLine = () => `\n${"  ".repeat(Math.min(depth, MOST_LEVELS))}`;

  function showInString(sign) {
    if (sign === '"' && !isEscaped) isInString = false;
    isEscaped = sign === "\\" && !isEscaped;
    return sign;
  }

  function show(sign) {
    if (isInString) return showInString(sign);
    if (" \n\r\t".includes(sign)) return "";
    const isOpening = "{[".includes(sign);
    const isClosing = "}]".includes(sign);
    if (isClosing) depth = Math.max(depth - 1, 0);
    const before = isClosing !== isJustOpened ? newLine() : ""; // empty brackets stay together
    if (isOpening) depth += 1;
    isJustOpened = isOpening;
    isInString = sign === '"';
    return before + sign + (sign === "," ? newLine() : sign === ":" ? " " : "");
  }
  return (piece) => [...piece].map(show).join("");
}
