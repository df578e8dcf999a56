// The last ten minutes of figures, made from successive states of the server's metrics.
//
// A figure is undefined when the server does not report what it needs, null when it does but nothing happened.
// Rates are over the last seconds, shares and percentiles over the last half minute.

import { buckets, labelValues, quantile, total } from "./prometheus.js";

export const SPAN = 600; // seconds kept
export const MAX_GAP = 5; // seconds between two samples that still belong together
const RATE_WINDOW = 3;
const SHARE_WINDOW = 30;

const COUNTERS = {
  generated: "vllm:generation_tokens_total",
  prompt: "vllm:prompt_tokens_total",
  queries: "vllm:prefix_cache_queries",
  hits: "vllm:prefix_cache_hits",
  drafts: "vllm:spec_decode_num_drafts_total",
  accepted: "vllm:spec_decode_num_accepted_tokens_total",
};
const HISTOGRAMS = {
  ttft: "vllm:time_to_first_token_seconds",
  itl: "vllm:inter_token_latency_seconds",
  e2e: "vllm:e2e_request_latency_seconds",
};
const TIER_HITS = "glm5:prefix_cache_hit_tokens_total";
const POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
export const TIERS = ["device", "host", "disk"];
export const MAX_POSITIONS = 6;
export const QUANTILES = { p50: 0.5, p90: 0.9, p99: 0.99 };

export class History {
  constructor() {
    this.samples = []; // { time, figures }
    this.states = []; // { time, counters, histograms } of the last SHARE_WINDOW
  }

  /** Add what the server said at `time`, in seconds; null if it said nothing. */
  add(time, metrics) {
    const state = metrics && stateOf(time, metrics);
    const last = this.states.at(-1);
    const isSetBack = time < this.samples.at(-1)?.time;
    const isGap = isSetBack || (last && time - last.time > MAX_GAP);
    // After a gap, a restart or a clock that was set back, what was before says nothing about now.
    if (isGap || (last && state && fell(last.counters, state.counters))) this.states = [];
    if (state) this.states.push(state);
    this.states = this.states.filter((one) => one.time >= time - SHARE_WINDOW);
    this.samples = isSetBack ? [] : this.samples.filter((one) => one.time > time - SPAN);
    this.samples.push({ time, figures: state ? { ...gauges(metrics), ...this.changes() } : {} });
  }

  /** Figures from the difference between two states. */
  changes() {
    const now = this.states.at(-1);
    const recent = this.states.findLast((one) => one.time <= now.time - RATE_WINDOW) ?? this.states[0];
    const early = this.states[0];
    const rate = (name) => divided(grown(recent, now, name), now.time - recent.time);
    const share = (name, of) => divided(grown(early, now, name), grown(early, now, of));
    const figures = { generation: rate("generated"), prompt: rate("prompt"), hit_any: share("hits", "queries") };
    for (const tier of TIERS) figures[`hit_${tier}`] = share(tier, "queries");
    for (let position = 0; position < MAX_POSITIONS; position += 1) {
      figures[`accepted_${position}`] = share(`position_${position}`, "drafts");
    }
    const accepted = share("accepted", "drafts");
    figures.per_step = typeof accepted === "number" ? accepted + 1 : accepted;
    for (const name of Object.keys(HISTOGRAMS)) {
      const [before, after] = [early.histograms[name], now.histograms[name]];
      for (const [label, q] of Object.entries(QUANTILES)) {
        figures[`${name}_${label}`] = after && (before && early !== now ? quantile(q, before, after) : null);
      }
    }
    return figures;
  }
}

function gauges(metrics) {
  return {
    running: total(metrics, "vllm:num_requests_running"),
    waiting: total(metrics, "vllm:num_requests_waiting"),
    kv: total(metrics, "vllm:kv_cache_usage_perc"),
  };
}

function stateOf(time, metrics) {
  const counters = mapped(COUNTERS, (name) => total(metrics, name));
  for (const tier of TIERS) counters[tier] = total(metrics, TIER_HITS, { tier });
  for (const position of labelValues(metrics, POSITIONS, "position")) {
    counters[`position_${position}`] = total(metrics, POSITIONS, { position });
  }
  return { time, counters, histograms: mapped(HISTOGRAMS, (name) => buckets(metrics, name)) };
}

function mapped(names, value) {
  return Object.fromEntries(Object.entries(names).map(([short, name]) => [short, value(name)]));
}

function fell(before, now) {
  return Object.keys(before).some((name) => now[name] < before[name]);
}

function grown(before, now, name) {
  if (now.counters[name] === undefined) return undefined;
  return before.counters[name] === undefined ? null : now.counters[name] - before.counters[name];
}

function divided(part, whole) {
  if (part === undefined || whole === undefined) return undefined;
  return part === null || !(whole > 0) ? null : part / whole;
}
