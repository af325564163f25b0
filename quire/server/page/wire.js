// Talking to the server: the key, failures with their reasons, and server-sent events over fetch
// (EventSource cannot send an Authorization header). Nothing here knows what the messages mean.

import { askForKey } from "./key.js";
import { session } from "./storage.js";

const KEY = "quire.key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

function headers(hasBody) {
  const key = session.get(KEY);
  return {
    ...(hasBody ? { "Content-Type": "application/json" } : {}),
    ...(key ? { Authorization: `Bearer ${key}` } : {}),
  };
}

async function failureOf(response) {
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Not JSON: a proxy's page, say. The status is what we have.
  }
  const retryAfter = response.headers.get("Retry-After");
  const wait = retryAfter ? ` Try again in ${retryAfter} s.` : "";
  const message = detail.message ?? `The server answered ${response.status} ${response.statusText}`;
  return new ApiError(message + wait, { status: response.status, code: detail.code, retryAfter });
}

/** A successful Response, or an ApiError. Asks for a key when the server wants one. */
export async function request(path, { body, signal, method } = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const keyUsed = session.get(KEY);
    const response = await send(path, body, signal, method);
    if (response.ok) return response;
    const failure = await failureOf(response);
    if (response.status !== 401 || attempt >= 3) throw failure;
    if (session.get(KEY) !== keyUsed) continue; // another request has just been given a key
    const key = await askForKey(keyUsed ? failure.message : "");
    if (!key) throw failure;
    session.set(KEY, key);
    dispatchEvent(new Event("quire:key"));
  }
}

async function send(path, body, signal, method) {
  try {
    return await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: headers(body !== undefined),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?");
  }
}

/** The `data:` payloads of a server-sent event stream, as strings. Comments are skipped. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Leaving early (break, throw) must close the connection, or the server goes on for nobody.
    reader.cancel().catch(() => {});
  }
}
