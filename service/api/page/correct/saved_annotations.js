/** Annotated stacks that were saved from the edited labels, and training with these stacks. */

import { describeAnnotation, fetchAnnotations } from "../training/annotation_list.js";
import { openTrainingDialog } from "../training/training_dialog.js";
import { encodeRegion } from "../volumes/annotated_region.js";
import * as correctionStore from "../volumes/correction_store.js";
import { formatTimePoint } from "../volumes/time_points.js";
import { openSaveAnnotationDialog } from "./save_annotation_dialog.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */
/** @typedef {import("./correct_view.js").CorrectionMode} CorrectionMode */

/** The annotated stacks created from the labels of one source. */
export class SavedAnnotations {
  /**
   * @param {import("./label_sources.js").LabelSource} source of the labels @param {string} stem file name without its extension
   * @param {import("openapi").CallerLimits} capabilities of the service @param {import("./correct_panel.js").CorrectPanel} panel shows the saved stacks
   */
  constructor(source, stem, capabilities, panel) {
    this.source = source;
    this.stem = stem;
    this.capabilities = capabilities;
    this.panel = panel;
    /** The region of the annotated stack that was saved last, null if none was saved since the page was opened. @type {import("../volumes/annotated_region.js").Region | null} */
    this.savedRegion = null;
  }

  /** Show the annotated stacks in the panel. */
  async updatePanel() {
    if (!this.capabilities.corrections) return;
    const allAnnotations = await fetchAnnotations().catch(() => []);
    const ownIds = await correctionStore.loadAnnotationIds(this.source.id);
    const describeList = (/** @type {Annotation[]} */ annotations) =>
      annotations.map((annotation) => `${annotation.name} (${describeAnnotation(annotation)})`).join(", ");
    const annotations = allAnnotations.filter((annotation) => this.#isFromSource(annotation, ownIds));
    const otherBrowserAnnotations = annotations.filter(({ id }) => !ownIds.includes(id));
    this.panel.showSavedAnnotations(describeList(annotations), describeList(otherBrowserAnnotations));
  }

  /** Return whether an annotated stack was created from these labels: those of a result in any browser, others in this browser. @param {Annotation} annotation @param {string[]} ownIds ids of the annotated stacks that were created in this browser */
  #isFromSource({ id, job }, ownIds) {
    return this.source.isEmpty ? ownIds.includes(id) : job === this.source.id;
  }

  /**
   * Ask the user for a name, and save the labels as an annotated stack.
   * @param {CorrectionMode} mode @param {number} timePoint displayed time point, used if each time point has its own labels @returns {Promise<boolean>} false if the user canceled
   */
  async save({ editor, region }, timePoint) {
    const { source, stem } = this;
    const name = source.isSeries ? `${stem}, time ${formatTimePoint(timePoint)}` : stem;
    const query = { ...source.getQuery(timePoint), changes: editor.edits.length };
    const earlier = await this.#findNewest(timePoint);
    const report = await openSaveAnnotationDialog({ editor, region: region.state, query, name, earlier });
    if (report === null) return false;
    await correctionStore.addAnnotationId(source.id, report.id);
    this.savedRegion = region.state;
    const buttonText = source.isEmpty ? "Train a model" : "Improve the model";
    const advice = this.capabilities.training ? ` Press “${buttonText}” to train on it.` : "";
    this.panel.showHint(`Saved as ${report.name}.${advice}`);
    this.updatePanel();
    return true;
  }

  /** Find the annotated stack that was saved last from these labels. @param {number} timePoint displayed time point, used if each time point has its own labels @returns {Promise<Annotation | null>} */
  async #findNewest(timePoint) {
    const ownIds = await correctionStore.loadAnnotationIds(this.source.id);
    const annotations = await fetchAnnotations().catch(() => []);
    return (
      annotations.find(({ id, time }) => ownIds.includes(id) && (!this.source.isSeries || time === timePoint)) ?? null
    );
  }

  /** Open the training dialog, after saving any unsaved corrections as an annotated stack. @param {CorrectionMode} mode @param {number} timePoint displayed time point, used if each time point has its own labels */
  async openTraining(mode, timePoint) {
    try {
      if (!(await this.#isSaved(mode, timePoint)) && !(await this.save(mode, timePoint))) return;
      await openTrainingDialog(this.capabilities.training_minutes, this.source.model);
    } catch (error) {
      this.panel.showHint(/** @type {Error} */ (error).message);
    }
  }

  /** Return whether all current corrections and the region are saved in an annotated stack. @param {CorrectionMode} mode @param {number} timePoint displayed time point, used if each time point has its own labels */
  async #isSaved({ editor, region }, timePoint) {
    if (this.savedRegion !== null && this.savedRegion !== region.state) return false;
    const query = encodeRegion(editor, region.state);
    const editCount = editor.edits.length;
    // The labels of an annotated stack that was opened again count as one edit.
    const isUnchanged = editCount > 0 && editor.edits.every(({ kind }) => kind === "open");
    if (!this.capabilities.corrections) return true;
    if (editCount === 0) return !this.source.isEmpty;
    const ownIds = await correctionStore.loadAnnotationIds(this.source.id);
    return (await fetchAnnotations()).some(
      (annotation) =>
        this.#isFromSource(annotation, ownIds) &&
        (isUnchanged || annotation.changes === editCount) &&
        (annotation.region ?? "") === query.region &&
        annotation.ignore_label === (query.ignore_label ?? null) &&
        annotation.partial === Boolean(query.partial) &&
        (!this.source.isSeries || annotation.time === timePoint),
    );
  }
}
