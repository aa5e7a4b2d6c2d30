/** The mode in which the labels of a result are corrected: its tools, its history, and where the corrected labels go. */

import { keepDialog } from "./annotations.js";
import * as kept from "./edit_store.js";
import { EditTools, TOOLS } from "./edit_tools.js";
import { button, element, save } from "./elements.js";
import { LabelEditor } from "./label_edit.js";
import { asNpy, asTiff } from "./label_files.js";
import { count, fetchVolume, MOST_PLANE_VOXELS } from "./planes.js";
import { trainingDialog } from "./training.js";
import { counted, size } from "./words.js";

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("./viewer.js").Viewer} Viewer */
/** @typedef {import("./label_edit.js").Kind} Kind */

const MOST_BYTES = 300_000_000;
const SOLID_MILLISECONDS = 400;
/** @type {Record<Kind, string>} */
const DONE = { merge: "merged", split: "split", delete: "deleted", add: "outlined", paint: "painted", erase: "erased" };

/** What is shown instead of the result while it is corrected. @typedef {{editor: LabelEditor, tools: EditTools, image: Volume, before: {image: Volume, labels: Volume, overlays: import("./view.js").Layer[]}}} Mode */

export class CorrectView {
  /**
   * @param {import("./server.js").Job} job @param {string} stack id, "" where it is not kept @param {string} name of the file
   * @param {Viewer} viewer
   * @param {{corrections: boolean, training: boolean, training_minutes: number}} abilities of the service @param {AbortSignal} signal ends the view
   */
  constructor(job, stack, name, viewer, abilities, signal) {
    this.job = job;
    this.stack = stack;
    this.stem = (name || "stack").replace(/(\.ome)?\.tiff?$/i, "");
    this.viewer = viewer;
    this.abilities = abilities;
    this.signal = signal;
    /** @type {Mode | null} */
    this.mode = null;
    /** Ends the mode, and what is fetched for it. */
    this.ending = new AbortController();
    this.solid = 0;
    this.hint = element("p", { class: "hint", role: "status" });
    this.counted = element("p", { class: "muted small", role: "status" });
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
            onclick: () => this.mode?.tools.use(tool),
          },
          text,
        ),
      ]),
    );
    this.brush = this.#brushOptions();
    this.root = element("div", { class: "correct" });
    signal.addEventListener("abort", () => this.leave());
    kept.count(job.id).then((edits) => {
      if (edits > 0) this.root.dispatchEvent(new CustomEvent("kept", { detail: edits }));
    });
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
        if (this.mode) this.mode.tools.ball = this.ball?.checked ?? true;
      },
    });
    this.over = element("input", {
      type: "checkbox",
      onchange: () => {
        if (this.mode) this.mode.tools.over = this.over?.checked ?? false;
      },
    });
    return element(
      "div",
      { class: "brush" },
      element("label", { class: "slim" }, "Size", this.radius),
      element("label", { class: "slim" }, this.ball, "Through planes"),
      element("label", { class: "slim" }, this.over, "Over other objects"),
    );
  }

  /** The smallest radius of the brush. */
  #least() {
    return Math.min(...(this.mode?.editor.voxel ?? [1])) / 2;
  }

  /** Show the labels in full resolution, with what was corrected before, and the tools. */
  async enter() {
    const { image, labels } = this.viewer.scene;
    if (image === null || labels === null) return;
    const refusal = tooLarge(labels);
    if (refusal) {
      this.root.replaceChildren(element("p", { class: "warning-text" }, refusal));
      return;
    }
    this.root.replaceChildren(element("p", { class: "muted", role: "status" }, "Fetching the labels"));
    this.ending = new AbortController();
    const { signal } = this.ending;
    try {
      const own = await this.#fetchLabels(labels, signal);
      const whole = await this.#fetchImage(image, signal);
      const edits = await kept.load(this.job.id);
      const { overlays } = this.viewer.scene;
      if (!signal.aborted) await this.#begin(own, whole ?? own, edits, { image, labels, overlays });
    } catch (error) {
      if (!signal.aborted)
        this.root.replaceChildren(element("p", { class: "warning-text" }, /** @type {Error} */ (error).message));
    }
  }

  /**
   * @param {Volume} labels that are corrected @param {Volume} image @param {import("./label_edit.js").Edit[]} edits of earlier
   * @param {Mode["before"]} before what is shown when the mode ends
   */
  async #begin(labels, image, edits, before) {
    const { viewer } = this;
    const voxel = /** @type {Triple} */ (viewer.scene.voxel.map((edge, axis) => edge / before.image.step[axis]));
    const editor = new LabelEditor(labels, voxel);
    const fitting = editor.restore(edits);
    // Other channels of a large stack are here in coarse steps, which do not fit.
    if (image !== before.image) viewer.scene.overlays = [];
    showImage(viewer, image);
    viewer.setLabels(labels);
    const told = { changed: () => this.#changed(), say: (/** @type {string} */ text) => this.#say(text) };
    const tools = new EditTools(viewer, editor, told, this.ending.signal);
    tools.addEventListener("tool", () => this.#describeTool());
    this.mode = { editor, tools, image, before };
    viewer.addEventListener("draw", () => this.#pauseIfCoarse(), { signal: this.ending.signal });
    this.#listenToKeys(this.ending.signal);
    this.#show();
    tools.use("look");
    if (!fitting) {
      await kept.forget(this.job.id);
      this.#say("The corrections that were kept do not fit this result, and are gone.");
    } else if (edits.length > 0) this.#say(`${counted(edits.length, "correction")} of earlier are back.`);
  }

  /** @param {Volume} labels @param {AbortSignal} signal @returns {Promise<Volume>} a copy that may be changed, of unsigned integers */
  async #fetchLabels(labels, signal) {
    const fine = labels.step.every((step) => step === 1);
    const found = fine
      ? labels
      : await fetchVolume(
          `jobs/${this.job.id}/planes`,
          {},
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

  /** Show the result again, unless something else is shown by now; the corrections stay. */
  leave() {
    const { mode, viewer } = this;
    mode?.tools.use("look");
    this.ending.abort();
    this.mode = null;
    viewer.waiting.textContent = "";
    if (mode === null) return;
    if (viewer.scene.image === mode.image && mode.image !== mode.before.image) {
      viewer.scene.overlays = mode.before.overlays;
      showImage(viewer, mode.before.image);
    }
    if (viewer.scene.labels === mode.editor.labels) viewer.setLabels(mode.before.labels);
  }

  /** Another channel of a large stack comes in coarse steps first, which the labels do not fit. */
  #pauseIfCoarse() {
    const { image } = this.viewer.scene;
    if (image === null || image.step.every((step) => step === 1)) return;
    this.leave();
    this.root.replaceChildren(
      element("p", { class: "muted" }, "The stack is shown anew. Your corrections are kept."),
      button("Go on correcting", () => this.enter(), "primary"),
    );
  }

  #show() {
    const { abilities } = this;
    this.root.replaceChildren(
      element("div", { class: "tool-list", role: "group", "aria-label": "Tools" }, ...this.buttons.values()),
      this.hint,
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
        abilities.training && button("Improve the model", () => this.#improve(), "secondary"),
      ),
      element("p", { class: "muted small" }, "The table under Objects is of the labels before they were corrected."),
      button("Discard all corrections", () => this.#discard(), "link"),
    );
    this.#count();
  }

  async #improve() {
    try {
      await trainingDialog(this.abilities.training_minutes, this.job.model);
    } catch (error) {
      this.#say(/** @type {Error} */ (error).message);
    }
  }

  #describeTool() {
    const tools = this.mode?.tools;
    if (!tools) return;
    for (const [name, tool] of this.buttons) tool.setAttribute("aria-pressed", String(name === tools.tool));
    this.brush.hidden = tools.tool !== "paint" && tools.tool !== "erase";
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
    this.counted.textContent = `${counted(editor.objects.size, "object")}${parts.length ? ` · ${parts.join(", ")}` : ", nothing corrected"}`;
  }

  /** Show and keep the newest correction. */
  #changed() {
    const { mode } = this;
    if (mode === null) return;
    const { editor } = mode;
    this.#count();
    const number = editor.done.length - 1;
    kept.keep(this.job.id, number, editor.done[number]).then((done) => {
      if (!done) this.#say("This browser keeps no corrections: they are lost when the page is closed.");
    });
    this.#refreshSolid();
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
    if (mode === null) return;
    const edit = mode.tools[direction]();
    if (edit === null) return;
    this.#say(`${direction === "undo" ? "Taken back" : "Done again"}: ${DONE[edit.kind]}.`);
    const { done } = mode.editor;
    kept.keep(this.job.id, direction === "undo" ? done.length : done.length - 1, direction === "undo" ? null : edit);
    this.#count();
    this.#refreshSolid();
  }

  async #discard() {
    const { mode } = this;
    if (mode === null || mode.editor.done.length === 0) return;
    const edits = mode.editor.done.length;
    while (mode.tools.editor.undo() !== null);
    mode.tools.cancel();
    await kept.forget(this.job.id);
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

  /** @param {"tif" | "npy"} kind */
  #save(kind) {
    const labels = this.mode?.editor.labels;
    if (!labels) return;
    if (kind === "npy") save(asNpy(labels), `${this.stem}_corrected.npy`);
    else save(asTiff(labels, this.#voxelSize()), `${this.stem}_corrected.ome.tif`);
  }

  async #keep() {
    const { mode, job, stack, stem } = this;
    if (mode === null) return;
    const changes = mode.editor.done.length;
    const report = await keepDialog({ labels: mode.editor.labels, changes, stack, job: job.id, name: stem });
    if (report) this.#say(`Kept as ${report.name}.`);
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
