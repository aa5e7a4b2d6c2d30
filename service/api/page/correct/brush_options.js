/** Options of the brush and the eraser. */

import { element } from "../core/elements.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */

/** Slider steps that double the radius. */
const STEPS_PER_DOUBLING = 12;

export class BrushOptions {
  /** @param {() => EditTools | null} tools returns the active tools */
  constructor(tools) {
    const setBrush = (/** @type {Partial<import("./brush.js").Brush>} */ options) =>
      Object.assign(tools()?.brush ?? {}, options);
    this.radius = element("input", {
      type: "range",
      min: "0",
      max: "100",
      "aria-label": "Brush size",
      title: "Keys [ and ]",
      oninput: () => {
        const brush = tools()?.brush;
        const factor = 2 ** (Number(this.radius.value) / STEPS_PER_DOUBLING);
        if (brush) tools()?.resize(factor / (brush.radius / brush.minRadius));
      },
    });
    const ball = element("input", {
      type: "checkbox",
      checked: true,
      onchange: () => setBrush({ ball: ball.checked }),
    });
    const overwrite = element("input", {
      type: "checkbox",
      onchange: () => setBrush({ overwrite: overwrite.checked }),
    });
    /** @param {"new" | "selected"} value @param {string} text */
    const targetOption = (value, text) => {
      const onchange = () => setBrush({ backgroundTarget: value });
      const properties = { type: "radio", name: "background-target", value, checked: value === "new", onchange };
      return element("label", { class: "slim" }, element("input", properties), text);
    };
    this.targetOptions = element(
      "fieldset",
      { class: "background-target" },
      element("legend", {}, "Strokes on the background"),
      targetOption("new", "Create a new object"),
      targetOption("selected", "Add to the selected object"),
    );
    this.root = element(
      "div",
      { class: "brush" },
      this.targetOptions,
      element("label", { class: "slim" }, "Size", this.radius),
      element("label", { class: "slim" }, ball, "Paint across planes"),
      element("label", { class: "slim" }, overwrite, "Paint over other objects"),
    );
  }

  /** @param {EditTools} tools */
  describe({ tool, brush }) {
    this.root.hidden = tool !== "paint" && tool !== "erase";
    this.targetOptions.hidden = tool !== "paint";
    for (const input of this.targetOptions.querySelectorAll("input"))
      input.checked = input.value === brush.backgroundTarget;
    this.radius.value = String(STEPS_PER_DOUBLING * Math.log2(brush.radius / brush.minRadius));
  }
}
