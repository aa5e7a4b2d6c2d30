/** Annotated stacks that are created from the corrections of a result, and training with these stacks. */

import { describeAnnotation, fetchAnnotations, openSaveAnnotationDialog } from "../training/annotations.js";
import { openTrainingDialog } from "../training/training_dialog.js";
import * as correctionStore from "../volumes/correction_store.js";
import { formatTimePoint } from "../volumes/time_points.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */

/** The annotated stacks created from the corrections of one result. */
export class AnnotatedStacks {
  /**
   * @param {{job: import("openapi").JobReport, stack: string}} result stack: id of the stack @param {string} stem file name without its extension
   * @param {import("openapi").CallerLimits} capabilities of the service @param {import("./correct_panel.js").CorrectPanel} panel shows the saved stacks
   */
  constructor({ job, stack }, stem, capabilities, panel) {
    this.job = job;
    this.stack = stack;
    this.stem = stem;
    this.capabilities = capabilities;
    this.panel = panel;
  }

  /** Fetch the annotated stacks created from the result, including those from other browsers. */
  async #fetchAnnotationsOfResult() {
    return (await fetchAnnotations()).filter((annotation) => annotation.job === this.job.id);
  }

  /** Show the annotated stacks in the panel. */
  async updatePanel() {
    if (!this.capabilities.corrections) return;
    const allAnnotations = await this.#fetchAnnotationsOfResult().catch(() => []);
    const ownIds = await correctionStore.loadAnnotationIds(this.job.id);
    const describeList = (/** @type {Annotation[]} */ annotations) =>
      annotations.map((annotation) => `${annotation.name} (${describeAnnotation(annotation)})`).join(", ");
    const otherBrowserAnnotations = allAnnotations.filter(({ id }) => !ownIds.includes(id));
    this.panel.showAnnotatedStacks(describeList(allAnnotations), describeList(otherBrowserAnnotations));
  }

  /**
   * Ask the user for a name, and save the labels as an annotated stack.
   * @param {LabelEditor} editor @param {number} timePoint displayed time point, used if the job segmented a time series @returns {Promise<boolean>} false if the user canceled
   */
  async save(editor, timePoint) {
    const { job, stack, stem } = this;
    const time = job.time_points ? timePoint : undefined;
    const name = time === undefined ? stem : `${stem}, time ${formatTimePoint(time)}`;
    const correctionCount = editor.edits.length;
    const report = await openSaveAnnotationDialog({
      labels: editor.labels,
      correctionCount,
      stack,
      job: job.id,
      time,
      name,
    });
    if (report === null) return false;
    await correctionStore.addAnnotationId(job.id, report.id);
    this.panel.showHint(`Saved as ${report.name}.`);
    this.updatePanel();
    return true;
  }

  /** Open the training dialog, after saving any unsaved corrections as an annotated stack. @param {LabelEditor} editor @param {number} timePoint displayed time point, used if the job segmented a time series */
  async openTraining(editor, timePoint) {
    try {
      if (!(await this.#isSaved(editor, timePoint)) && !(await this.save(editor, timePoint))) return;
      await openTrainingDialog(this.capabilities.training_minutes, this.job.model);
    } catch (error) {
      this.panel.showHint(/** @type {Error} */ (error).message);
    }
  }

  /** Return whether all current corrections are saved in an annotated stack. @param {LabelEditor} editor @param {number} timePoint displayed time point, used if the job segmented a time series */
  async #isSaved(editor, timePoint) {
    const editCount = editor.edits.length;
    if (editCount === 0 || !this.capabilities.corrections) return true;
    const annotations = await this.#fetchAnnotationsOfResult();
    return annotations.some(
      ({ changes, time }) => changes === editCount && (!this.job.time_points || time === timePoint),
    );
  }
}
