/** The mode in which the labels of a result are corrected: its tools, its history, and where the corrected labels go. */

import { button, element, save } from "../core/elements.js";
import { counted, number, size } from "../core/words.js";
import { firstTime } from "../stack/time_points.js";
import { describeAnnotation, fetchAnnotations, keepDialog } from "../training/annotations.js";
import { trainingDialog } from "../training/training.js";
import * as kept from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { asNpy, asTiff, gzip } from "../volumes/label_files.js";
import { asCsv, measure } from "../volumes/label_measure.js";
import { count, fetchVolume, MOST_PLANE_VOXELS } from "../volumes/planes.js";
import { cssColour } from "../volumes/slices.js";
import { EditTools, TOOLS } from "./edit_tools.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {import("../volumes/label_edit.js").Kind} Kind */

const MOST_BYTES = 300_000_000;
const NO_LABELS = "There are no labels to correct here.";
const SOLID_MILLISECONDS = 400;
/** @type {Record<Kind, string>} */
const DONE = { merge: "merged", split: "split", delete: "deleted", add: "outlined", paint: "painted", erase: "erased" };

const ELSEWHERE =
  "This result is being corrected in another tab or window of this browser, and its corrections are kept. Go on here, and the other one stops.";
const TAKEN = "The corrections of this result go on in another tab or window of this browser. None of them is lost.";

/**
 * What is shown instead of the result once it is corrected; tools: null where it is looked at alone.
 * @typedef {{editor: LabelEditor, tools: EditTools | null, image: Volume, before: {image: Volume, labels: Volume, overlays: import("../viewer/slice_view.js").Layer[]}}} Mode
 */

export class CorrectView {
  /**
   * @param {import("openapi").JobReport} job @param {string} stack id, "" where it is not kept @param {string} name of the file
   * @param {Viewer} viewer @param {number} time point that is shown, of a series
   * @param {import("openapi").Abilities} abilities of the service @param {AbortSignal} signal ends the view
   */
  constructor(job, stack, name, viewer, time, abilities, signal) {
    this.job = job;
    this.stack = stack;
    this.stem = (name || "stack").replace(/(\.ome)?\.tiff?$/i, "");
    this.viewer = viewer;
    /** The time point whose labels are corrected, of a series. */
    this.at = time;
    this.abilities = abilities;
    this.signal = signal;
    /** @type {Mode | null} */
    this.mode = null;
    /** Ends the work of the tools, and what is fetched for it. */
    this.ending = new AbortController();
    /** Ends what is shown instead of the result. */
    this.showing = new AbortController();
    this.solid = 0;
    /** The key of those labels as segmented that are kept with their corrections. */
    this.segmented = "";
    this.hint = element("p", { class: "hint", role: "status" });
    this.counted = element("p", { class: "muted small", role: "status" });
    this.chosen = element("p", { class: "chosen-object" }, element("span", { class: "dot" }), element("span"));
    this.annotated = element("p", { class: "muted small" });
    this.elsewhere = element("p", { class: "warning-text", role: "status", hidden: true });
    this.undo = button("Undo", () => this.#travel("undo"), "secondary");
    this.redo = button("Redo", () => this.#travel("redo"), "secondary");
    this.undo.title = "ctrl + Z";
    this.redo.title = "ctrl + shift + Z";
    this.buttons = new Map(
      TOOLS.map(({ name: tool, text, key }) => [
        tool,
        element(
          "button",
          {
            type: "button",
            class: "tool",
            "aria-keyshortcuts": key,
            title: `Key ${key.toUpperCase()}`,
            onclick: () => this.mode?.tools?.use(tool),
          },
          text,
        ),
      ]),
    );
    this.brush = this.#brushOptions();
    this.root = element("div", { class: "correct" });
    signal.addEventListener("abort", () => this.leave(false));
    this.countKept();
  }

  /** Tell how many corrections are kept of what is shown. */
  async countKept() {
    const edits = await kept.count(this.key);
    this.root.dispatchEvent(new CustomEvent("kept", { detail: { edits, objects: null } }));
    if (edits > 0) await this.show();
  }

  #brushOptions() {
    this.radius = element("input", {
      type: "range",
      min: "0",
      max: "100",
      "aria-label": "Size of the brush",
      title: "Keys [ and ]",
      oninput: () => {
        const tools = this.mode?.tools;
        if (tools) tools.resize(2 ** (Number(this.radius?.value) / 12) / (tools.radius / this.#least()));
      },
    });
    this.ball = element("input", {
      type: "checkbox",
      checked: true,
      onchange: () => {
        if (this.mode?.tools) this.mode.tools.ball = this.ball?.checked ?? true;
      },
    });
    this.over = element("input", {
      type: "checkbox",
      onchange: () => {
        if (this.mode?.tools) this.mode.tools.over = this.over?.checked ?? false;
      },
    });
    /** @param {"new" | "chosen"} value @param {string} text */
    const ground = (value, text) => {
      const onchange = () => {
        if (this.mode?.tools) this.mode.tools.ground = value;
      };
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
    return element(
      "div",
      { class: "brush" },
      this.ground,
      element("label", { class: "slim" }, "Size", this.radius),
      element("label", { class: "slim" }, this.ball, "Through planes"),
      element("label", { class: "slim" }, this.over, "Over other objects"),
    );
  }

  /** The smallest radius of the brush. */
  #least() {
    return Math.min(...(this.mode?.editor.voxel ?? [1])) / 2;
  }

  /** Where the corrections of what is shown are kept. */
  get key() {
    return kept.keyOf(this.job, this.at);
  }

  /** Where the labels of what is shown are, as their planes are asked for. */
  get planes() {
    const { job, at } = this;
    return job.time_points ? { time: Math.max(0, at - firstTime(job.parameters.time)) } : {};
  }

  /** @param {number} time point that is shown @param {boolean} correcting whether the reader goes on correcting there */
  async goTo(time, correcting) {
    this.at = time;
    if (correcting) await this.enter();
    else await this.countKept();
  }

  /** Show the labels in full resolution, with what was corrected before, and the tools. @param {boolean} [force] also where another tab corrects them */
  async enter(force = false) {
    this.#restore();
    const { labels } = this.viewer.scene;
    const refusal = labels === null ? "" : tooLarge(labels);
    if (labels === null || refusal) return this.#refuse(refusal || NO_LABELS);
    this.root.replaceChildren(element("p", { class: "muted", role: "status" }, "Fetching the labels"));
    this.ending.abort();
    this.ending = new AbortController();
    const { signal } = this.ending;
    const { key } = this;
    signal.addEventListener("abort", () => kept.disown(key));
    if (!(await kept.own(key, force))) return this.#offer(ELSEWHERE, "Go on here", true);
    if (signal.aborted) return kept.disown(key);
    kept.whenTaken(key, () => this.#lose(), signal);
    try {
      const fitting = await this.#open(signal);
      if (signal.aborted) return undefined;
      this.#begin();
      const edits = this.mode?.editor.done.length ?? 0;
      if (!fitting) {
        await kept.keep(key, 0, null);
        this.#say("The corrections that were kept do not fit this result, and are gone.");
      } else if (edits > 0) this.#say(`${counted(edits, "correction")} of earlier ${edits === 1 ? "is" : "are"} back.`);
    } catch (error) {
      if (!signal.aborted) this.#refuse(/** @type {Error} */ (error).message);
    }
    return undefined;
  }

  /** Show the corrected labels without the tools, where there are any and all of the stack is here. */
  async show() {
    const { labels } = this.viewer.scene;
    if (this.mode || this.job.time_points || !labels?.step.every((step) => step === 1) || tooLarge(labels)) return;
    this.ending.abort();
    this.ending = new AbortController();
    const { signal } = this.ending;
    try {
      await this.#open(signal);
    } catch {
      // What keeps the labels from being corrected is told under Correct.
    }
    if (!signal.aborted) this.leave();
  }

  /** @param {string} text why nothing can be corrected */
  #refuse(text) {
    this.root.replaceChildren(element("p", { class: "warning-text" }, text));
  }

  /** @param {string} text why nothing is corrected here now @param {string} action that begins @param {boolean} force */
  #offer(text, action, force) {
    this.root.replaceChildren(
      element("p", { role: "status" }, text),
      button(action, () => this.enter(force), "primary"),
    );
  }

  /** Another tab has taken over. */
  #lose() {
    this.leave();
    this.#offer(TAKEN, "Go on here", true);
  }

  /** Show the labels with what was corrected before. @param {AbortSignal} signal @returns {Promise<boolean>} whether the corrections fit */
  async #open(signal) {
    const { viewer } = this;
    const { image, labels, overlays } = viewer.scene;
    if (image === null || labels === null) throw new Error(NO_LABELS);
    const own = await this.#fetchLabels(labels, signal);
    const whole = (await this.#fetchImage(image, signal)) ?? own;
    const edits = await kept.load(this.key);
    signal.throwIfAborted();
    const voxel = /** @type {Triple} */ (viewer.scene.voxel.map((edge, axis) => edge / image.step[axis]));
    const editor = new LabelEditor(own, voxel);
    const fitting = editor.restore(edits);
    // Other channels of a large stack are here in coarse steps, which do not fit.
    if (whole !== image) viewer.scene.overlays = [];
    showImage(viewer, whole);
    viewer.setLabels(own);
    this.mode = { editor, tools: null, image: whole, before: { image, labels, overlays } };
    this.showing = new AbortController();
    viewer.addEventListener("draw", () => this.#pauseIfCoarse(), { signal: this.showing.signal });
    return fitting;
  }

  /** Give the reader the tools. */
  #begin() {
    const { mode, viewer } = this;
    if (mode === null) return;
    const told = { changed: () => this.#changed(), say: (/** @type {string} */ text) => this.#say(text) };
    const tools = new EditTools(viewer, mode.editor, told, this.ending.signal);
    tools.addEventListener("tool", () => this.#describeTool());
    mode.tools = tools;
    viewer.addEventListener("draw", () => this.#describeChosen(), { signal: this.ending.signal });
    this.#listenToKeys(this.ending.signal);
    this.#show();
    tools.use("look");
  }

  /** @param {Volume} labels @param {AbortSignal} signal @returns {Promise<Volume>} a copy that may be changed, of unsigned integers */
  async #fetchLabels(labels, signal) {
    const fine = labels.step.every((step) => step === 1);
    const found = fine
      ? labels
      : await fetchVolume(
          `jobs/${this.job.id}/planes`,
          this.planes,
          labels.whole,
          signal,
          this.#progress("the labels"),
          [1, 1, 1],
        );
    const { data } = found;
    const unsigned = data instanceof Uint8Array || data instanceof Uint16Array || data instanceof Uint32Array;
    const own = unsigned ? (fine ? data.slice() : data) : Uint32Array.from(data);
    return { ...found, data: own };
  }

  /** @param {Volume} image @param {AbortSignal} signal @returns {Promise<Volume | null>} null: the labels stand in for it */
  async #fetchImage(image, signal) {
    if (image.step.every((step) => step === 1)) return image;
    return (await this.viewer.fetchWhole?.(signal, this.#progress("the whole stack"))) ?? null;
  }

  /** @param {string} what @returns {(volume: Volume, share: number) => void} tells how much has come */
  #progress(what) {
    return (_, share) => {
      this.viewer.waiting.textContent = share < 1 ? `Fetching ${what}, ${Math.round(share * 100)} %` : "";
    };
  }

  /**
   * Put the tools away; the corrections stay.
   * @param {boolean} [shown] whether corrected labels go on being shown, where there are any; "corrected" tells of them
   */
  leave(shown = true) {
    const { mode } = this;
    mode?.tools?.use("look");
    this.ending.abort();
    this.viewer.waiting.textContent = "";
    if (mode === null) return;
    mode.tools = null;
    const corrected = shown && mode.editor.done.length > 0 && !this.job.time_points && !this.signal.aborted;
    if (!corrected) this.#restore();
    this.root.dispatchEvent(new CustomEvent("corrected", { detail: corrected ? this.measure() : null }));
  }

  /** Show the labels as they were segmented, unless something else is shown by now. */
  #restore() {
    const { mode, viewer } = this;
    this.mode = null;
    this.showing.abort();
    if (mode === null) return;
    if (viewer.scene.image === mode.image && mode.image !== mode.before.image) {
      viewer.scene.overlays = mode.before.overlays;
      showImage(viewer, mode.before.image);
    }
    if (viewer.scene.labels === mode.editor.labels) viewer.setLabels(mode.before.labels);
  }

  /** The table of the corrected objects. @returns {import("../volumes/object_table.js").Table | null} null: they are not here */
  measure() {
    if (this.mode === null) return null;
    const { editor, image } = this.mode;
    return measure(
      editor.labels,
      image === editor.labels ? null : image,
      editor.objects.keys(),
      this.viewer.known ? editor.voxel : null,
    );
  }

  /** Another channel of a large stack comes in coarse steps first, which the labels do not fit. */
  #pauseIfCoarse() {
    const { image } = this.viewer.scene;
    if (image === null || image.step.every((step) => step === 1)) return;
    const correcting = this.mode?.tools !== null;
    this.leave(false);
    if (correcting) this.#offer("The stack is shown anew. Your corrections are kept.", "Go on correcting", false);
  }

  #show() {
    const { abilities } = this;
    const where = this.job.time_points
      ? `These are the labels of time point ${this.at}; each is corrected for itself. The table under Objects is as segmented.`
      : "The table under Objects follows when you go there.";
    this.root.replaceChildren(
      this.elsewhere,
      element("p", { class: "muted small" }, where),
      element("div", { class: "tool-list", role: "group", "aria-label": "Tools" }, ...this.buttons.values()),
      this.hint,
      this.chosen,
      this.brush,
      element("div", { class: "row tight" }, this.undo, this.redo, this.counted),
      element(
        "details",
        { class: "small" },
        element("summary", {}, "Without a mouse"),
        element(
          "dl",
          { class: "keys" },
          ...[
            ["shift + arrows", "crosshair in the view"],
            ["enter", "click there, next corner, dab"],
            ["C", "close the outline"],
            ["delete", "delete the chosen object"],
            ["[ and ]", "size of the brush"],
            ["escape", "begin anew"],
          ].flatMap(([key, what]) => [element("dt", {}, key), element("dd", {}, what)]),
        ),
      ),
      element("h3", {}, "Corrected labels"),
      element(
        "div",
        { class: "row" },
        abilities.corrections && button("Keep as annotated stack", () => this.#keep(), "primary"),
        button("OME-TIFF", () => this.#save("tif"), "secondary"),
        button("NumPy", () => this.#save("npy"), "secondary"),
        button("Table", () => this.#save("csv"), "secondary"),
        abilities.training && button("Improve the model", () => this.#improve(), "secondary"),
      ),
      element(
        "p",
        { class: "muted small", hidden: !abilities.corrections || abilities.training_problem === null },
        `No model can be improved here: ${abilities.training_problem}`,
      ),
      this.annotated,
      button("Discard all corrections", () => this.#discard(), "link"),
    );
    this.#count();
    this.#describeChosen();
    this.#listAnnotated();
  }

  /** Say which annotated stacks were made of this result, maybe in another browser. */
  async #listAnnotated() {
    if (!this.abilities.corrections) return;
    const all = await fetchAnnotations().catch(() => []);
    const own = all.filter(({ job }) => job === this.job.id);
    const made = await kept.annotationsOf(this.job.id);
    const foreign = own.filter(({ id }) => !made.includes(id));
    const list = (/** @type {import("openapi").AnnotationReport[]} */ some) =>
      some.map((one) => `${one.name} (${describeAnnotation(one)})`).join(", ");
    this.elsewhere.hidden = foreign.length === 0;
    this.elsewhere.textContent = `Corrected in another browser, and kept as annotated stack ${list(foreign)}. Those corrections are not shown here, and yours stay apart from them.`;
    this.annotated.textContent = own.length > 0 ? `Kept as annotated stack ${list(own)}.` : "";
  }

  /** Say which object is chosen, which the tools take. */
  #describeChosen() {
    const { mode, viewer } = this;
    if (mode === null) return;
    const id = viewer.scene.selected;
    const extent = mode.editor.objects.get(id);
    const [dot, words] = /** @type {[HTMLElement, HTMLElement]} */ ([...this.chosen.children]);
    dot.hidden = extent === undefined;
    dot.style.background = cssColour(id);
    const edges = mode.editor.voxel;
    const volume = viewer.known ? `, ${number((extent?.voxels ?? 0) * edges[0] * edges[1] * edges[2])} µm³` : "";
    const text = extent
      ? `Object ${id} is chosen: ${counted(extent.voxels, "voxel")}${volume}`
      : "No object is chosen.";
    if (words.textContent !== text) words.textContent = text;
  }

  /** Train on what is corrected here, too: it is kept first. */
  async #improve() {
    try {
      if (!(await this.#isKept()) && (await this.#keep()) === null) return;
      await trainingDialog(this.abilities.training_minutes, this.job.model);
    } catch (error) {
      this.#say(/** @type {Error} */ (error).message);
    }
  }

  /** Whether no correction is missing among the annotated stacks of this result. */
  async #isKept() {
    const edits = this.mode?.editor.done.length ?? 0;
    if (edits === 0 || !this.abilities.corrections) return true;
    const own = (await fetchAnnotations()).filter(({ job }) => job === this.job.id);
    return own.some(({ changes, time }) => changes === edits && (!this.job.time_points || time === this.at));
  }

  #describeTool() {
    const tools = this.mode?.tools;
    if (!tools) return;
    for (const [name, tool] of this.buttons) tool.setAttribute("aria-pressed", String(name === tools.tool));
    this.brush.hidden = tools.tool !== "paint" && tools.tool !== "erase";
    if (this.ground) this.ground.hidden = tools.tool !== "paint";
    for (const input of this.ground?.querySelectorAll("input") ?? []) input.checked = input.value === tools.ground;
    if (this.radius) this.radius.value = String(12 * Math.log2(tools.radius / this.#least()));
  }

  /** @param {string} text */
  #say(text) {
    this.hint.textContent = text;
  }

  #count() {
    const { mode } = this;
    if (mode === null) return;
    const { editor } = mode;
    this.undo.disabled = editor.done.length === 0;
    this.redo.disabled = editor.undone.length === 0;
    const parts = [...editor.counts()].map(([kind, times]) => `${times} ${DONE[kind]}`);
    const detail = { edits: editor.done.length, objects: editor.objects.size };
    this.root.dispatchEvent(new CustomEvent("kept", { detail }));
    this.counted.textContent = `${counted(editor.objects.size, "object")}${parts.length ? ` · ${parts.join(", ")}` : ", nothing corrected"}`;
  }

  /** Show and keep the newest correction. */
  #changed() {
    const { mode } = this;
    if (mode === null) return;
    const { done } = mode.editor;
    this.#count();
    this.#keepEdit(done.length - 1, done[done.length - 1]);
    this.#refreshSolid();
  }

  /** @param {number} number @param {import("../volumes/label_edit.js").Edit | null} edit */
  async #keepEdit(number, edit) {
    const where = await kept.keep(this.key, number, edit);
    if (where === "nowhere") this.#say("This browser keeps no corrections: they are lost when the page is closed.");
    if (where === "elsewhere") this.#lose();
    if (where === "kept" && edit !== null) await this.#keepSegmented();
  }

  /** Keep the labels as segmented beside their corrections: the service may forget the result. */
  async #keepSegmented() {
    const { mode, key } = this;
    if (mode === null || this.segmented === key) return;
    this.segmented = key;
    if (await kept.loadSegmented(key)) return;
    const { editor } = mode;
    const data = editor.original();
    const zipped = await gzip(new Blob([/** @type {BlobPart} */ (data)]));
    const { shape } = editor.labels;
    await kept.keepSegmented(key, { zipped, bytes: data.BYTES_PER_ELEMENT, shape, voxelSize: this.#voxelSize() });
  }

  /** The solid is made of copies: make them again when nothing has changed for a moment. */
  #refreshSolid() {
    clearTimeout(this.solid);
    this.solid = window.setTimeout(() => {
      const { solid } = this.viewer;
      if (solid === null) return;
      solid.held = [];
      this.viewer.draw();
    }, SOLID_MILLISECONDS);
  }

  /** @param {"undo" | "redo"} direction */
  #travel(direction) {
    const { mode } = this;
    const edit = mode?.tools?.[direction]();
    if (!mode || !edit) return;
    this.#say(`${direction === "undo" ? "Taken back" : "Done again"}: ${DONE[edit.kind]}.`);
    const { done } = mode.editor;
    this.#keepEdit(direction === "undo" ? done.length : done.length - 1, direction === "undo" ? null : edit);
    this.#count();
    this.#refreshSolid();
  }

  async #discard() {
    const { mode } = this;
    if (mode === null || mode.editor.done.length === 0) return;
    const edits = mode.editor.done.length;
    while (mode.editor.undo() !== null);
    mode.tools?.cancel();
    await kept.keep(this.key, 0, null);
    this.#count();
    this.#refreshSolid();
    this.#say(`${counted(edits, "correction")} discarded. Redo brings them back, one by one.`);
  }

  /** Keys of the tools, while the views or the panel have the focus. @param {AbortSignal} signal */
  #listenToKeys(signal) {
    const listen = (/** @type {KeyboardEvent} */ event) => this.#onKey(event);
    this.viewer.root.addEventListener("keydown", listen, { signal });
    this.root.addEventListener("keydown", listen, { signal });
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const tools = this.mode?.tools;
    const target = /** @type {HTMLElement} */ (event.target);
    if (!tools || (target instanceof HTMLInputElement && target.type !== "range" && target.type !== "checkbox")) return;
    const action =
      event.ctrlKey || event.metaKey
        ? this.#historyKey(event)
        : event.altKey
          ? undefined
          : this.#toolKey(event.key, tools);
    if (action === undefined) return;
    event.preventDefault();
    action();
  }

  /** @param {KeyboardEvent} event */
  #historyKey(event) {
    const key = event.key.toLowerCase();
    if (key === "z") return () => this.#travel(event.shiftKey ? "redo" : "undo");
    return key === "y" ? () => this.#travel("redo") : undefined;
  }

  /** @param {string} key @param {EditTools} tools @returns {(() => void) | undefined} */
  #toolKey(key, tools) {
    const tool = TOOLS.find((one) => one.key === key);
    if (tool) return () => tools.use(tool.name);
    return {
      "[": () => tools.resize(1 / 1.2),
      "]": () => tools.resize(1.2),
      n: () => tools.startNew(),
      c: () => tools.closeOutline(),
      Delete: () => tools.deleteSelected(),
      Backspace: () => tools.deleteSelected(),
      Escape: () => tools.cancel(),
    }[key];
  }

  /** The voxel size in the form that files state it. */
  #voxelSize() {
    const [z, y, x] = this.mode?.editor.voxel ?? [1, 1, 1];
    return this.viewer.known ? { z, y, x } : null;
  }

  /** @param {"tif" | "npy" | "csv"} kind */
  #save(kind) {
    const labels = this.mode?.editor.labels;
    const table = kind === "csv" ? this.measure() : null;
    if (!labels) return;
    if (table) save(new Blob([asCsv(table)], { type: "text/csv" }), `${this.stem}_corrected.csv`);
    else if (kind === "npy") save(asNpy(labels), `${this.stem}_corrected.npy`);
    else save(asTiff(labels, this.#voxelSize()), `${this.stem}_corrected.ome.tif`);
  }

  /** @returns {Promise<import("openapi").AnnotationReport | null>} null: the reader thought better of it */
  async #keep() {
    const { mode, job, stack, stem } = this;
    if (mode === null) return null;
    const changes = mode.editor.done.length;
    const time = job.time_points ? this.at : undefined;
    const name = time === undefined ? stem : `${stem}, time ${time}`;
    const { labels } = mode.editor;
    const report = await keepDialog({ labels, changes, stack, job: job.id, time, name });
    if (report === null) return null;
    await kept.addAnnotation(job.id, report.id);
    this.#say(`Kept as ${report.name}.`);
    this.#listAnnotated();
    return report;
  }
}

/** @param {Volume} labels @returns {string} why they cannot be corrected; "" where they can */
function tooLarge({ whole, data }) {
  const bytes = count(whole) * data.BYTES_PER_ELEMENT;
  const fits = bytes <= MOST_BYTES && whole[1] * whole[2] <= MOST_PLANE_VOXELS;
  if (fits) return "";
  return `All labels have to be in the browser to be corrected, and these are ${size(bytes)} in planes of ${whole[2]} × ${whole[1]}. Segment a smaller part of the stack, ${size(MOST_BYTES)} of labels at most, and correct that: a model learns as well from parts.`;
}

/** Show a stack in another resolution, at the same place. @param {Viewer} viewer @param {Volume} image */
function showImage(viewer, image) {
  const { scene } = viewer;
  const before = scene.image;
  if (before === null || before === image) return;
  const ratio = before.step.map((step, axis) => step / image.step[axis]);
  const moved = (/** @type {Triple} */ place) => /** @type {Triple} */ (place.map((one, axis) => one * ratio[axis]));
  const [at, centre] = [moved(scene.at), moved(scene.centre)];
  const edges = scene.voxel.map((edge, axis) => edge / before.step[axis]);
  viewer.open(image, viewer.known ? { z: edges[0], y: edges[1], x: edges[2] } : null);
  scene.at = /** @type {Triple} */ (at.map((place, axis) => Math.min(image.shape[axis] - 1, Math.floor(place))));
  scene.centre = centre;
  viewer.settle();
}
