// Numbers as people read them: three digits are enough, units always written.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => grouped.format(value ?? 0);

export function duration(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  return `${minutes} min ${Math.round((ms - minutes * 60_000) / 1000)} s`;
}

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? count(value) : value.toFixed(1);
}

export function bytes(value) {
  const power = value > 0 ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
  const scaled = value / 1024 ** power;
  return `${scaled >= 10 || !power ? Math.round(scaled) : scaled.toFixed(1)} ${["bytes", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** How long ago, from seconds since 1970. */
export function age(stamp) {
  const seconds = Math.max(0, Date.now() / 1000 - stamp);
  const [unit, name] = [[86_400, "day"], [3600, "hour"], [60, "minute"]].find(([size]) => seconds >= size) ?? [1, "second"];
  return plural(Math.floor(seconds / unit), name);
}

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)}%` : "–");

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
