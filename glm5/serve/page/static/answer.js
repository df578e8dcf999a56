// One answer: the request for it, and the message that grows from its chunks.

import { ApiError, chunks, errorRecord, post } from "./api.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** An answer that nothing is known of yet. It is stored as it stands. */
export function emptyAnswer(model) {
  return { role: "assistant", model, content: "", reasoning: "", calls: [], finish: null, error: null, figures: {} };
}

/** Fill `message`, the last one of `chat`, until the answer ends; `changed` is called after every chunk. An error ends
 * up in the message. `signal` aborts the request, which ends it on the server too. */
export async function answer(chat, message, signal, changed) {
  const clock = new Clock();
  try {
    const response = await post("v1/chat/completions", requestBody(chat, message), signal);
    for await (const chunk of chunks(response)) {
      if (chunk.usage) clock.usage = chunk.usage;
      if (chunk.choices?.length) {
        clock.heard(grow(message, chunk.choices[0]));
      }
      message.figures = clock.figures();
      changed();
    }
    if (message.finish === null) throw new ApiError("The connection ended before the answer did.");
  } catch (error) {
    if (signal.aborted) message.finish = "stopped";
    else message.error = errorRecord(error);
  }
}

/** The body that asks for `message`: everything before it, and the settings. An empty setting is left to the server; a
 * number that is none is sent as it stands, for the server to refuse by name. */
export function requestBody(chat, message) {
  const { settings } = chat;
  const before = chat.messages.slice(0, chat.messages.indexOf(message));
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = {
    model: message.model || undefined,
    messages: [...system, ...before.filter(says).map(wireMessage)],
    stream: true,
    // The second is vLLM's: usage in every chunk, for a count while the answer grows.
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    if (text) body[name] = Number.isNaN(Number(text)) ? text : Number(text);
  }
  if (!settings.thinking) body.chat_template_kwargs = { enable_thinking: false };
  else if (settings.effort) body.reasoning_effort = settings.effort;
  if (settings.tools.trim()) body.tools = readTools(settings.tools);
  return body;
}

/** The tools of the settings. Throws an error that says what is wrong with them. */
export function readTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not JSON (${error.message}).`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: a JSON list of tools is expected, as the API's field `tools` has it.");
  return tools;
}

/** Add one choice of a chunk. Gives what came: "reasoning", "answer", or null for a chunk without either. */
export function grow(message, { delta = {}, finish_reason = null }) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const content = delta.content ?? "";
  const calls = delta.tool_calls ?? [];
  message.reasoning += reasoning;
  message.content += content;
  for (const { index, id, function: part = {} } of calls) {
    const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= part.name ?? "";
    call.arguments += part.arguments ?? "";
  }
  message.finish = finish_reason ?? message.finish;
  if (content || calls.length) return "answer";
  return reasoning ? "reasoning" : null;
}

/** Whether the arguments of a call are whole; those of an answer that was stopped may not be. */
export function isWhole(call) {
  try {
    return typeof JSON.parse(call.arguments || "{}") === "object";
  } catch {
    return false;
  }
}

// An answer that failed at once says nothing, and no template has a form for it.
function says(message) {
  return message.role !== "assistant" || message.content !== "" || message.calls.some(isWhole);
}

function wireMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.id, content: message.content };
  if (message.role === "user") return { role: "user", content: message.content };
  const calls = message.calls.filter(isWhole).map(({ id, name, arguments: text }) => {
    return { id, type: "function", function: { name, arguments: text || "{}" } };
  });
  return {
    role: "assistant",
    content: message.content,
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

/** When what came, in seconds since the request. */
class Clock {
  constructor() {
    this.start = performance.now();
    this.first = this.last = this.answered = this.usage = null;
  }

  heard(what) {
    if (what === null) return;
    this.last = (performance.now() - this.start) / 1000;
    this.first ??= this.last;
    if (what === "answer") this.answered ??= this.last;
  }

  /** Rate without the first token: that one took the prompt's time. */
  figures() {
    const tokens = this.usage?.completion_tokens ?? null;
    const seconds = this.last - this.first;
    return {
      ttft: this.first,
      seconds: this.last,
      thought: (this.answered ?? this.last) - this.first,
      tokens,
      rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      reasoning: this.usage?.completion_tokens_details?.reasoning_tokens ?? null,
    };
  }
}
