/** Toolbar of the views, with controls for the contrast and for the display of the objects. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { chooseContrast, getAdjustedLayer } from "./scene.js";

/** @typedef {import("./scene.js").Scene} Scene */

const SLIDER_STEPS = 1000;
/** Maximum number of decimal places of gray values. */
const MAX_DIGITS = 12;

/** The sliders and toggles of the toolbar. */
export class DisplayTools {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    this.lowSlider = this.#createContrastSlider("0", "Black level");
    this.highSlider = this.#createContrastSlider(String(SLIDER_STEPS), "White level");
    this.lowInput = this.#createContrastInput("Gray value shown as black");
    this.highInput = this.#createContrastInput("Gray value shown at full brightness");
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
        this.lowInput,
        this.highSlider,
        this.highInput,
        button("Auto", () => this.#chooseContrast(), "quiet"),
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

  /** @param {string} name */
  #createContrastInput(name) {
    const onchange = () => this.#setContrastFromInputs();
    return element("input", {
      type: "number",
      step: "any",
      class: "contrast-value",
      "aria-label": name,
      title: name,
      onchange,
    });
  }

  /** Set the contrast from the sliders. The scale of the sliders is quadratic, so that dark values can be set more precisely. */
  #setContrast() {
    const [min, max] = getAdjustedLayer(this.scene.state).range;
    const [low, high] = [this.lowSlider, this.highSlider].map(
      (slider) => min + (Number(slider.value) / SLIDER_STEPS) ** 2 * (max - min),
    );
    this.isMovingSlider = true;
    this.#changeContrast(low, high);
    this.isMovingSlider = false;
    this.#updateInputs();
  }

  /** Set the contrast from the typed gray values. An empty field leaves its value unchanged. */
  #setContrastFromInputs() {
    const { contrast } = getAdjustedLayer(this.scene.state);
    const [low, high] = [this.lowInput, this.highInput].map((input, index) =>
      input.value === "" ? contrast[index] : Number(input.value),
    );
    this.#changeContrast(low, high);
    this.#updateSliders();
  }

  /** Choose the contrast of the adjusted channel from its gray values. */
  #chooseContrast() {
    const { image } = getAdjustedLayer(this.scene.state);
    if (image) this.#changeContrast(...chooseContrast(image).contrast);
  }

  /** Set the contrast of the adjusted channel. @param {number} low @param {number} high gray values displayed as black and at full brightness */
  #changeContrast(low, high) {
    const { scene } = this;
    const { overlays, adjustedChannel } = scene.state;
    const [min, max] = getAdjustedLayer(scene.state).range;
    /** @type {[number, number]} */
    const contrast = [low, Math.max(high, low + (max - min) / 1e4)];
    const adjustedOverlays = overlays.map((layer) =>
      layer.channel === adjustedChannel ? { ...layer, contrast } : layer,
    );
    scene.set(
      overlays.some(({ channel }) => channel === adjustedChannel) ? { overlays: adjustedOverlays } : { contrast },
    );
  }

  #updateSliders() {
    const { range, contrast } = getAdjustedLayer(this.scene.state);
    const [min, max] = range;
    for (const [index, slider] of [this.lowSlider, this.highSlider].entries())
      slider.value = String(Math.sqrt(Math.max(0, contrast[index] - min) / (max - min)) * SLIDER_STEPS);
    this.#updateInputs();
  }

  #updateInputs() {
    const { image, contrast, range } = getAdjustedLayer(this.scene.state);
    const isInteger = image !== null && !(image.data instanceof Float32Array || image.data instanceof Float64Array);
    // Rounded, so that the fields show only digits that matter for the display.
    const digits = isInteger ? 0 : Math.max(0, Math.ceil(3 - Math.log10(range[1] - range[0])));
    for (const [index, input] of [this.lowInput, this.highInput].entries())
      input.value = String(Number(contrast[index].toFixed(Math.min(digits, MAX_DIGITS))));
  }

  #updateToggles() {
    const { state } = this.scene;
    this.objectTools.hidden = state.labels === null;
    for (const [name, toggle] of this.toggles) toggle.setAttribute("aria-pressed", String(state[name]));
  }
}
