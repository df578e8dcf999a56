// Numbers as people read them, and round numbers for axes.

const small = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const large = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const short = { format: (value) => (value < 10000 ? small : large).format(value) };
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const exactClock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hourCycle: "h23" });

/** How a unit's values are written; "–" for none. */
export const FORMATS = {
  count: known((value) => short.format(value)),
  rate: known((value) => short.format(value)),
  share: known((value) => `${short.format(value * 100)} %`),
  seconds: known((value) => (value < 1 ? `${short.format(value * 1000)} ms` : `${short.format(value)} s`)),
};

export const timeOfDay = (time) => clock.format(time * 1000);
export const exactTime = (time) => exactClock.format(time * 1000);

/** At most five round steps from 0 that reach `highest`: their values, the last at or above it. */
export function axisSteps(highest, whole = false) {
  const reached = highest > 0 ? highest : 1;
  const rough = reached / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const nice = [1, 2, 2.5, 5, 10].find((step) => step * power >= rough * 0.999) * power;
  const step = whole ? Math.max(1, Math.ceil(nice)) : nice;
  return Array.from({ length: Math.ceil((reached / step) * 0.9999) + 1 }, (_, i) => i * step);
}

function known(format) {
  return (value) => (Number.isFinite(value) ? format(value) : "–");
}
