// The panel of settings, bound to the conversation that is shown. An empty field leaves the choice to the server.

import { readTools } from "./answer.js";
import { key } from "./api.js";
import { byId } from "./dom.js";
import { DEFAULTS } from "./store.js";

const TEXTS = ["system", "temperature", "top_p", "max_tokens", "seed", "effort", "tools"];
const field = (name) => byId(`set-${name}`);

/** `changed()` follows every change of `chat.settings`; `keyChanged()` one of the API key. */
export class Settings {
  constructor({ changed, keyChanged }) {
    this.chat = null;
    for (const name of TEXTS) {
      field(name).addEventListener("input", () => {
        this.chat.settings[name] = field(name).value;
        this.checkTools();
        changed();
      });
    }
    // The switch stands beside the message box, as it is used most.
    byId("thinking").addEventListener("click", () => {
      this.chat.settings.thinking = !this.chat.settings.thinking;
      this.showThinking();
      changed();
    });
    byId("reset").addEventListener("click", () => {
      this.chat.settings = { ...DEFAULTS, model: this.chat.settings.model };
      this.show(this.chat);
      changed();
    });
    field("key").value = key.get();
    field("key").addEventListener("change", () => {
      key.set(field("key").value.trim());
      keyChanged();
    });
  }

  /** What an empty field stands for; `defaults`: the server's sampling parameters, where the checkpoint names any. */
  showDefaults(defaults) {
    field("temperature").placeholder = defaults.temperature ?? 1;
    field("top_p").placeholder = defaults.top_p ?? 1;
    field("max_tokens").placeholder = defaults.max_tokens ?? "what the context has left";
    field("seed").placeholder = "random";
  }

  show(chat) {
    this.chat = chat;
    for (const name of TEXTS) field(name).value = chat.settings[name];
    this.showThinking();
    this.checkTools();
  }

  showThinking() {
    const { thinking } = this.chat.settings;
    byId("thinking").setAttribute("aria-pressed", String(thinking));
    field("effort").disabled = !thinking;
  }

  checkTools() {
    let wrong = "";
    try {
      if (this.chat.settings.tools.trim()) readTools(this.chat.settings.tools);
    } catch (error) {
      wrong = error.message;
    }
    byId("tools-error").textContent = wrong;
    field("tools").setAttribute("aria-invalid", String(wrong !== ""));
  }
}
