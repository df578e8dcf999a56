// What tests ask of a whole page. Each probe gives a list of complaints.

/** Visible elements that reach beyond a screen of this width, or are too small to hit with a finger. */
window.misfits = (screenWidth, minTarget) => {
  const wrong = [];
  for (const one of document.querySelectorAll("button, input, select, textarea, a, summary, p, h1, h2, pre, form, .card")) {
    const { left, right, width, height } = one.getBoundingClientRect();
    const scrolls = one.closest(".table, .figures") ?? one.closest("pre")?.parentElement;
    if (!one.checkVisibility() || one.closest(".visually-hidden, .skip") || width === 0) continue;
    const shown = one.outerHTML.slice(0, 80);
    if (!scrolls && (left < 0 || right > screenWidth + 0.5)) wrong.push(`${shown} from ${left} to ${right}`);
    const inline = one.tagName === "A" && one.closest(".markdown, .error");
    const control = one.matches("button, input, select, textarea, a, summary") && !inline;
    if (control && Math.min(width, height) < minTarget) wrong.push(`${shown} is ${width} x ${height}`);
  }
  const { scrollWidth } = document.documentElement;
  if (scrollWidth > screenWidth) wrong.push(`the page is ${scrollWidth} wide`);
  return wrong;
};

/** Text whose colour is too close to what lies behind it, and how many texts there are. */
window.faint = (minContrast) => {
  const wrong = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim();
    const element = texts.currentNode.parentElement;
    const skipped = element.closest(":disabled, .visually-hidden, script, noscript");
    if (!text || !element.checkVisibility() || skipped) continue;
    const style = getComputedStyle(element);
    const luminances = [color(element.closest("svg") ? style.fill : style.color), behind(element)].map(luminance);
    const contrast = (Math.max(...luminances) + 0.05) / (Math.min(...luminances) + 0.05);
    count += 1;
    if (contrast < minContrast) wrong.add(`${contrast.toFixed(2)} ${element.tagName}.${element.className}: ${text.slice(0, 40)}`);
  }
  return { count, wrong: [...wrong] };
};

const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

/** Red, green, blue, alpha of 0 to 255, of a colour in any notation. */
function color(notation) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = notation;
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
}

function behind(element) {
  for (let one = element; one; one = one.parentElement) {
    const found = color(getComputedStyle(one).backgroundColor);
    if (found[3] === 255) return found;
  }
  return color("white");
}

// Relative luminance, WCAG 2.2.
function luminance(parts) {
  const [r, g, b] = Array.from(parts, (part) => part / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
