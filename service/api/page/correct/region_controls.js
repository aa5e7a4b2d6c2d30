/** Controls for the region in which every object is labeled: the whole stack, a box, marked planes, or none. */

import { button, element } from "../core/elements.js";
import { createWholeBox, describePlane, isMarked, togglePlane } from "../volumes/annotated_region.js";

/** @typedef {import("../volumes/annotated_region.js").Region} Region */
/** @typedef {import("./edit_tools.js").EditTools} EditTools */

/** @type {{kind: Region["kind"], text: string}[]} */
const CHOICES = [
  { kind: "whole", text: "The whole stack" },
  { kind: "box", text: "A box" },
  { kind: "planes", text: "Marked planes" },
  { kind: "objects", text: "Nowhere: only some objects are labeled" },
];

/** The controls for the region of the active tools. */
export class RegionControls {
  /** @param {() => EditTools | null} getTools returns the active tools */
  constructor(getTools) {
    this.getTools = getTools;
    this.radios = new Map(
      CHOICES.map(({ kind, text }) => {
        const onchange = () => this.#set({ kind });
        const input = element("input", { type: "radio", name: "annotated-region", value: kind, onchange });
        return [kind, { input, label: element("label", { class: "inline-label" }, input, text) }];
      }),
    );
    this.boxButton = button("Draw the box", () => this.getTools()?.activate("box"), "secondary");
    this.rangeInputs = ["Planes", "Rows", "Columns"].map((text, axis) => {
      const createInput = (/** @type {"low" | "high"} */ bound) =>
        element("input", {
          type: "number",
          min: "1",
          "aria-label": `${text}, ${bound === "low" ? "first" : "last"}`,
          onchange: () => this.#setBound(axis, bound),
        });
      return { text, low: createInput("low"), high: createInput("high") };
    });
    const removeBox = () => this.#set({ box: null, kind: this.region?.kind === "box" ? "whole" : "planes" });
    this.removeBoxButton = button("Remove the box", removeBox, "link");
    this.boxControls = element(
      "div",
      { class: "region-box" },
      element("div", { class: "row" }, this.boxButton, this.removeBoxButton),
      element(
        "div",
        { class: "part" },
        ...this.rangeInputs.flatMap(({ text, low, high }, axis) => [
          element("span", { class: "muted" }, `${text} (${"zyx"[axis]})`),
          low,
          "to",
          high,
        ]),
      ),
    );
    this.markButton = element("button", {
      type: "button",
      class: "secondary",
      "aria-keyshortcuts": "p",
      title: "Key P",
      onclick: () => this.#toggleCurrentPlane(),
    });
    this.planeList = element("ul", { class: "plane-list", "aria-label": "Marked planes" });
    this.planeControls = element(
      "div",
      { class: "region-planes" },
      element("div", { class: "row" }, this.markButton),
      this.planeList,
    );
    this.root = element(
      "fieldset",
      { class: "region" },
      element("legend", {}, "Every object is labeled in"),
      ...[...this.radios.values()].map(({ label }) => label),
      this.planeControls,
      this.boxControls,
    );
  }

  /** The region, or undefined if no labels are being edited. */
  get region() {
    return this.getTools()?.region.state;
  }

  /** @param {Partial<Region>} changes */
  #set(changes) {
    this.getTools()?.region.set(changes);
  }

  #toggleCurrentPlane() {
    const tools = this.getTools();
    if (tools) tools.region.set(togglePlane(tools.region.state, tools.currentPlane));
  }

  /** @param {number} axis @param {"low" | "high"} bound */
  #setBound(axis, bound) {
    const tools = this.getTools();
    if (tools === null) return;
    const { shape } = tools.editor.labels;
    const box = structuredClone(tools.region.state.box ?? createWholeBox(shape));
    const value = Math.round(Number(this.rangeInputs[axis][bound].value)) || 1;
    if (bound === "low") box.low[axis] = Math.max(0, Math.min(box.high[axis], value) - 1);
    else box.high[axis] = Math.max(box.low[axis] + 1, Math.min(shape[axis], value));
    this.#set({ box });
    this.update();
  }

  /** Show the region. */
  update() {
    const tools = this.getTools();
    if (tools === null) return;
    const { kind, box, planes } = tools.region.state;
    const { shape } = tools.editor.labels;
    for (const [choice, { input }] of this.radios) input.checked = choice === kind;
    this.boxControls.hidden = kind !== "box" && kind !== "planes";
    this.removeBoxButton.hidden = box === null;
    const { low, high } = box ?? createWholeBox(shape);
    for (const [axis, inputs] of this.rangeInputs.entries()) {
      inputs.low.value = String(low[axis] + 1);
      inputs.high.value = String(high[axis]);
      inputs.low.max = inputs.high.max = String(shape[axis]);
    }
    this.boxButton.textContent = box ? "Change the box" : kind === "planes" ? "Limit to a box" : "Draw the box";
    this.boxControls.lastElementChild?.toggleAttribute("hidden", box === null && kind === "planes");
    this.planeControls.hidden = kind !== "planes";
    this.#showPlanes(planes);
    this.updatePlane();
  }

  /** Show which plane the button marks. */
  updatePlane() {
    const tools = this.getTools();
    if (tools === null || this.planeControls.hidden) return;
    const plane = tools.currentPlane;
    const text = `${isMarked(tools.region.state, plane) ? "Unmark" : "Mark"} plane ${describePlane(plane)}`;
    if (this.markButton.textContent !== text) this.markButton.textContent = text;
  }

  /** @param {Region["planes"]} planes */
  #showPlanes(planes) {
    this.planeList.replaceChildren(
      ...planes.map((plane) => {
        const goToPlane = () => {
          const { viewer } = this.getTools() ?? {};
          viewer?.move(plane.axis, plane.at - viewer.scene.state.position[plane.axis]);
        };
        return element("li", {}, button(describePlane(plane), goToPlane, "quiet"));
      }),
    );
    if (planes.length === 0)
      this.planeList.replaceChildren(
        element("li", { class: "muted small" }, "Label every object of a plane, then mark the plane."),
      );
  }
}
