/** Options of the brush and the eraser. */

import { element } from "../core/elements.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */

/** Positions of the slider for a radius that is twice as large. */
const STEPS_PER_DOUBLING = 12;

export class BrushOptions {
  /** @param {() => EditTools | null} tools that are used */
  constructor(tools) {
    const setBrush = (/** @type {Partial<import("./brush.js").Brush>} */ options) =>
      Object.assign(tools()?.brush ?? {}, options);
    this.radius = element("input", {
      type: "range",
      min: "0",
      max: "100",
      "aria-label": "Size of the brush",
      title: "Keys [ and ]",
      oninput: () => {
        const brush = tools()?.brush;
        const wanted = 2 ** (Number(this.radius.value) / STEPS_PER_DOUBLING);
        if (brush) tools()?.resize(wanted / (brush.radius / brush.least));
      },
    });
    const ball = element("input", {
      type: "checkbox",
      checked: true,
      onchange: () => setBrush({ ball: ball.checked }),
    });
    const over = element("input", { type: "checkbox", onchange: () => setBrush({ over: over.checked }) });
    /** @param {"new" | "chosen"} value @param {string} text */
    const ground = (value, text) => {
      const onchange = () => setBrush({ ground: value });
      const input = element("input", { type: "radio", name: "ground", value, checked: value === "new", onchange });
      return element("label", { class: "slim" }, input, text);
    };
    this.ground = element(
      "fieldset",
      { class: "ground" },
      element("legend", {}, "On empty ground"),
      ground("new", "New object"),
      ground("chosen", "Add to chosen one"),
    );
    this.root = element(
      "div",
      { class: "brush" },
      this.ground,
      element("label", { class: "slim" }, "Size", this.radius),
      element("label", { class: "slim" }, ball, "Through planes"),
      element("label", { class: "slim" }, over, "Over other objects"),
    );
  }

  /** @param {EditTools} tools */
  describe({ tool, brush }) {
    this.root.hidden = tool !== "paint" && tool !== "erase";
    this.ground.hidden = tool !== "paint";
    for (const input of this.ground.querySelectorAll("input")) input.checked = input.value === brush.ground;
    this.radius.value = String(STEPS_PER_DOUBLING * Math.log2(brush.radius / brush.least));
  }
}
