/** Controls that delete objects by size, by confidence, or at the border of the stack. They show the affected objects before they are deleted. */

import { button, element, field } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { findBorderObjects } from "../volumes/border_objects.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */

/** Index into `COLORS` of the objects that would be deleted; the others are gray. */
const MATCH_COLOR_INDEX = 1;
/** Number of additional ids with a color, for objects that are added while the objects are shown. */
const RESERVED_IDS = 4096;

/** The controls for the labels of the active tools. */
export class BulkDelete {
  /** @param {() => EditTools | null} getTools returns the active tools */
  constructor(getTools) {
    this.getTools = getTools;
    /** Confidences by id. @type {Map<number, number>} */
    this.confidences = new Map();
    const createInput = (/** @type {string} */ placeholder, /** @type {Record<string, string>} */ limits) =>
      element("input", { type: "number", min: "0", step: "any", placeholder, ...limits, oninput: () => this.update() });
    this.minInput = createInput("any size", {});
    this.maxInput = createInput("any size", {});
    this.confidenceInput = createInput("any confidence", { max: "100" });
    this.confidenceField = field("Confidence below, in %", this.confidenceInput);
    this.borderCheckbox = element("input", { type: "checkbox", onchange: () => this.update() });
    this.unitText = element("p", { class: "muted small" });
    this.text = element("p", { class: "muted small", role: "status" });
    this.deleteButton = button("Delete", () => this.#delete(), "secondary");
    this.summary = element("summary");
    this.root = element(
      "details",
      { class: "bulk-delete small", ontoggle: () => this.update() },
      this.summary,
      element(
        "div",
        { class: "bulk-fields" },
        field("Smaller than", this.minInput),
        field("Larger than", this.maxInput),
        this.confidenceField,
      ),
      this.unitText,
      element("label", { class: "inline-label" }, this.borderCheckbox, "Touching the border of the stack"),
      this.text,
      this.deleteButton,
    );
  }

  /** Show the controls for other labels. @param {Map<number, number>} confidences by id */
  reset(confidences) {
    this.confidences = confidences;
    this.confidenceField.hidden = confidences.size === 0;
    const isCalibrated = this.getTools()?.viewer.scene.state.isCalibrated;
    this.unitText.textContent = `Sizes are volumes in ${isCalibrated ? "µm³" : "voxels"}.`;
    this.summary.textContent = confidences.size ? "Delete by size, confidence or border" : "Delete by size or border";
    this.borderCheckbox.checked = false;
    for (const input of [this.minInput, this.maxInput, this.confidenceInput]) input.value = "";
    this.update();
  }

  /** Find the objects that match the limits. @returns {number[]} ids */
  #findMatches() {
    const tools = this.getTools();
    if (tools === null || !this.root.open) return [];
    const [min, max, confidence] = [this.minInput, this.maxInput, this.confidenceInput].map(({ value }) =>
      value === "" ? null : Number(value),
    );
    const [z, y, x] = tools.editor.voxelSize;
    const voxelVolume = tools.viewer.scene.state.isCalibrated ? z * y * x : 1;
    const borderIds = this.borderCheckbox.checked ? findBorderObjects(tools.editor.labels) : new Set();
    return [...tools.editor.objects].flatMap(([id, { voxelCount }]) => {
      const volume = voxelCount * voxelVolume;
      const isMatch =
        (min !== null && volume < min) ||
        (max !== null && volume > max) ||
        borderIds.has(id) ||
        (confidence !== null && 100 * (this.confidences.get(id) ?? Infinity) < confidence);
      return isMatch ? [id] : [];
    });
  }

  /** Show the objects that match. */
  update() {
    const tools = this.getTools();
    if (tools === null) return;
    const ids = this.#findMatches();
    const { scene } = tools.viewer;
    if (ids.length > 0) {
      const colorIndices = new Uint8Array(tools.editor.maxId + RESERVED_IDS);
      for (const id of ids) colorIndices[id] = MATCH_COLOR_INDEX;
      scene.set({ colorIndices });
    } else if (scene.state.colorIndices !== null) scene.set({ colorIndices: null });
    this.deleteButton.disabled = ids.length === 0;
    this.deleteButton.textContent = ids.length ? `Delete ${formatCount(ids.length, "object")}` : "Delete";
    this.text.textContent = `${ids.length} of ${formatCount(tools.editor.objects.size, "object")} match${ids.length === 1 ? "es" : ""}${ids.length ? " and are shown in red" : ""}.`;
  }

  #delete() {
    const tools = this.getTools();
    const ids = this.#findMatches();
    if (tools === null || ids.length === 0) return;
    tools.deleteObjects(ids);
    this.update();
  }
}
