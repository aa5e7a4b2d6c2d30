/** The panel for correcting labels: tools, brush options, undo history, and export of the corrected labels. */

import { button, element, shortcutList } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";
import { cssColor } from "../volumes/slices.js";
import { BrushOptions } from "./brush_options.js";
import { TOOLS } from "./tool_list.js";

/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../volumes/label_edit.js").Kind} Kind */
/** @typedef {import("./edit_tools.js").EditTools} EditTools */
/** @typedef {"ome.tif" | "npy" | "csv"} FileKind */
/**
 * @typedef {object} Actions
 * @property {(direction: "undo" | "redo") => void} undoOrRedo
 * @property {() => unknown} annotate save the labels as an annotated stack
 * @property {() => unknown} improve train a model with the corrected labels
 * @property {(kind: FileKind) => void} save
 * @property {() => unknown} discard discard all corrections
 */

/** @type {Record<Kind, string>} */
const PARTICIPLES = {
  merge: "merged",
  split: "split",
  delete: "deleted",
  add: "outlined",
  paint: "painted",
  erase: "erased",
};

const KEYS = [
  ["Shift + arrow keys", "move the crosshair"],
  ["Enter", "apply the tool at the crosshair"],
  ["C", "close the outline"],
  ["Delete", "delete the selected object"],
  ["[ and ]", "decrease or increase the brush size"],
  ["Esc", "cancel the current action"],
];

export class CorrectPanel {
  /** @param {Actions} actions @param {import("openapi").Abilities} abilities of the service */
  constructor(actions, abilities) {
    this.actions = actions;
    this.abilities = abilities;
    /** The tools that the buttons control, null if labels are not being corrected. @type {EditTools | null} */
    this.tools = null;
    this.hint = element("p", { class: "hint", role: "status" });
    this.summary = element("p", { class: "muted small", role: "status" });
    this.dot = element("span", { class: "dot" });
    this.selected = element("span");
    this.annotated = element("p", { class: "muted small" });
    this.otherBrowserWarning = element("p", { class: "warning-text", role: "status", hidden: true });
    this.undo = button("Undo", () => actions.undoOrRedo("undo"), "secondary");
    this.redo = button("Redo", () => actions.undoOrRedo("redo"), "secondary");
    this.undo.title = "Ctrl + Z";
    this.redo.title = "Ctrl + Shift + Z";
    this.buttons = new Map(
      TOOLS.map(({ name, text, key }) => [
        name,
        element(
          "button",
          {
            type: "button",
            class: "tool",
            "aria-keyshortcuts": key,
            title: `Key ${key.toUpperCase()}`,
            onclick: () => this.tools?.use(name),
          },
          text,
        ),
      ]),
    );
    this.options = new BrushOptions(() => this.tools);
    this.root = element("div", { class: "correct" });
  }

  /** Show why the labels cannot be corrected. @param {string} text */
  showError(text) {
    this.root.replaceChildren(element("p", { class: "warning-text" }, text));
  }

  /** Show that the labels are being prepared. @param {string} text */
  showProgress(text) {
    this.root.replaceChildren(element("p", { class: "muted", role: "status" }, text));
  }

  /** Show why correcting is paused, and a button to start. @param {string} text @param {string} name of the button @param {() => unknown} action */
  showStartButton(text, name, action) {
    this.root.replaceChildren(element("p", { role: "status" }, text), button(name, action, "primary"));
  }

  /** @param {string} text */
  showHint(text) {
    this.hint.textContent = text;
  }

  /** Show the tools. @param {string} introduction describes which labels are corrected */
  show(introduction) {
    this.root.replaceChildren(
      this.otherBrowserWarning,
      element("p", { class: "muted small" }, introduction),
      element("div", { class: "tool-list", role: "group", "aria-label": "Tools" }, ...this.buttons.values()),
      this.hint,
      element("p", { class: "selected-object" }, this.dot, this.selected),
      this.options.root,
      element("div", { class: "row tight" }, this.undo, this.redo, this.summary),
      element("details", { class: "small" }, element("summary", {}, "Keyboard shortcuts"), shortcutList(KEYS)),
      ...this.#exportButtons(),
    );
  }

  #exportButtons() {
    const { actions, abilities } = this;
    return [
      element("h3", {}, "Corrected labels"),
      element(
        "div",
        { class: "row" },
        abilities.corrections && button("Save as annotated stack", actions.annotate, "primary"),
        button("OME-TIFF", () => actions.save("ome.tif"), "secondary"),
        button("NumPy", () => actions.save("npy"), "secondary"),
        button("Table", () => actions.save("csv"), "secondary"),
        abilities.training && button("Improve the model", actions.improve, "secondary"),
      ),
      element(
        "p",
        { class: "muted small", hidden: !abilities.corrections || abilities.training_problem === null },
        `Training is not available: ${abilities.training_problem}`,
      ),
      this.annotated,
      button("Discard all corrections", actions.discard, "link"),
    ];
  }

  /** Show the active tool and its options. */
  describeTool() {
    const { tools } = this;
    if (tools === null) return;
    for (const [name, tool] of this.buttons) tool.setAttribute("aria-pressed", String(name === tools.tool));
    this.options.describe(tools);
  }

  /** Show the selected object. @param {LabelEditor} editor @param {import("../viewer/scene.js").SceneState} state */
  describeSelected(editor, { selected, isCalibrated }) {
    const extent = editor.objects.get(selected);
    const [z, y, x] = editor.voxel;
    this.dot.hidden = extent === undefined;
    this.dot.style.background = cssColor(selected);
    const volume = isCalibrated ? `, ${formatNumber((extent?.voxels ?? 0) * z * y * x)} µm³` : "";
    const text = extent
      ? `Object ${selected} selected: ${formatCount(extent.voxels, "voxel")}${volume}`
      : "No object selected.";
    if (this.selected.textContent !== text) this.selected.textContent = text;
  }

  /** Show the number of objects and corrections. @param {LabelEditor} editor */
  showCounts(editor) {
    this.undo.disabled = editor.done.length === 0;
    this.redo.disabled = editor.undone.length === 0;
    const parts = [...editor.counts()].map(([kind, count]) => `${count} ${PARTICIPLES[kind]}`);
    const corrections = parts.length ? ` · ${parts.join(", ")}` : ", no corrections";
    this.summary.textContent = formatCount(editor.objects.size, "object") + corrections;
  }

  /** @param {"undo" | "redo"} direction @param {Kind} kind of the correction */
  showUndoneOrRedone(direction, kind) {
    this.showHint(`${direction === "undo" ? "Undone" : "Redone"}: ${PARTICIPLES[kind]}.`);
  }

  /** Show the annotated stacks created from the result. @param {string} all @param {string} fromOtherBrowsers */
  describeAnnotated(all, fromOtherBrowsers) {
    this.otherBrowserWarning.hidden = fromOtherBrowsers === "";
    this.otherBrowserWarning.textContent = `This result was also corrected in another browser and saved as annotated stack ${fromOtherBrowsers}. Those corrections are not shown here. Your own corrections are separate.`;
    this.annotated.textContent = all ? `Saved as annotated stack ${all}.` : "";
  }
}
