// What the page asks of the server, and how a refusal is told. Addresses are relative: a proxy may add a prefix.

import { events } from "./sse.js";

const KEY = "glm5.key";
const MAX_SHOWN = 2000; // characters of an error that is no JSON

/** The API key of this tab; it is gone when the tab closes. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A refusal, with the fields of OpenAI's envelope as the server sent them. */
export class ApiError extends Error {
  constructor(message, { status = null, type = null, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, type, code, param, retryAfter });
  }

  /** As it is stored and shown: one line of what kind, and the server's own words. */
  toRecord() {
    const kind = [this.status, this.type, this.code].filter(Boolean).join(" · ");
    const more = [this.param && `field: ${this.param}`, this.retryAfter && `try again in ${this.retryAfter} s`];
    return { title: [kind || "Error", ...more.filter(Boolean)].join(" · "), message: this.message };
  }
}

/** What any exception is shown as. */
export function errorRecord(error) {
  return error instanceof ApiError ? error.toRecord() : { title: "Error", message: String(error.message || error) };
}

/** GET; `signal` aborts it. Throws ApiError. */
export async function get(path, signal) {
  return checked(await reach(path, { headers: authorization(), signal }));
}

/** POST of a JSON body; `signal` aborts it. Throws ApiError. */
export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json", ...authorization() };
  return checked(await reach(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

/** The cards of the served models. */
export async function models() {
  return (await (await get("v1/models")).json()).data;
}

/** Sampling parameters that a request without any gets, where the checkpoint names some; {} from a server that does not
 * say. */
export async function samplingDefaults() {
  try {
    return JSON.parse((await (await get("get_model_info")).json()).preferred_sampling_params) ?? {};
  } catch {
    return {};
  }
}

/** The chunks of a streamed answer, parsed, up to [DONE] or the end. Throws ApiError for an event that is an error. */
export async function* chunks(response) {
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    if (chunk === null) throw new ApiError(`The stream holds something that is no JSON: ${data.slice(0, MAX_SHOWN)}`);
    if (chunk.error) throw fromEnvelope(chunk.error);
    yield chunk;
  }
}

function authorization() {
  return key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
}

async function reach(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(`The server cannot be reached (${error.message}).`);
  }
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  const about = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  const body = parsed(text);
  if (body?.error) throw fromEnvelope(body.error, about);
  const words = typeof body?.detail === "string" ? body.detail : text.slice(0, MAX_SHOWN);
  throw new ApiError(words || response.statusText || "No reason given.", about);
}

function fromEnvelope(error, about = {}) {
  if (typeof error === "string") return new ApiError(error, about);
  const { message, type, code, param } = error;
  return new ApiError(message ?? JSON.stringify(error), { ...about, type, code, param });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
