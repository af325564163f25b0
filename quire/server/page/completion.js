// One chat completion from request to last chunk, with what it felt like from here: when the first
// piece came and when the last. Chat, Compare and the demo load all go through `complete`. It does
// not throw: an answer that failed is an answer with an `error` and whatever text had arrived.

import { ApiError, eventsOf, request } from "./wire.js";

const PATH = "/v1/chat/completions";

/** The request body for messages and settings: blank settings are left to the server. */
export function bodyOf({ model, system, messages, settings }) {
  const opening = system?.trim() ? [{ role: "system", content: system }] : [];
  return {
    ...(model ? { model } : {}), // not known yet: the server has a default
    messages: [...opening, ...messages],
    ...settings,
    stream: true,
    stream_options: { include_usage: true },
  };
}

function blankAnswer() {
  return {
    content: "",
    reasoning: "",
    tokens: [], // {token, logprob, top: [{token, logprob}]} when asked for
    finishReason: null,
    usage: null,
    timings: null,
    error: null,
    route: null, // of a request that left the choice of the model to the server
    isStopped: false,
    numPieces: 0,
    ttftMs: NaN,
    totalMs: NaN,
    lastMs: NaN,
  };
}

function takeChoice(answer, choice, elapsed) {
  const delta = choice.delta ?? {};
  const content = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? "";
  if (content || reasoning) {
    if (!answer.numPieces) answer.ttftMs = elapsed;
    answer.lastMs = elapsed;
    answer.numPieces += 1;
    answer.content += content;
    answer.reasoning += reasoning;
  }
  for (const entry of choice.logprobs?.content ?? []) {
    const { token, logprob, top_logprobs: top } = entry;
    answer.tokens.push({ token, logprob, top: top ?? [] });
  }
  answer.finishReason = choice.finish_reason ?? answer.finishReason;
}

async function follow(answer, body, signal, onUpdate) {
  const begin = performance.now();
  const elapsed = () => performance.now() - begin;
  try {
    const response = await request(PATH, { body, signal });
    answer.route = response.headers.get("x-quire-route");
    let hasEnded = false;
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") {
        hasEnded = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code });
      answer.usage = chunk.usage ?? answer.usage;
      answer.timings = chunk.timings ?? answer.timings;
      if (chunk.choices?.length) takeChoice(answer, chunk.choices[0], elapsed());
      onUpdate(answer);
    }
    if (!hasEnded && !answer.finishReason) throw new ApiError("The connection ended before the answer did.");
  } finally {
    answer.totalMs = elapsed();
  }
}

/** Streams an answer; `onUpdate(answer)` after each chunk. Aborting `signal` is how to stop. */
export async function complete(body, { signal, onUpdate = () => {} } = {}) {
  const answer = blankAnswer();
  try {
    await follow(answer, body, signal, onUpdate);
  } catch (error) {
    if (signal?.aborted) answer.isStopped = true;
    else if (error instanceof ApiError) answer.error = { message: error.message, status: error.status };
    else answer.error = { message: `The answer broke off (${error.message}).`, status: 0 };
  }
  return answer;
}

/** Shell text that sends `body` again. The key is named, never shown. */
export function curlOf(body, isKeyed) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const lines = [
    `curl -N ${location.origin}${PATH}`,
    ...(isKeyed ? ['-H "Authorization: Bearer $QUIRE_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d '${json}'`,
  ];
  return lines.join(" \\\n  ");
}
