/** Controls for the options of the brush and the eraser. */

import { element } from "../core/elements.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */

/** Number of slider steps per doubling of the radius. */
const STEPS_PER_DOUBLING = 12;

/** The controls for the brush size, the brush shape, and the objects that strokes change. */
export class BrushControls {
  /** @param {() => EditTools | null} getTools returns the active tools */
  constructor(getTools) {
    const setBrush = (/** @type {Partial<import("./brush.js").Brush>} */ options) =>
      Object.assign(getTools()?.brush ?? {}, options);
    this.radiusSlider = element("input", {
      type: "range",
      min: "0",
      max: "100",
      "aria-label": "Brush size",
      title: "Keys [ and ]",
      oninput: () => {
        const brush = getTools()?.brush;
        const factor = 2 ** (Number(this.radiusSlider.value) / STEPS_PER_DOUBLING);
        if (brush) getTools()?.resizeBrush(factor / (brush.radius / brush.minRadius));
      },
    });
    this.sphereCheckbox = element("input", {
      type: "checkbox",
      onchange: () => setBrush({ isSpherical: this.sphereCheckbox.checked }),
    });
    const overwriteCheckbox = element("input", {
      type: "checkbox",
      onchange: () => setBrush({ isOverwriting: overwriteCheckbox.checked }),
    });
    /** @param {"new" | "selected"} value @param {string} text */
    const createTargetOption = (value, text) => {
      const onchange = () => setBrush({ backgroundTarget: value });
      const properties = { type: "radio", name: "background-target", value, checked: value === "new", onchange };
      return element("label", { class: "inline-label" }, element("input", properties), text);
    };
    this.targetOptions = element(
      "fieldset",
      { class: "background-target" },
      element("legend", {}, "Strokes and outlines on the background"),
      createTargetOption("new", "Create a new object"),
      createTargetOption("selected", "Add to the selected object"),
    );
    this.strokeOptions = element(
      "div",
      { class: "brush" },
      element("label", { class: "inline-label" }, "Size", this.radiusSlider),
      element("label", { class: "inline-label" }, this.sphereCheckbox, "Paint across planes"),
      element("label", { class: "inline-label" }, overwriteCheckbox, "Paint over other objects"),
    );
    this.root = element("div", { class: "brush" }, this.targetOptions, this.strokeOptions);
  }

  /** Show the brush options of the active tool. @param {EditTools} tools */
  update({ tool, brush }) {
    this.strokeOptions.hidden = tool !== "paint" && tool !== "erase";
    this.targetOptions.hidden = tool !== "paint" && tool !== "add";
    this.root.hidden = this.strokeOptions.hidden && this.targetOptions.hidden;
    this.sphereCheckbox.checked = brush.isSpherical;
    for (const input of this.targetOptions.querySelectorAll("input"))
      input.checked = input.value === brush.backgroundTarget;
    this.radiusSlider.value = String(STEPS_PER_DOUBLING * Math.log2(brush.radius / brush.minRadius));
  }
}
