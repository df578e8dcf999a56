// Prometheus' text format, and what counters and histograms say.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(NaN|[+-]?(?:Inf|[\d.]\S*))(?:\s+\S+)?$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", '"': '"', "\\": "\\" };

/** name -> [{ labels, value }]. Lines that are none of the format are skipped. */
export function parseMetrics(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line.trim());
    if (!found) continue;
    const [, name, labels = "", value] = found;
    if (!metrics.has(name)) metrics.set(name, []);
    metrics.get(name).push({ labels: parseLabels(labels), value: number(value) });
  }
  return metrics;
}

function parseLabels(text) {
  const pairs = Array.from(text.matchAll(LABEL), ([, name, value]) => [name, value.replace(/\\(.)/g, (whole, c) => ESCAPES[c] ?? whole)]);
  return Object.fromEntries(pairs);
}

function number(text) {
  return /^[+-]?Inf$/i.test(text) ? (text.startsWith("-") ? -Infinity : Infinity) : Number(text);
}

/** The sum over all series of a metric that have these labels, also under its name with "_total", which some
 * exporters add; undefined if there is none. */
export function total(metrics, name, labels = {}) {
  const series = metrics.get(name) ?? metrics.get(`${name}_total`) ?? [];
  const fitting = series.filter((one) => Object.entries(labels).every(([label, value]) => one.labels[label] === value));
  return fitting.length ? fitting.reduce((sum, one) => sum + one.value, 0) : undefined;
}

/** The values that a label of a metric has. */
export function labelValues(metrics, name, label) {
  const series = metrics.get(name) ?? metrics.get(`${name}_total`) ?? [];
  return [...new Set(series.map((one) => one.labels[label]).filter((value) => value !== undefined))];
}

/** Upper bound -> observations up to it, over all series of a histogram; undefined if there is none. */
export function buckets(metrics, name) {
  const sums = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return sums.size ? sums : undefined;
}

/** The quantile of what was observed between two states of a histogram, as Prometheus' histogram_quantile has it:
 * evenly spread within a bucket, and the last finite bound for what lies beyond it. null without observations. */
export function quantile(q, before, now) {
  const bounds = [...now.keys()].sort((one, other) => one - other);
  const counts = bounds.map((bound) => now.get(bound) - (before.get(bound) ?? 0));
  const wanted = q * counts.at(-1);
  if (!(counts.at(-1) > 0)) return null;
  const found = counts.findIndex((count) => count >= wanted);
  if (bounds[found] === Infinity) return bounds.at(-2) ?? null;
  const low = found > 0 ? bounds[found - 1] : 0;
  const below = found > 0 ? counts[found - 1] : 0;
  const inside = counts[found] - below;
  return inside > 0 ? low + ((bounds[found] - low) * (wanted - below)) / inside : bounds[found];
}
