// A clock that a test turns by hand, put into a page before its own scripts. Short delays stay real.

const realTimeout = window.setTimeout.bind(window);
const waiting = [];

window.clock = {
  now: Date.UTC(2026, 0, 5, 12, 0, 0),
  /** Let `count` times `seconds` go by; each time, what is due runs and its requests are answered. */
  async turn(count, seconds = 1) {
    for (let i = 0; i < count; i += 1) {
      this.now += seconds * 1000;
      const due = waiting.splice(0).map((one) => one());
      await Promise.all(due);
    }
  },
};
Date.now = () => window.clock.now;
performance.now = () => window.clock.now;
window.setTimeout = (run, delay = 0, ...more) => {
  if (delay < 200) return realTimeout(run, delay, ...more);
  waiting.push(run);
  return waiting.length;
};
window.clearTimeout = () => waiting.splice(0);
