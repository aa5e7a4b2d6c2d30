/** The mode in which labels are corrected: loading them at full resolution, tools, history, saving and export. */

import { downloadBlob } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import * as correctionStore from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { asNpy, asTiff, gzip } from "../volumes/label_files.js";
import { asCsv, measure } from "../volumes/label_measure.js";
import { firstTime } from "../volumes/time_points.js";
import { AnnotatedStacks } from "./annotated_stacks.js";
import { CorrectPanel } from "./correct_panel.js";
import { EditTools } from "./edit_tools.js";
import {
  explainSizeLimit,
  fetchImage,
  fetchLabels,
  fullResolutionVoxel,
  isFullResolution,
  showImage,
} from "./full_resolution.js";
import { actionOfKey } from "./tool_list.js";

/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

const NO_LABELS = "This result has no labels to correct.";
const REFRESH_3D_MILLISECONDS = 400;

const OPEN_ELSEWHERE =
  "This result is being corrected in another tab or window of this browser. Its corrections are saved. If you continue here, you can no longer correct it there.";
const TAKEN_OVER =
  "You are now correcting this result in another tab or window of this browser. All corrections are saved.";

/**
 * The corrected labels, and the previous content of the views.
 * @typedef {{editor: LabelEditor, image: Volume, before: {image: Volume, labels: Volume, overlays: import("../viewer/scene.js").Overlay[]}}} Mode
 */

/** Events of `root`: `count` with the numbers of corrections and objects, `corrected` with the table of the displayed labels. */
export class CorrectView {
  /**
   * @param {{job: import("openapi").JobReport, stack: string, name: string}} result stack: its id, "" if it is no longer stored; name: of the file
   * @param {Viewer} viewer @param {number} time displayed time point, if the job is a series
   * @param {import("openapi").Abilities} abilities of the service @param {AbortSignal} signal ends the view
   */
  constructor({ job, stack, name }, viewer, time, abilities, signal) {
    this.job = job;
    this.stem = (name || "stack").replace(/(\.ome)?\.tiff?$/i, "");
    this.viewer = viewer;
    /** The displayed time point, if the job is a series. */
    this.time = time;
    this.signal = signal;
    /** @type {Mode | null} */
    this.mode = null;
    /** Ends the tools and their requests. */
    this.ending = new AbortController();
    /** Ends the display of corrected labels. */
    this.showing = new AbortController();
    this.timer = 0;
    /** The key whose original labels are already stored. */
    this.storedKey = "";
    this.panel = new CorrectPanel(
      {
        undoOrRedo: (direction) => this.#undoOrRedo(direction),
        annotate: () => this.mode && this.annotated.add(this.mode.editor, this.time),
        improve: () => this.mode && this.annotated.improve(this.mode.editor, this.time),
        save: (kind) => this.#save(kind),
        discard: () => this.#discard(),
      },
      abilities,
    );
    this.root = this.panel.root;
    this.annotated = new AnnotatedStacks({ job, stack }, this.stem, abilities, this.panel);
    signal.addEventListener("abort", () => this.leave(false));
    this.countStored();
  }

  /** Report the number of stored corrections, and show the corrected labels. */
  async countStored() {
    const edits = await correctionStore.count(this.key);
    this.#emit("count", { edits, objects: null });
    if (edits > 0) await this.show();
  }

  /** @param {string} name @param {unknown} detail */
  #emit(name, detail) {
    this.root.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** The key under which the corrections are stored. */
  get key() {
    return correctionStore.keyOf(this.job, this.time);
  }

  /** @param {number} time displayed time point @param {boolean} correcting whether to show the tools */
  async goTo(time, correcting) {
    this.time = time;
    if (correcting) await this.enter();
    else await this.countStored();
  }

  /** Show the tools, and the labels at full resolution with the stored corrections. @param {boolean} [force] whether to take over from another tab */
  async enter(force = false) {
    this.#restore();
    const { labels } = this.viewer.scene.state;
    const refusal = labels === null ? NO_LABELS : explainSizeLimit(labels);
    if (refusal) return this.panel.showError(refusal);
    this.panel.showProgress("Loading the labels");
    const signal = this.#startWork();
    const { key } = this;
    signal.addEventListener("abort", () => correctionStore.release(key));
    if (!(await correctionStore.claim(key, force))) return this.#offer(OPEN_ELSEWHERE, "Continue here", true);
    if (signal.aborted) return correctionStore.release(key);
    correctionStore.listenForClaims(key, () => this.#handOver(), signal);
    try {
      const { editor, matches } = await this.#open(signal);
      if (signal.aborted) return undefined;
      this.#showTools(editor);
      await this.#describeRestored(editor.done.length, matches);
    } catch (error) {
      if (!signal.aborted) this.panel.showError(/** @type {Error} */ (error).message);
    }
    return undefined;
  }

  /** Cancel earlier work. @returns {AbortSignal} ends the new work */
  #startWork() {
    this.ending.abort();
    this.ending = new AbortController();
    return this.ending.signal;
  }

  /** @param {number} edits number of restored corrections @param {boolean} matches whether they match the labels */
  async #describeRestored(edits, matches) {
    if (!matches) {
      await correctionStore.save(this.key, 0, null);
      this.panel.showHint("The saved corrections do not match this result and were discarded.");
    } else if (edits > 0)
      this.panel.showHint(`${formatCount(edits, "saved correction")} ${edits === 1 ? "was" : "were"} restored.`);
  }

  /** Show the labels with the stored corrections but without the tools, if the labels are loaded at full resolution. */
  async show() {
    const { labels } = this.viewer.scene.state;
    if (this.mode || this.job.time_points || !labels || !isFullResolution(labels) || explainSizeLimit(labels)) return;
    const signal = this.#startWork();
    try {
      await this.#open(signal);
    } catch {
      // The Correct tab shows the error.
    }
    if (!signal.aborted) this.leave();
  }

  /** @param {string} text explains why correcting is paused @param {string} action name of the button @param {boolean} force */
  #offer(text, action, force) {
    this.panel.showStartButton(text, action, () => this.enter(force));
  }

  /** Stop correcting because another tab has taken over. */
  #handOver() {
    this.leave();
    this.#offer(TAKEN_OVER, "Continue here", true);
  }

  /** Show the labels with the stored corrections. @param {AbortSignal} signal @returns {Promise<{editor: LabelEditor, matches: boolean}>} matches: whether the corrections match the labels */
  async #open(signal) {
    const { viewer, job } = this;
    const { image, labels, overlays } = viewer.scene.state;
    if (image === null || labels === null) throw new Error(NO_LABELS);
    const parameters = job.time_points ? { time: Math.max(0, this.time - firstTime(job.parameters.time)) } : {};
    const editable = await fetchLabels(labels, { address: `jobs/${job.id}/planes`, parameters }, viewer, signal);
    const fullImage = (await fetchImage(image, viewer, signal)) ?? editable;
    const edits = await correctionStore.load(this.key);
    signal.throwIfAborted();
    const editor = new LabelEditor(editable, fullResolutionVoxel(viewer.scene.state, image));
    const matches = editor.restore(edits);
    // The other channels of a large stack are subsampled and cannot be overlaid at full resolution.
    if (fullImage !== image) viewer.scene.set({ overlays: [] });
    showImage(viewer, fullImage);
    viewer.setLabels(editable);
    this.mode = { editor, image: fullImage, before: { image, labels, overlays } };
    this.showing = new AbortController();
    viewer.addEventListener("draw", () => this.#pauseIfSubsampled(), { signal: this.showing.signal });
    return { editor, matches };
  }

  /** @param {LabelEditor} editor */
  #showTools(editor) {
    const { viewer, panel, job } = this;
    const { signal } = this.ending;
    const callbacks = {
      onedit: () => this.#onEdit(editor),
      showHint: (/** @type {string} */ text) => panel.showHint(text),
    };
    const tools = new EditTools(viewer, editor, callbacks, signal);
    tools.addEventListener("tool", () => panel.describeTool());
    panel.tools = tools;
    const describeSelected = () => panel.describeSelected(editor, viewer.scene.state);
    viewer.addEventListener("draw", describeSelected, { signal });
    for (const root of [viewer.root, this.root])
      root.addEventListener("keydown", (event) => this.#onKey(event), { signal });
    panel.show(
      job.time_points
        ? `These are the labels of time point ${this.time}. Each time point is corrected separately. The table on the Objects tab does not include corrections.`
        : "The table on the Objects tab is updated when you open it.",
    );
    this.#showCounts(editor);
    describeSelected();
    this.annotated.describe();
    tools.use("select");
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const { tools } = this.panel;
    const action = tools && actionOfKey(event, tools, (direction) => this.#undoOrRedo(direction));
    if (!action) return;
    event.preventDefault();
    action();
  }

  /**
   * Remove the tools, and dispatch `corrected`. The corrections remain stored.
   * @param {boolean} [keepCorrected] whether to keep showing the corrected labels
   */
  leave(keepCorrected = true) {
    const { mode, panel } = this;
    panel.tools?.use("select");
    this.ending.abort();
    this.viewer.fetchStatus.textContent = "";
    if (mode === null) return;
    panel.tools = null;
    const corrected = keepCorrected && mode.editor.done.length > 0 && !this.job.time_points && !this.signal.aborted;
    if (!corrected) this.#restore();
    this.#emit("corrected", corrected ? this.#measure(mode) : null);
  }

  /** Show the original labels again, unless the views have been given other content. */
  #restore() {
    const { mode, viewer } = this;
    this.mode = this.panel.tools = null;
    this.showing.abort();
    if (mode === null) return;
    const { image, labels, overlays } = mode.before;
    if (viewer.scene.state.image === mode.image && mode.image !== image) {
      viewer.scene.set({ overlays });
      showImage(viewer, image);
    }
    if (viewer.scene.state.labels === mode.editor.labels) viewer.setLabels(labels);
  }

  /** Measure the corrected objects. @param {Mode} mode */
  #measure({ editor, image }) {
    const intensities = image === editor.labels ? null : image;
    return measure(
      editor.labels,
      intensities,
      editor.objects.keys(),
      this.viewer.scene.state.isCalibrated ? editor.voxel : null,
    );
  }

  /** Pause if the views show a subsampled image, such as another channel, which does not match the labels. */
  #pauseIfSubsampled() {
    const { image } = this.viewer.scene.state;
    if (image === null || isFullResolution(image)) return;
    const correcting = this.panel.tools !== null;
    this.leave(false);
    if (correcting) this.#offer("The image was reloaded. Your corrections are saved.", "Continue correcting", false);
  }

  /** Show the numbers of objects and corrections. @param {LabelEditor} editor */
  #showCounts(editor) {
    this.panel.showCounts(editor);
    this.#emit("count", { edits: editor.done.length, objects: editor.objects.size });
  }

  /** Show and store the newest correction. @param {LabelEditor} editor */
  #onEdit(editor) {
    const { done } = editor;
    this.#showCounts(editor);
    this.#storeEdit(done.length - 1, done[done.length - 1]);
    this.#refresh3d();
  }

  /** @param {"undo" | "redo"} direction */
  #undoOrRedo(direction) {
    const { mode, panel } = this;
    const edit = panel.tools?.[direction]();
    if (!mode || !edit) return;
    panel.showUndoneOrRedone(direction, edit.kind);
    const { done } = mode.editor;
    this.#storeEdit(direction === "undo" ? done.length : done.length - 1, direction === "undo" ? null : edit);
    this.#showCounts(mode.editor);
    this.#refresh3d();
  }

  async #discard() {
    const { mode, panel } = this;
    if (mode === null || mode.editor.done.length === 0) return;
    const edits = mode.editor.done.length;
    while (mode.editor.undo() !== null);
    panel.tools?.cancel();
    await correctionStore.save(this.key, 0, null);
    this.#showCounts(mode.editor);
    this.#refresh3d();
    panel.showHint(`${formatCount(edits, "correction")} discarded. Press Redo to restore them one by one.`);
  }

  /** @param {number} number @param {import("../volumes/label_edit.js").Edit | null} edit */
  async #storeEdit(number, edit) {
    const outcome = await correctionStore.save(this.key, number, edit);
    if (outcome === "unavailable")
      this.panel.showHint("This browser cannot save corrections. They will be lost when you close the page.");
    if (outcome === "owned-by-other-tab") this.#handOver();
    if (outcome === "saved" && edit !== null) await this.#storeOriginalLabels();
  }

  /** Store the original labels with their corrections, because the service may delete the result. */
  async #storeOriginalLabels() {
    const { mode, key } = this;
    if (mode === null || this.storedKey === key) return;
    this.storedKey = key;
    if (await correctionStore.loadOriginalLabels(key)) return;
    const data = mode.editor.original();
    const zipped = await gzip(new Blob([/** @type {BlobPart} */ (data)]));
    const { shape } = mode.editor.labels;
    await correctionStore.saveOriginalLabels(key, {
      zipped,
      bytes: data.BYTES_PER_ELEMENT,
      shape,
      voxelSize: this.#voxelSize(),
    });
  }

  /** Update the 3D rendering after a pause in editing, because it copies the labels into textures. */
  #refresh3d() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.viewer.corner.refresh3d(), REFRESH_3D_MILLISECONDS);
  }

  /** The voxel size, null if it is unknown. */
  #voxelSize() {
    const [z, y, x] = this.mode?.editor.voxel ?? [1, 1, 1];
    return this.viewer.scene.state.isCalibrated ? { z, y, x } : null;
  }

  /** @param {import("./correct_panel.js").FileKind} kind */
  #save(kind) {
    const { mode } = this;
    if (mode === null) return;
    const { labels } = mode.editor;
    const files = {
      csv: () => new Blob([asCsv(this.#measure(mode))], { type: "text/csv" }),
      npy: () => asNpy(labels),
      "ome.tif": () => asTiff(labels, this.#voxelSize()),
    };
    downloadBlob(files[kind](), `${this.stem}_corrected.${kind}`);
  }
}
