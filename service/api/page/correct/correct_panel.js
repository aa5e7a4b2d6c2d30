/** Panel for editing labels, with tools, brush options, undo and redo, the annotated region, and export of the labels. */

import { button, createShortcutList, element, formatMessage } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";
import { getCssColor } from "../volumes/label_colors.js";
import { BrushControls } from "./brush_controls.js";
import { BulkDelete } from "./bulk_delete.js";
import { RegionControls } from "./region_controls.js";
import { SuggestionControls } from "./suggestions.js";
import { TOOLS } from "./tool_list.js";

/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../volumes/label_edit.js").EditKind} EditKind */
/** @typedef {import("./edit_tools.js").EditTools} EditTools */
/** @typedef {"ome.tif" | "nii.gz" | "npy" | "csv"} FileKind */
/**
 * @typedef {object} Actions
 * @property {(direction: "undo" | "redo") => void} undoOrRedo
 * @property {() => unknown} annotate saves the labels as an annotated stack
 * @property {() => unknown} train trains a model on the corrected labels
 * @property {(kind: FileKind) => void} save saves the labels or their table as a file
 * @property {() => unknown} discard discards all corrections
 */

/** Past participle for each kind of correction, as in "3 merged". @type {Record<EditKind, string>} */
const PARTICIPLES = {
  merge: "merged",
  split: "split",
  delete: "deleted",
  add: "outlined",
  paint: "painted",
  erase: "erased",
  fill: "filled",
  accept: "accepted",
  open: "loaded from the server",
};

/** Noun for each kind of correction, as in "Undid the merge". @type {Record<EditKind, string>} */
const NOUNS = {
  merge: "merge",
  split: "split",
  delete: "deletion",
  add: "outline",
  paint: "stroke",
  erase: "erasure",
  fill: "fill",
  accept: "acceptance",
  open: "loading of the saved labels",
};

const SHORTCUTS = [
  ["Shift + arrow keys", "move the crosshair"],
  ["Enter", "apply the tool at the crosshair"],
  ["C", "close the outline"],
  ["I", "fill between the planes of the selected object"],
  ["P", "mark the plane as complete"],
  ["Delete", "delete the selected object"],
  ["[ and ]", "decrease or increase the brush size"],
  ["Esc", "cancel the current action"],
];

/** The content of the Correct tab, and of the panel for annotating a stack from nothing. */
export class CorrectPanel {
  /** @param {Actions} actions @param {import("openapi").CallerLimits} capabilities of the service @param {boolean} isAnnotation whether the labels contained no objects before the first edit */
  constructor(actions, capabilities, isAnnotation) {
    this.actions = actions;
    this.capabilities = capabilities;
    this.isAnnotation = isAnnotation;
    /** Results of the user's work: changes of an annotation, or corrections of a result. */
    this.noun = isAnnotation ? "change" : "correction";
    /** The tools that the buttons control, or null if no labels are being corrected. @type {EditTools | null} */
    this.tools = null;
    this.hint = element("p", { class: "hint", role: "status" });
    this.summary = element("p", { class: "muted small", role: "status" });
    this.selectionDot = element("span", { class: "dot" });
    this.selectionText = element("span");
    this.annotatedText = element("p", { class: "muted small" });
    this.otherBrowserWarning = element("p", { class: "warning-text", role: "status", hidden: true });
    this.undoButton = button("Undo", () => actions.undoOrRedo("undo"), "secondary");
    this.redoButton = button("Redo", () => actions.undoOrRedo("redo"), "secondary");
    this.undoButton.title = "Ctrl + Z";
    this.redoButton.title = "Ctrl + Shift + Z";
    this.toolButtons = new Map(
      TOOLS.map(({ name, text, key }) => [
        name,
        element(
          "button",
          {
            type: "button",
            class: "tool",
            "aria-keyshortcuts": key,
            title: `Key ${key.toUpperCase()}`,
            onclick: () => this.tools?.activate(name),
          },
          text,
        ),
      ]),
    );
    this.brushControls = new BrushControls(() => this.tools);
    this.regionControls = new RegionControls(() => this.tools);
    this.bulkDelete = new BulkDelete(() => this.tools);
    this.suggestionControls = new SuggestionControls(() => this.tools);
    const fillAll = () => this.tools?.fillBetweenPlanes([...this.tools.editor.objects.keys()]);
    this.fillControls = element(
      "div",
      { class: "row" },
      button("Fill between planes", () => this.tools?.fillSelectedObject(), "secondary"),
      button("Fill all objects", fillAll, "link"),
    );
    this.root = element("div", { class: "correct" });
  }

  /** Show why the labels cannot be corrected. @param {string} text explanation */
  showError(text) {
    this.root.replaceChildren(element("p", { class: "warning-text" }, formatMessage(text)));
  }

  /** Show that the labels are being prepared. @param {string} text */
  showProgress(text) {
    this.root.replaceChildren(element("p", { class: "muted", role: "status" }, text));
  }

  /** Explain why correction is paused, and show a button to continue. @param {string} text @param {string} buttonText @param {() => unknown} action */
  showContinueButton(text, buttonText, action) {
    this.root.replaceChildren(element("p", { role: "status" }, text), button(buttonText, action, "primary"));
  }

  /** @param {string} text */
  showHint(text) {
    this.hint.replaceChildren(formatMessage(text));
  }

  /** Show the tools. @param {string} introduction explains which labels are edited @param {Map<number, number>} confidences of the objects by id, if they are known */
  show(introduction, confidences) {
    this.bulkDelete.reset(confidences);
    this.root.replaceChildren(
      this.otherBrowserWarning,
      element("p", { class: "muted small" }, introduction),
      element("div", { class: "tool-list", role: "group", "aria-label": "Tools" }, ...this.toolButtons.values()),
      this.hint,
      element("p", { class: "selected-object" }, this.selectionDot, this.selectionText),
      this.brushControls.root,
      element("div", { class: "row tight" }, this.undoButton, this.redoButton, this.summary),
      this.fillControls,
      this.suggestionControls.root,
      this.bulkDelete.root,
      element(
        "details",
        { class: "small" },
        element("summary", {}, "Keyboard shortcuts"),
        createShortcutList(SHORTCUTS),
      ),
      ...this.#createExportControls(),
    );
  }

  #createExportControls() {
    const { actions, capabilities, isAnnotation } = this;
    return [
      element("h3", {}, isAnnotation ? "Save and train" : "Corrected labels"),
      capabilities.corrections && this.regionControls.root,
      element(
        "div",
        { class: "row" },
        capabilities.corrections && button("Save as annotated stack", actions.annotate, "primary"),
        button("OME-TIFF", () => actions.save("ome.tif"), "secondary"),
        button("NIfTI", () => actions.save("nii.gz"), "secondary"),
        button("NumPy", () => actions.save("npy"), "secondary"),
        button("Table", () => actions.save("csv"), "secondary"),
        capabilities.training &&
          button(isAnnotation ? "Train a model" : "Improve the model", actions.train, "secondary"),
      ),
      element(
        "p",
        { class: "muted small", hidden: !capabilities.corrections || capabilities.training_problem === null },
        formatMessage(`Training is not available: ${capabilities.training_problem}`),
      ),
      this.annotatedText,
      button(isAnnotation ? "Delete all objects" : "Discard all corrections", actions.discard, "link"),
    ].filter((child) => child !== false);
  }

  /** Show the active tool and its options. */
  updateTool() {
    const { tools } = this;
    if (tools === null) return;
    for (const [name, tool] of this.toolButtons) tool.setAttribute("aria-pressed", String(name === tools.tool));
    this.brushControls.update(tools);
    this.regionControls.boxButton.setAttribute("aria-pressed", String(tools.tool === "box"));
    this.suggestionControls.update();
  }

  /** Show the selected object. @param {LabelEditor} editor @param {import("../viewer/scene.js").SceneState} state */
  showSelection(editor, { selectedId, isCalibrated }) {
    const extent = editor.objects.get(selectedId);
    const [z, y, x] = editor.voxelSize;
    this.selectionDot.hidden = extent === undefined;
    this.selectionDot.style.background = getCssColor(selectedId);
    const volumeText = isCalibrated ? `, ${formatNumber((extent?.voxelCount ?? 0) * z * y * x)} µm³` : "";
    const text = extent
      ? `Object ${selectedId} selected: ${formatCount(extent.voxelCount, "voxel")}${volumeText}`
      : "No object selected.";
    if (this.selectionText.textContent !== text) this.selectionText.textContent = text;
  }

  /** Show the number of objects and corrections. @param {LabelEditor} editor */
  showCounts(editor) {
    this.undoButton.disabled = editor.edits.length === 0;
    this.redoButton.disabled = editor.undoneEdits.length === 0;
    const descriptions = [...editor.countByKind()].map(([kind, count]) =>
      kind === "open" ? "loaded from the server" : `${count} ${PARTICIPLES[kind]}`,
    );
    const correctionsText = descriptions.length ? ` · ${descriptions.join(", ")}` : `, no ${this.noun}s`;
    this.summary.textContent = formatCount(editor.objects.size, "object") + correctionsText;
    this.bulkDelete.update();
    this.suggestionControls.update();
  }

  /** Show which correction was undone or redone. @param {"undo" | "redo"} direction @param {EditKind} kind of the correction */
  showHistoryStep(direction, kind) {
    this.showHint(`${direction === "undo" ? "Undid" : "Redid"} the ${NOUNS[kind]}.`);
  }

  /** Show the annotated stacks created from the result. @param {string} stackList names of all stacks, "" if there are none @param {string} otherBrowserList names of the stacks from other browsers */
  showSavedAnnotations(stackList, otherBrowserList) {
    this.otherBrowserWarning.hidden = otherBrowserList === "";
    this.otherBrowserWarning.textContent = `This result was also corrected in another browser and saved as annotated stack ${otherBrowserList}. Those corrections are not shown here. Your own corrections are separate.`;
    this.annotatedText.textContent = stackList ? `Saved as annotated stack ${stackList}.` : "";
  }
}
