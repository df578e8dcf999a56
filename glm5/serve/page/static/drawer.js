// A side panel: a column where there is room, an overlay that takes the focus where there is not.

import { byId } from "./dom.js";

const WIDE = { sidebar: "(min-width: 56rem)", settings: "(min-width: 75rem)" };
const STAY = ["shade", "live"];

export class Drawer {
  /** `id`: the panel, which the button `${id}-button` opens and closes. */
  constructor(id, { open = false } = {}) {
    this.id = id;
    this.panel = byId(id);
    this.button = byId(`${id}-button`);
    this.wide = matchMedia(WIDE[id]);
    this.wide.addEventListener("change", () => this.set(this.wide.matches && open));
    this.button.addEventListener("click", () => this.set(!this.isOpen, { focus: true }));
    byId(`${id}-close`).addEventListener("click", () => this.set(false, { focus: true }));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOverlay) {
        event.stopPropagation();
        this.set(false, { focus: true });
      }
    });
    byId("shade").addEventListener("click", () => this.isOverlay && this.set(false, { focus: true }));
    this.set(this.wide.matches && open);
  }

  get isOverlay() {
    return this.isOpen && !this.wide.matches;
  }

  set(isOpen, { focus = false } = {}) {
    this.isOpen = isOpen;
    this.panel.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", String(isOpen));
    // What lies under an overlay can be neither focused nor read.
    for (const other of document.body.children) {
      if (other !== this.panel && !STAY.includes(other.id)) other.inert = this.isOverlay;
    }
    byId("shade").hidden = !this.isOverlay;
    if (focus) (isOpen ? this.panel.querySelector("button, input, select, textarea") : this.button).focus();
  }
}
