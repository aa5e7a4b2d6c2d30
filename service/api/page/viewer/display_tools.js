/** The toolbar of the views: contrast, and the look of the objects. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { adjustedLayer } from "./scene.js";

/** @typedef {import("./scene.js").Scene} Scene */

const SLIDER_STEPS = 1000;

export class DisplayTools {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    this.low = this.#contrastSlider("0", "Darkest grey value");
    this.high = this.#contrastSlider(String(SLIDER_STEPS), "Brightest grey value");
    this.toggles = new Map(
      /** @type {["shown" | "filled" | "smooth", string][]} */ ([
        ["shown", "Objects"],
        ["filled", "Filled"],
        ["smooth", "Smooth"],
      ]).map(([name, text]) => [name, button(text, () => scene.set({ [name]: !scene.state[name] }), "quiet toggle")]),
    );
    const opacity = element("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "0.05",
      value: String(scene.state.opacity),
      "aria-label": "Opacity of the objects",
      oninput: () => scene.set({ opacity: Number(opacity.value) }),
    });
    this.objectTools = element(
      "div",
      { class: "tools", hidden: true },
      this.toggles.get("shown"),
      this.toggles.get("filled"),
      element("label", { class: "slim" }, "Opacity", opacity),
    );
    this.root = element(
      "div",
      { class: "toolbar", role: "toolbar", "aria-label": "Display" },
      element(
        "div",
        { class: "tools" },
        element("label", { class: "slim" }, "Contrast", this.low),
        this.high,
        this.toggles.get("smooth"),
      ),
      this.objectTools,
    );
    /** Whether a slider is being dragged: it stays where it is put. */
    this.dragged = false;
    this.#showState();
    scene.subscribe((before) => {
      if (hasChanged(before, scene.state, ["labels", "shown", "filled", "smooth"])) this.#showState();
      if (!this.dragged && hasChanged(before, scene.state, ["contrast", "range", "overlays", "adjusted"]))
        this.#showContrast();
    });
  }

  /** @param {string} value @param {string} name */
  #contrastSlider(value, name) {
    const oninput = () => this.#setContrast();
    return element("input", { type: "range", min: "0", max: String(SLIDER_STEPS), value, "aria-label": name, oninput });
  }

  /** Dark grey values have more of the sliders than bright ones. */
  #setContrast() {
    const { scene } = this;
    const { overlays, adjusted } = scene.state;
    const [least, most] = adjustedLayer(scene.state).range;
    const [low, high] = [this.low, this.high].map(
      (slider) => least + (Number(slider.value) / SLIDER_STEPS) ** 2 * (most - least),
    );
    /** @type {[number, number]} */
    const contrast = [low, Math.max(high, low + (most - least) / 1e4)];
    const change = overlays.map((layer) => (layer.channel === adjusted ? { ...layer, contrast } : layer));
    this.dragged = true;
    scene.set(overlays.some(({ channel }) => channel === adjusted) ? { overlays: change } : { contrast });
    this.dragged = false;
  }

  #showContrast() {
    const { range, contrast } = adjustedLayer(this.scene.state);
    const [least, most] = range;
    for (const [place, slider] of [this.low, this.high].entries())
      slider.value = String(Math.sqrt(Math.max(0, contrast[place] - least) / (most - least)) * SLIDER_STEPS);
  }

  #showState() {
    const { state } = this.scene;
    this.objectTools.hidden = state.labels === null;
    for (const [name, toggle] of this.toggles) toggle.setAttribute("aria-pressed", String(state[name]));
  }
}
