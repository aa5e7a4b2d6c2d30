/** Toolbar of the views, with controls for the contrast and for the display of the objects. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { getAdjustedLayer } from "./scene.js";

/** @typedef {import("./scene.js").Scene} Scene */

const SLIDER_STEPS = 1000;

/** The sliders and toggles of the toolbar. */
export class DisplayTools {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    this.lowSlider = this.#createContrastSlider("0", "Black level");
    this.highSlider = this.#createContrastSlider(String(SLIDER_STEPS), "White level");
    this.toggles = new Map(
      /** @type {["showObjects" | "fillObjects" | "isSmooth", string][]} */ ([
        ["showObjects", "Objects"],
        ["fillObjects", "Filled"],
        ["isSmooth", "Smooth"],
      ]).map(([name, text]) => [name, button(text, () => scene.set({ [name]: !scene.state[name] }), "quiet toggle")]),
    );
    const opacitySlider = element("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "0.05",
      value: String(scene.state.opacity),
      "aria-label": "Opacity of the objects",
      oninput: () => scene.set({ opacity: Number(opacitySlider.value) }),
    });
    this.objectTools = element(
      "div",
      { class: "tools", hidden: true },
      this.toggles.get("showObjects"),
      this.toggles.get("fillObjects"),
      element("label", { class: "inline-label" }, "Opacity", opacitySlider),
    );
    this.root = element(
      "div",
      { class: "toolbar", role: "toolbar", "aria-label": "Display" },
      element(
        "div",
        { class: "tools" },
        element("label", { class: "inline-label" }, "Contrast", this.lowSlider),
        this.highSlider,
        this.toggles.get("isSmooth"),
      ),
      this.objectTools,
    );
    /** Whether the user is moving a slider. While this is true, changes to the scene do not update the sliders. */
    this.isMovingSlider = false;
    this.#updateToggles();
    scene.subscribe((previousState) => {
      if (hasChanged(previousState, scene.state, ["labels", "showObjects", "fillObjects", "isSmooth"]))
        this.#updateToggles();
      if (
        !this.isMovingSlider &&
        hasChanged(previousState, scene.state, ["contrast", "range", "overlays", "adjustedChannel"])
      )
        this.#updateSliders();
    });
  }

  /** @param {string} value @param {string} name */
  #createContrastSlider(value, name) {
    const oninput = () => this.#setContrast();
    return element("input", { type: "range", min: "0", max: String(SLIDER_STEPS), value, "aria-label": name, oninput });
  }

  /** Set the contrast from the sliders. The scale of the sliders is quadratic, so that dark values can be set more precisely. */
  #setContrast() {
    const { scene } = this;
    const { overlays, adjustedChannel } = scene.state;
    const [min, max] = getAdjustedLayer(scene.state).range;
    const [low, high] = [this.lowSlider, this.highSlider].map(
      (slider) => min + (Number(slider.value) / SLIDER_STEPS) ** 2 * (max - min),
    );
    /** @type {[number, number]} */
    const contrast = [low, Math.max(high, low + (max - min) / 1e4)];
    const adjustedOverlays = overlays.map((layer) =>
      layer.channel === adjustedChannel ? { ...layer, contrast } : layer,
    );
    this.isMovingSlider = true;
    scene.set(
      overlays.some(({ channel }) => channel === adjustedChannel) ? { overlays: adjustedOverlays } : { contrast },
    );
    this.isMovingSlider = false;
  }

  #updateSliders() {
    const { range, contrast } = getAdjustedLayer(this.scene.state);
    const [min, max] = range;
    for (const [index, slider] of [this.lowSlider, this.highSlider].entries())
      slider.value = String(Math.sqrt(Math.max(0, contrast[index] - min) / (max - min)) * SLIDER_STEPS);
  }

  #updateToggles() {
    const { state } = this.scene;
    this.objectTools.hidden = state.labels === null;
    for (const [name, toggle] of this.toggles) toggle.setAttribute("aria-pressed", String(state[name]));
  }
}
