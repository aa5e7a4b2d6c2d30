/** The toolbar of the views: contrast and the display of the objects. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { adjustedLayer } from "./scene.js";

/** @typedef {import("./scene.js").Scene} Scene */

const SLIDER_STEPS = 1000;

export class DisplayTools {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    this.low = this.#contrastSlider("0", "Black level");
    this.high = this.#contrastSlider(String(SLIDER_STEPS), "White level");
    this.toggles = new Map(
      /** @type {["showObjects" | "filled" | "smooth", string][]} */ ([
        ["showObjects", "Objects"],
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
      this.toggles.get("showObjects"),
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
    /** Whether a slider is being moved. It is then not set from the scene. */
    this.isMovingSlider = false;
    this.#showState();
    scene.subscribe((previous) => {
      if (hasChanged(previous, scene.state, ["labels", "showObjects", "filled", "smooth"])) this.#showState();
      if (!this.isMovingSlider && hasChanged(previous, scene.state, ["contrast", "range", "overlays", "adjusted"]))
        this.#showContrast();
    });
  }

  /** @param {string} value @param {string} name */
  #contrastSlider(value, name) {
    const oninput = () => this.#setContrast();
    return element("input", { type: "range", min: "0", max: String(SLIDER_STEPS), value, "aria-label": name, oninput });
  }

  /** Set the contrast from the sliders. Their scale is quadratic, with more resolution for dark values. */
  #setContrast() {
    const { scene } = this;
    const { overlays, adjusted } = scene.state;
    const [min, max] = adjustedLayer(scene.state).range;
    const [low, high] = [this.low, this.high].map(
      (slider) => min + (Number(slider.value) / SLIDER_STEPS) ** 2 * (max - min),
    );
    /** @type {[number, number]} */
    const contrast = [low, Math.max(high, low + (max - min) / 1e4)];
    const adjustedOverlays = overlays.map((layer) => (layer.channel === adjusted ? { ...layer, contrast } : layer));
    this.isMovingSlider = true;
    scene.set(overlays.some(({ channel }) => channel === adjusted) ? { overlays: adjustedOverlays } : { contrast });
    this.isMovingSlider = false;
  }

  #showContrast() {
    const { range, contrast } = adjustedLayer(this.scene.state);
    const [min, max] = range;
    for (const [index, slider] of [this.low, this.high].entries())
      slider.value = String(Math.sqrt(Math.max(0, contrast[index] - min) / (max - min)) * SLIDER_STEPS);
  }

  #showState() {
    const { state } = this.scene;
    this.objectTools.hidden = state.labels === null;
    for (const [name, toggle] of this.toggles) toggle.setAttribute("aria-pressed", String(state[name]));
  }
}
