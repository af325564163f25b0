// What an answer cost, in a few numbers. The server's clock is preferred for speed, because a busy
// browser delays what it reads; TTFT is measured here, because here is where someone waited.

import { count, duration, percent, rate } from "./format.js";

/** A plain record that survives JSON: kept with the history, shown under the answer. */
export function measure(answer) {
  const { usage, timings } = answer;
  const numTokens = usage?.completion_tokens ?? answer.numPieces;
  const spanMs = answer.lastMs - answer.ttftMs;
  const ownRate = spanMs > 0 ? (1000 * (numTokens - 1)) / spanMs : null;
  const known = (value) => (Number.isFinite(value) ? value : null);
  return {
    ttftMs: known(answer.ttftMs),
    totalMs: known(answer.totalMs),
    tokensPerS: known(timings?.tokens_per_s) ?? known(ownRate),
    numTokens,
    numPrompt: usage?.prompt_tokens ?? null,
    numCached: usage?.prompt_tokens_details?.cached_tokens ?? null,
    route: answer.route ?? null,
    finishReason: answer.isStopped ? "stopped" : answer.finishReason,
    serverMs: timings
      ? { queue: timings.queue_ms, prefill: timings.prefill_ms, decode: timings.decode_ms }
      : null,
  };
}

/** [{label, value, hint | tip}] in reading order; what is not known is left out. */
export function figuresOf(stats) {
  const figures = [];
  if (stats.ttftMs !== null) figures.push({ label: "TTFT", value: duration(stats.ttftMs), hint: "ttft" });
  if (stats.tokensPerS !== null) {
    figures.push({ label: "tokens/s", value: rate(stats.tokensPerS), hint: "tps" });
  }
  figures.push({ label: "tokens", value: count(stats.numTokens), tip: serverTip(stats) });
  if (stats.numPrompt !== null) {
    const found = `${count(stats.numCached)} of the ${count(stats.numPrompt)} prompt tokens were found in memory and not computed again.`;
    figures.push({ label: "prompt", value: count(stats.numPrompt), tip: found });
    if (stats.numCached) {
      figures.push({ label: "of it cached", value: percent(stats.numCached, stats.numPrompt), tip: found });
    }
  }
  if (stats.route) {
    const [model, ...why] = stats.route.split("; ");
    figures.push({ label: "", value: `by ${model}`, tip: why.join("\n") });
  }
  const endings = { length: "reached max tokens", stopped: "stopped", content_filter: "filtered" };
  if (endings[stats.finishReason]) figures.push({ label: "", value: endings[stats.finishReason] });
  return figures;
}

function serverTip({ serverMs, totalMs }) {
  const whole = totalMs === null ? "" : `${duration(totalMs)} in all, seen from here.`;
  if (!serverMs) return whole;
  const parts = [["queue", "waiting"], ["prefill", "reading the prompt"], ["decode", "writing"]]
    .filter(([name]) => Number.isFinite(serverMs[name]))
    .map(([name, says]) => `${duration(serverMs[name])} ${says}`);
  return `${whole} In the engine: ${parts.join(", ")}.`;
}
