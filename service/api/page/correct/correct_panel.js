/** The panel beside the views in which labels are corrected: tools, options of the brush, history, and ways to take the labels. */

import { button, element, keyList } from "../core/elements.js";
import { counted, number } from "../core/format.js";
import { cssColour } from "../volumes/slices.js";
import { BrushOptions } from "./brush_options.js";
import { TOOLS } from "./tool_list.js";

/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../volumes/label_edit.js").Kind} Kind */
/** @typedef {import("./edit_tools.js").EditTools} EditTools */
/** @typedef {"ome.tif" | "npy" | "csv"} FileKind */
/**
 * @typedef {object} Actions
 * @property {(direction: "undo" | "redo") => void} travel
 * @property {() => unknown} keep as an annotated stack
 * @property {() => unknown} improve the model with it
 * @property {(kind: FileKind) => void} save
 * @property {() => unknown} discard all corrections
 */

/** @type {Record<Kind, string>} */
const DONE = { merge: "merged", split: "split", delete: "deleted", add: "outlined", paint: "painted", erase: "erased" };

const KEYS = [
  ["shift + arrows", "crosshair in the view"],
  ["enter", "click there, next corner, dab"],
  ["C", "close the outline"],
  ["delete", "delete the chosen object"],
  ["[ and ]", "size of the brush"],
  ["escape", "begin anew"],
];

export class CorrectPanel {
  /** @param {Actions} actions @param {import("openapi").Abilities} abilities of the service */
  constructor(actions, abilities) {
    this.actions = actions;
    this.abilities = abilities;
    /** The tools that the buttons are for; null: labels are not being corrected. @type {EditTools | null} */
    this.tools = null;
    this.hint = element("p", { class: "hint", role: "status" });
    this.counted = element("p", { class: "muted small", role: "status" });
    this.dot = element("span", { class: "dot" });
    this.chosen = element("span");
    this.annotated = element("p", { class: "muted small" });
    this.elsewhere = element("p", { class: "warning-text", role: "status", hidden: true });
    this.undo = button("Undo", () => actions.travel("undo"), "secondary");
    this.redo = button("Redo", () => actions.travel("redo"), "secondary");
    this.undo.title = "ctrl + Z";
    this.redo.title = "ctrl + shift + Z";
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

  /** @param {string} text why nothing can be corrected */
  refuse(text) {
    this.root.replaceChildren(element("p", { class: "warning-text" }, text));
  }

  /** @param {string} text what is awaited */
  wait(text) {
    this.root.replaceChildren(element("p", { class: "muted", role: "status" }, text));
  }

  /** @param {string} text why nothing is corrected here now @param {string} name of the action that begins @param {() => unknown} action */
  offer(text, name, action) {
    this.root.replaceChildren(element("p", { role: "status" }, text), button(name, action, "primary"));
  }

  /** @param {string} text */
  say(text) {
    this.hint.textContent = text;
  }

  /** Show the tools. @param {string} introduction which labels are corrected */
  show(introduction) {
    this.root.replaceChildren(
      this.elsewhere,
      element("p", { class: "muted small" }, introduction),
      element("div", { class: "tool-list", role: "group", "aria-label": "Tools" }, ...this.buttons.values()),
      this.hint,
      element("p", { class: "chosen-object" }, this.dot, this.chosen),
      this.options.root,
      element("div", { class: "row tight" }, this.undo, this.redo, this.counted),
      element("details", { class: "small" }, element("summary", {}, "Without a mouse"), keyList(KEYS)),
      ...this.#takeLabels(),
    );
  }

  #takeLabels() {
    const { actions, abilities } = this;
    return [
      element("h3", {}, "Corrected labels"),
      element(
        "div",
        { class: "row" },
        abilities.corrections && button("Keep as annotated stack", actions.keep, "primary"),
        button("OME-TIFF", () => actions.save("ome.tif"), "secondary"),
        button("NumPy", () => actions.save("npy"), "secondary"),
        button("Table", () => actions.save("csv"), "secondary"),
        abilities.training && button("Improve the model", actions.improve, "secondary"),
      ),
      element(
        "p",
        { class: "muted small", hidden: !abilities.corrections || abilities.training_problem === null },
        `No model can be improved here: ${abilities.training_problem}`,
      ),
      this.annotated,
      button("Discard all corrections", actions.discard, "link"),
    ];
  }

  /** Say which tool is used, and how it is set. */
  describeTool() {
    const { tools } = this;
    if (tools === null) return;
    for (const [name, tool] of this.buttons) tool.setAttribute("aria-pressed", String(name === tools.tool));
    this.options.describe(tools);
  }

  /** Say which object is chosen, which the tools take. @param {LabelEditor} editor @param {import("../viewer/scene.js").SceneState} state */
  describeChosen(editor, { selected, known }) {
    const extent = editor.objects.get(selected);
    const [z, y, x] = editor.voxel;
    this.dot.hidden = extent === undefined;
    this.dot.style.background = cssColour(selected);
    const volume = known ? `, ${number((extent?.voxels ?? 0) * z * y * x)} µm³` : "";
    const text = extent
      ? `Object ${selected} is chosen: ${counted(extent.voxels, "voxel")}${volume}`
      : "No object is chosen.";
    if (this.chosen.textContent !== text) this.chosen.textContent = text;
  }

  /** Say how much was corrected. @param {LabelEditor} editor */
  count(editor) {
    this.undo.disabled = editor.done.length === 0;
    this.redo.disabled = editor.undone.length === 0;
    const parts = [...editor.counts()].map(([kind, times]) => `${times} ${DONE[kind]}`);
    const corrected = parts.length ? ` · ${parts.join(", ")}` : ", nothing corrected";
    this.counted.textContent = counted(editor.objects.size, "object") + corrected;
  }

  /** @param {"undo" | "redo"} direction @param {Kind} kind of the correction that was taken back or done again */
  sayTravelled(direction, kind) {
    this.say(`${direction === "undo" ? "Taken back" : "Done again"}: ${DONE[kind]}.`);
  }

  /** Say which annotated stacks were made of the result. @param {string} own @param {string} foreign made in another browser */
  describeAnnotated(own, foreign) {
    this.elsewhere.hidden = foreign === "";
    this.elsewhere.textContent = `Corrected in another browser, and kept as annotated stack ${foreign}. Those corrections are not shown here, and yours stay apart from them.`;
    this.annotated.textContent = own ? `Kept as annotated stack ${own}.` : "";
  }
}
