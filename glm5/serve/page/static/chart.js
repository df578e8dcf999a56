// Lines over time, drawn as SVG. The legend shows the values now, or at the time that mouse or arrow keys point at.

import { el, svg } from "./dom.js";
import { MAX_GAP } from "./history.js";
import { axisSteps, exactTime, FORMATS, timeOfDay } from "./units.js";

const HEIGHT = 168;
const MARGIN = { top: 10, right: 10, bottom: 22, left: 52 };
const SPANS = { 60: 15, 120: 30, 300: 60, 600: 120 }; // seconds shown -> seconds between two labels

/** The shortest span that holds all samples. */
export function spanOf(samples) {
  const age = samples.length ? samples.at(-1).time - samples[0].time : 0;
  return Number(Object.keys(SPANS).find((span) => span >= age) ?? 600);
}

export class Chart {
  /** `series`: [{ name, figure }]; `unit`: a key of FORMATS; `axis`: what the values are, in words. `stacked` puts the
   * series on top of each other, `top` fixes the end of the axis. `onpoint(time)`: the reader points there, or null. */
  constructor({ title, axis, unit, series, stacked = false, top = null, onpoint }) {
    Object.assign(this, { title, axis, unit, series, stacked, top, onpoint, pointed: null, samples: [], span: 60 });
    this.canvas = svg("svg", { class: "plot", role: "img", tabindex: "0", height: HEIGHT });
    this.legend = el("ul", { class: "legend" });
    this.moment = el("span", { class: "moment" });
    this.values = series.map(({ name }, at) => {
      const value = el("span", { class: "value" });
      const entry = el("li", { class: `tone-${at + 1}` }, el("span", { class: "swatch" }), `${name} `, value);
      this.legend.append(entry);
      return { entry, value };
    });
    this.note = el("p", { class: "note" });
    const head = el("div", { class: "chart-head" }, el("h2", {}, title), el("span", { class: "axis" }, axis), this.moment);
    this.element = el("section", { class: "card chart" }, head, this.legend, this.canvas, this.note);
    this.canvas.addEventListener("pointermove", (event) => this.onpoint(this.timeAt(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.onpoint(this.timeAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.onpoint(null));
    this.canvas.addEventListener("blur", () => this.onpoint(null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    // Asking for the width in `draw` would lay the page out again for each chart.
    this.width = 320;
    const observer = new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.draw(this.samples);
    });
    observer.observe(this.canvas);
  }

  /** Draw these samples; they end now. */
  draw(samples) {
    this.samples = samples;
    this.span = spanOf(samples);
    this.end = samples.at(-1)?.time ?? 0;
    const missing = this.series.every(({ figure }) => samples.every((sample) => sample.figures[figure] === undefined));
    const empty = this.series.every(({ figure }) => samples.every((sample) => !Number.isFinite(sample.figures[figure])));
    this.note.textContent = empty && samples.length ? (missing ? "Not reported by this server." : "Nothing yet.") : "";
    for (const [at, { figure }] of this.series.entries()) {
      this.values[at].entry.hidden = samples.every((sample) => sample.figures[figure] === undefined);
    }
    this.layers = this.series.map((_, at) => samples.map((sample) => this.heightOf(sample, at)));
    const steps = axisSteps(this.top ?? Math.max(0, ...this.layers.flat().filter(Number.isFinite)), this.unit === "count");
    this.highest = steps.at(-1);
    const lines = this.layers.flatMap((_, at) => this.line(at));
    this.pointer = svg("g", { class: "pointer" });
    this.canvas.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.canvas.replaceChildren(...this.axes(steps), ...lines, this.pointer);
    this.point(this.pointed);
  }

  /** Show the values at a time, or the latest for null. */
  point(time) {
    this.pointed = time;
    const at = time === null ? this.samples.length - 1 : this.nearest(time);
    const sample = this.samples[at];
    this.pointer?.replaceChildren(...(time === null || !sample ? [] : this.marks(sample, at)));
    this.moment.textContent = time === null || !sample ? "" : exactTime(sample.time);
    const shown = this.series.map(({ figure }) => FORMATS[this.unit](sample?.figures[figure]));
    for (const [series, text] of shown.entries()) this.values[series].value.textContent = text;
    const spoken = this.series.map(({ name }, series) => `${name} ${shown[series]}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.title}, ${this.axis}: ${this.moment.textContent || "now"} ${spoken}`);
  }

  x(time) {
    const { left, right } = MARGIN;
    return left + (this.width - left - right) * (1 - (this.end - time) / this.span);
  }

  y(value) {
    const { top, bottom } = MARGIN;
    return HEIGHT - bottom - (HEIGHT - top - bottom) * Math.min(1, value / this.highest);
  }

  heightOf(sample, at) {
    const values = this.series.slice(this.stacked ? 0 : at, at + 1).map(({ figure }) => sample.figures[figure]);
    const known = values.filter(Number.isFinite);
    return Number.isFinite(values.at(-1)) ? known.reduce((sum, value) => sum + value, 0) : NaN;
  }

  axes(steps) {
    const [left, right, low] = [MARGIN.left, this.width - MARGIN.right, HEIGHT - MARGIN.bottom];
    const parts = steps.flatMap((value) => {
      const y = this.y(value);
      const label = svg("text", { x: left - 8, y: y + 4, class: "y-label" }, value === 0 ? "0" : FORMATS[this.unit](value));
      return [svg("line", { x1: left, x2: right, y1: y, y2: y, class: value === 0 ? "axis-line" : "grid-line" }), label];
    });
    const step = SPANS[this.span];
    for (let time = Math.ceil((this.end - this.span) / step) * step; time <= this.end; time += step) {
      const x = this.x(time);
      if (x < left + 12 || x > right - 12) continue;
      const text = step < 60 ? exactTime(time) : timeOfDay(time);
      parts.push(svg("text", { x, y: low + 16, class: "x-label" }, text));
    }
    return parts;
  }

  /** A series, in pieces where samples are missing; a lone sample is a dot. */
  line(at) {
    const pieces = [];
    let open = false;
    for (const [i, { time }] of this.samples.entries()) {
      const value = this.layers[at][i];
      const gap = i > 0 && time - this.samples[i - 1].time > MAX_GAP;
      if (!Number.isFinite(value)) {
        open = false;
        continue;
      }
      if (gap || !open) pieces.push([]);
      open = true;
      const below = this.stacked && at > 0 ? this.layers[at - 1][i] : 0;
      pieces.at(-1).push({ x: fixed(this.x(time)), y: fixed(this.y(value)), low: fixed(this.y(below || 0)) });
    }
    const tone = `tone-${at + 1}`;
    const along = pieces.map((piece) => `M${piece.map(({ x, y }) => `${x} ${y}`).join("L")}${piece.length > 1 ? "" : "h0.01"}`);
    const stroke = svg("path", { d: along.join(""), class: `stroke ${tone}` });
    if (!this.stacked && this.series.length > 1) return [stroke];
    const around = pieces.map((piece, i) => `${along[i]}L${piece.toReversed().map(({ x, low }) => `${x} ${low}`).join("L")}Z`);
    return [svg("path", { d: around.join(""), class: `area ${tone}` }), stroke];
  }

  marks(sample, at) {
    const x = this.x(sample.time);
    const dots = this.series.flatMap((_, series) => {
      const value = this.layers[series][at];
      return Number.isFinite(value) ? [svg("circle", { cx: x, cy: this.y(value), r: 3.5, class: `dot tone-${series + 1}` })] : [];
    });
    return [svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }), ...dots];
  }

  timeAt(event) {
    const { left, right } = MARGIN;
    const part = (event.clientX - this.canvas.getBoundingClientRect().left - left) / (this.width - left - right);
    return this.end - this.span * (1 - part);
  }

  nearest(time) {
    let best = this.samples.length - 1;
    while (best > 0 && Math.abs(this.samples[best - 1].time - time) <= Math.abs(this.samples[best].time - time)) best -= 1;
    return best;
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.onpoint(null);
    if (!step || this.samples.length === 0) return;
    event.preventDefault();
    const from = this.pointed === null ? this.samples.length - 1 : this.nearest(this.pointed);
    this.onpoint(this.samples[Math.max(0, Math.min(this.samples.length - 1, from + step))].time);
  }
}

function fixed(value) {
  return value.toFixed(1);
}
