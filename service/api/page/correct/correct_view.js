/** View for editing labels. It loads the labels at full resolution, and provides tools, undo and redo, saving and export. */

import { downloadBlob } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { Store } from "../core/store.js";
import { createRegion, describeRegion, togglePlane } from "../volumes/annotated_region.js";
import { removeHiddenObjects } from "../volumes/corrected_labels.js";
import * as correctionStore from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { encodeNifti, encodeNpy, encodeTiff, gzip } from "../volumes/label_files.js";
import { encodeCsv, measureObjects } from "../volumes/label_measure.js";
import { formatTimePoint } from "../volumes/time_points.js";
import { CorrectPanel } from "./correct_panel.js";
import { EditTools } from "./edit_tools.js";
import {
  explainSizeLimit,
  fetchImage,
  getFullResolutionVoxelSize,
  isFullResolution,
  showImage,
} from "./full_resolution.js";
import { SavedAnnotations } from "./saved_annotations.js";
import { getKeyAction } from "./tool_list.js";

/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

/** @typedef {Exclude<import("./correct_panel.js").FileKind, "csv">} LabelsKind */

const NO_LABELS_MESSAGE = "There are no labels to edit.";
const REFRESH_3D_DELAY_MILLISECONDS = 400;

const OPEN_IN_OTHER_TAB_MESSAGE =
  "These labels are being edited in another tab or window of this browser. The changes made there are saved. If you continue here, you can no longer edit the labels there.";
const MOVED_TO_OTHER_TAB_MESSAGE =
  "You are now editing these labels in another tab or window of this browser. All changes are saved.";

/**
 * The editor and the displayed image while labels are corrected, and the content that the views displayed before the
 * correction started.
 * @typedef {{editor: LabelEditor, region: Store<import("../volumes/annotated_region.js").Region>, image: Volume, previousContent: {image: Volume, labels: Volume | null, overlays: import("../viewer/scene.js").Overlay[]}}} CorrectionMode
 */

/** View whose `root` dispatches `count` with the numbers of corrections and objects, and `corrected` with the table of the corrected objects. */
export class CorrectView {
  /**
   * @param {import("./label_sources.js").LabelSource} source of the labels @param {string} name file name of the stack
   * @param {Viewer} viewer @param {number} time displayed time point, used if each time point has its own labels
   * @param {import("openapi").CallerLimits} capabilities of the service @param {AbortSignal} signal ends the view
   */
  constructor(source, name, viewer, time, capabilities, signal) {
    this.source = source;
    /** File name of the stack without its extension. */
    this.stem = (name || "stack").replace(/(\.ome)?\.tiff?$/i, "");
    this.viewer = viewer;
    /** The displayed time point, used if each time point has its own labels. */
    this.time = time;
    this.signal = signal;
    /** @type {CorrectionMode | null} */
    this.mode = null;
    /** Removes the tools and cancels their requests. */
    this.toolsAbort = new AbortController();
    /** Ends the display of corrected labels. */
    this.displayAbort = new AbortController();
    this.refreshTimer = 0;
    /** The key whose original labels this view has already stored. */
    this.storedLabelsKey = "";
    this.panel = new CorrectPanel(
      {
        undoOrRedo: (direction) => this.#undoOrRedo(direction),
        annotate: () => this.mode && this.savedAnnotations.save(this.mode, this.time),
        train: () => this.mode && this.savedAnnotations.openTraining(this.mode, this.time),
        save: (kind) => this.#saveFile(kind),
        discard: () => this.#discardCorrections(),
      },
      capabilities,
      source.isEmpty,
    );
    this.root = this.panel.root;
    this.savedAnnotations = new SavedAnnotations(source, this.stem, capabilities, this.panel);
    signal.addEventListener("abort", () => this.leave(false));
    this.reportStoredCorrections();
  }

  /** Report the number of stored corrections, and show the corrected labels. */
  async reportStoredCorrections() {
    const editCount = await correctionStore.countCorrections(this.key);
    this.#emit("count", { editCount, objectCount: null });
    if (editCount > 0 && !this.source.isEmpty) await this.showCorrectedLabels();
  }

  /** @param {string} name @param {unknown} detail */
  #emit(name, detail) {
    this.root.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** The key of the corrections in the store. */
  get key() {
    return correctionStore.makeKey(this.source, this.time);
  }

  /** Change the time point. @param {number} time displayed time point @param {boolean} isCorrecting whether to show the tools */
  async goToTimePoint(time, isCorrecting) {
    this.time = time;
    if (isCorrecting) await this.enter();
    else await this.reportStoredCorrections();
  }

  /** Show the tools, and the labels at full resolution with the stored corrections. @param {boolean} [force] whether to continue here if another tab is correcting the result */
  async enter(force = false) {
    this.#restoreViews();
    const labels = this.source.getProperties(this.viewer);
    const errorText = labels === null ? NO_LABELS_MESSAGE : explainSizeLimit(labels);
    if (errorText) return this.panel.showError(errorText);
    this.panel.showProgress("Loading the labels");
    const signal = this.#resetTools();
    const { key } = this;
    signal.addEventListener("abort", () => correctionStore.releaseResult(key));
    if (!(await correctionStore.claimResult(key, force)))
      return this.#offerToContinue(OPEN_IN_OTHER_TAB_MESSAGE, "Continue here", true);
    if (signal.aborted) return correctionStore.releaseResult(key);
    correctionStore.listenForClaims(key, () => this.#pauseForOtherTab(), signal);
    try {
      const { mode, editsMatch } = await this.#openEditor(signal);
      if (signal.aborted) return undefined;
      this.#showTools(mode);
      await this.#showRestoredCount(mode.editor.edits, editsMatch);
    } catch (error) {
      if (!signal.aborted) this.panel.showError(/** @type {Error} */ (error).message);
    }
    return undefined;
  }

  /** Remove the previous tools and cancel their requests. @returns {AbortSignal} signal for the new tools and their requests */
  #resetTools() {
    this.toolsAbort.abort();
    this.toolsAbort = new AbortController();
    return this.toolsAbort.signal;
  }

  /** Report the number of restored corrections. @param {import("../volumes/label_edit.js").Edit[]} edits @param {boolean} editsMatch whether the corrections match the labels */
  async #showRestoredCount(edits, editsMatch) {
    const editCount = edits.filter(({ kind }) => kind !== "open").length;
    if (!editsMatch) {
      await correctionStore.saveCorrection(this.key, 0, null);
      this.panel.showHint("The saved changes do not match these labels and were discarded.");
    } else if (edits.length > 0 && editCount === 0)
      this.panel.showHint("The annotated stack was loaded from the server.");
    else if (editCount > 0)
      this.panel.showHint(
        `${formatCount(editCount, `saved ${this.panel.noun}`)} ${editCount === 1 ? "was" : "were"} restored.`,
      );
  }

  /** Show the labels with the stored corrections but without the tools, if the labels are loaded at full resolution. */
  async showCorrectedLabels() {
    const { labels } = this.viewer.scene.state;
    if (this.mode || this.source.isSeries || !labels || !isFullResolution(labels) || explainSizeLimit(labels)) return;
    const signal = this.#resetTools();
    try {
      await this.#openEditor(signal);
    } catch {
      // The Correct tab shows the error.
    }
    if (!signal.aborted) this.leave();
  }

  /** @param {string} text explains why correction is paused @param {string} buttonText @param {boolean} force */
  #offerToContinue(text, buttonText, force) {
    this.panel.showContinueButton(text, buttonText, () => this.enter(force));
  }

  /** Pause because another tab has started to correct the result. */
  #pauseForOtherTab() {
    this.leave();
    this.#offerToContinue(MOVED_TO_OTHER_TAB_MESSAGE, "Continue here", true);
  }

  /** Show the labels with the stored corrections. @param {AbortSignal} signal @returns {Promise<{mode: CorrectionMode, editsMatch: boolean}>} editsMatch: whether the corrections match the labels */
  async #openEditor(signal) {
    const { viewer, source, key } = this;
    const { image, labels, overlays } = viewer.scene.state;
    if (image === null) throw new Error(NO_LABELS_MESSAGE);
    const editableLabels = await source.fetch(viewer, this.time, signal);
    const fullImage = (await fetchImage(image, viewer, signal)) ?? editableLabels;
    const edits = await correctionStore.loadCorrections(key);
    const storedRegion = await correctionStore.loadRegion(key);
    signal.throwIfAborted();
    const editor = new LabelEditor(editableLabels, getFullResolutionVoxelSize(viewer.scene.state, image));
    const editsMatch = editor.restore(edits);
    // The other channels of a large stack are subsampled and cannot be overlaid at full resolution.
    if (fullImage !== image) viewer.scene.set({ overlays: [] });
    showImage(viewer, fullImage);
    viewer.setLabels(editableLabels);
    const region = new Store(storedRegion ?? createRegion(source.isEmpty ? "planes" : "whole"));
    region.subscribe(() => {
      correctionStore.saveRegion(key, region.state);
      this.#saveDescription();
    });
    const mode = { editor, region, image: fullImage, previousContent: { image, labels, overlays } };
    this.mode = mode;
    this.displayAbort = new AbortController();
    viewer.addEventListener("draw", () => this.#pauseIfSubsampled(), { signal: this.displayAbort.signal });
    return { mode, editsMatch };
  }

  /** @param {CorrectionMode} mode */
  #showTools({ editor, region }) {
    const { viewer, panel, source } = this;
    const { signal } = this.toolsAbort;
    const callbacks = {
      onedit: () => this.#showAndStoreNewestEdit(editor),
      showHint: (/** @type {string} */ text) => panel.showHint(text),
    };
    const tools = new EditTools(viewer, editor, region, callbacks, signal);
    tools.addEventListener("tool", () => panel.updateTool());
    panel.tools = tools;
    if (source.isEmpty) tools.brush.isSpherical = false;
    const showSelection = () => panel.showSelection(editor, viewer.scene.state);
    viewer.addEventListener("draw", showSelection, { signal });
    // The controls for deleting objects may have changed the colors.
    signal.addEventListener("abort", () => viewer.scene.set({ colorIndices: null }));
    panel.suggestionControls.reset(source, signal);
    const { regionControls } = panel;
    viewer.addEventListener("draw", () => regionControls.updatePlane(), { signal });
    tools.addEventListener("view", () => regionControls.updatePlane());
    region.subscribe(() => regionControls.update(), signal);
    regionControls.update();
    for (const root of [viewer.root, this.root])
      root.addEventListener("keydown", (event) => this.#onKey(event), { signal });
    panel.show(this.#introduce(), source.getConfidences(this.time));
    this.#showCounts(editor);
    showSelection();
    this.savedAnnotations.updatePanel();
    tools.activate(source.isEmpty && editor.edits.length === 0 ? "paint" : "select");
  }

  /** Explain which labels are edited. */
  #introduce() {
    const { isEmpty, isSeries } = this.source;
    const timeText = isSeries ? `These are the labels of time point ${formatTimePoint(this.time)}. ` : "";
    if (isEmpty)
      return `${timeText}Label every object in a few planes, mark these planes with P, then save the annotation and train a model with it. All changes are saved in this browser.`;
    return isSeries
      ? `${timeText}Each time point is corrected separately. The table on the Objects tab does not include corrections.`
      : "The table on the Objects tab is updated when you open that tab.";
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const { tools } = this.panel;
    if (tools === null) return;
    const { region } = tools;
    const action = getKeyAction(event, tools, {
      undoOrRedo: (direction) => this.#undoOrRedo(direction),
      markPlane: () => region.set(togglePlane(region.state, tools.currentPlane)),
    });
    if (!action) return;
    event.preventDefault();
    action();
  }

  /**
   * Remove the tools, and dispatch `corrected`. The corrections remain stored.
   * @param {boolean} [keepCorrectedLabels] whether the views continue to show the corrected labels
   */
  leave(keepCorrectedLabels = true) {
    const { mode, panel } = this;
    panel.tools?.activate("select");
    this.toolsAbort.abort();
    this.viewer.fetchStatus.textContent = "";
    if (mode === null) return;
    panel.tools = null;
    const showsCorrectedLabels =
      keepCorrectedLabels && mode.editor.edits.length > 0 && !this.source.isSeries && !this.signal.aborted;
    if (!showsCorrectedLabels) this.#restoreViews();
    this.#emit("corrected", showsCorrectedLabels ? this.#measureObjects(mode) : null);
  }

  /** Show the original labels again, unless the views already show something else. */
  #restoreViews() {
    const { mode, viewer } = this;
    this.mode = this.panel.tools = null;
    this.displayAbort.abort();
    if (mode === null) return;
    const { image, labels, overlays } = mode.previousContent;
    if (viewer.scene.state.image === mode.image && mode.image !== image) {
      viewer.scene.set({ overlays });
      showImage(viewer, image);
    }
    if (viewer.scene.state.labels === mode.editor.labels) viewer.setLabels(labels);
  }

  /** Create the table of the corrected objects. @param {CorrectionMode} mode */
  #measureObjects({ editor, image }) {
    const intensities = image === editor.labels ? null : image;
    return measureObjects(
      editor.labels,
      intensities,
      editor.objects.keys(),
      this.viewer.scene.state.isCalibrated ? editor.voxelSize : null,
    );
  }

  /** Pause if the views show a subsampled image, such as another channel. A subsampled image does not match the labels at full resolution. */
  #pauseIfSubsampled() {
    const { image } = this.viewer.scene.state;
    if (image === null || isFullResolution(image)) return;
    const isCorrecting = this.panel.tools !== null;
    this.leave(false);
    if (isCorrecting) this.#offerToContinue("The image was reloaded. Your changes are saved.", "Continue", false);
  }

  /** Show the numbers of objects and corrections. @param {LabelEditor} editor */
  #showCounts(editor) {
    this.panel.showCounts(editor);
    this.#emit("count", { editCount: editor.edits.length, objectCount: editor.objects.size });
  }

  /** Show and store the newest correction. @param {LabelEditor} editor */
  #showAndStoreNewestEdit(editor) {
    const { edits } = editor;
    this.#showCounts(editor);
    this.#storeEdit(edits.length - 1, edits[edits.length - 1]);
    this.#refresh3d();
  }

  /** @param {"undo" | "redo"} direction */
  #undoOrRedo(direction) {
    const { mode, panel } = this;
    const edit = panel.tools?.[direction]();
    if (!mode || !edit) return;
    panel.showHistoryStep(direction, edit.kind);
    const { edits } = mode.editor;
    this.#storeEdit(direction === "undo" ? edits.length : edits.length - 1, direction === "undo" ? null : edit);
    this.#showCounts(mode.editor);
    this.#refresh3d();
  }

  async #discardCorrections() {
    const { mode, panel } = this;
    if (mode === null || mode.editor.edits.length === 0) return;
    const editCount = mode.editor.edits.length;
    while (mode.editor.undo() !== null);
    panel.tools?.cancel();
    await correctionStore.saveCorrection(this.key, 0, null);
    this.#showCounts(mode.editor);
    this.#refresh3d();
    panel.showHint(`${formatCount(editCount, panel.noun)} discarded. Press Redo to restore them one by one.`);
  }

  /** Store a correction at its index, or delete all corrections from that index onward. @param {number} index @param {import("../volumes/label_edit.js").Edit | null} edit null to delete */
  async #storeEdit(index, edit) {
    const outcome = await correctionStore.saveCorrection(this.key, index, edit);
    if (outcome === "unavailable")
      this.panel.showHint("This browser cannot save changes. They will be lost when you close the page.");
    if (outcome === "owned-by-other-tab") this.#pauseForOtherTab();
    if (outcome !== "saved") return;
    if (this.source.isEmpty) await this.#saveDescription();
    else if (edit !== null) await this.#storeOriginalLabels();
  }

  /** Save the description of an annotation that was started from nothing, so that the start screen can list it. */
  async #saveDescription() {
    const { mode, source, key, stem } = this;
    if (mode === null || !source.isEmpty) return;
    const { editor, region } = mode;
    await correctionStore.saveDescription(key, {
      name: stem,
      fragment: source.getFragment(),
      objectCount: editor.objects.size,
      regionText: describeRegion(region.state),
      changed: new Date().toISOString(),
      shape: editor.labels.shape,
      voxelSize: this.#getVoxelSize(),
    });
  }

  /** Store the original labels alongside the corrections, because the service may delete the result. */
  async #storeOriginalLabels() {
    const { mode, key } = this;
    if (mode === null || this.storedLabelsKey === key) return;
    this.storedLabelsKey = key;
    if (await correctionStore.loadOriginalLabels(key)) return;
    const data = mode.editor.copyOriginalData();
    const zipped = await gzip(new Blob([/** @type {BlobPart} */ (data)]));
    const { shape } = mode.editor.labels;
    await correctionStore.saveOriginalLabels(key, {
      zipped,
      bytes: data.BYTES_PER_ELEMENT,
      shape,
      voxelSize: this.#getVoxelSize(),
    });
  }

  /** Update the 3D rendering after a pause in editing, because each update copies the labels into textures. */
  #refresh3d() {
    clearTimeout(this.refreshTimer);
    this.refreshTimer = window.setTimeout(() => this.viewer.corner.refresh3d(), REFRESH_3D_DELAY_MILLISECONDS);
  }

  /** Return the voxel size, or null if it is unknown. */
  #getVoxelSize() {
    const [z, y, x] = this.mode?.editor.voxelSize ?? [1, 1, 1];
    return this.viewer.scene.state.isCalibrated ? { z, y, x } : null;
  }

  /** Editor of the labels if the views show the corrected labels, otherwise null. */
  get editor() {
    return this.mode?.editor ?? null;
  }

  /** Encode corrected labels. @param {LabelsKind} kind @param {Uint8Array | null} hiddenFlags for each id, 1 to leave out the object; null for all objects @returns {Blob | Promise<Blob>} */
  encodeLabels(kind, hiddenFlags) {
    if (this.editor === null) throw new Error(NO_LABELS_MESSAGE);
    const shownLabels = removeHiddenObjects(this.editor.labels, hiddenFlags);
    if (kind === "npy") return encodeNpy(shownLabels);
    return (kind === "nii.gz" ? encodeNifti : encodeTiff)(shownLabels, this.#getVoxelSize());
  }

  /** Save the corrected labels or their table as a file. @param {import("./correct_panel.js").FileKind} kind */
  async #saveFile(kind) {
    const { mode } = this;
    if (mode === null) return;
    const blob =
      kind === "csv"
        ? new Blob([encodeCsv(this.#measureObjects(mode))], { type: "text/csv" })
        : await this.encodeLabels(kind, null);
    downloadBlob(blob, `${this.stem}_${this.source.isEmpty ? "labels" : "corrected"}.${kind}`);
  }
}
