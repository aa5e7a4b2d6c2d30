/** Annotated stacks created from the corrections of a result, and training with them. */

import { describeAnnotation, fetchAnnotations, saveAnnotationDialog } from "../training/annotations.js";
import { trainingDialog } from "../training/training_dialog.js";
import * as correctionStore from "../volumes/correction_store.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */

export class AnnotatedStacks {
  /**
   * @param {{job: import("openapi").JobReport, stack: string}} result @param {string} stem name of the file without its extension
   * @param {import("openapi").Abilities} abilities of the service @param {import("./correct_panel.js").CorrectPanel} panel shows the saved stacks
   */
  constructor({ job, stack }, stem, abilities, panel) {
    this.job = job;
    this.stack = stack;
    this.stem = stem;
    this.abilities = abilities;
    this.panel = panel;
  }

  /** Fetch the annotated stacks created from the result, including those from other browsers. */
  async #fetch() {
    return (await fetchAnnotations()).filter((annotation) => annotation.job === this.job.id);
  }

  /** Show the annotated stacks created from the result, including those from other browsers. */
  async describe() {
    if (!this.abilities.corrections) return;
    const annotations = await this.#fetch().catch(() => []);
    const ownIds = await correctionStore.annotationsOf(this.job.id);
    const list = (/** @type {Annotation[]} */ selected) =>
      selected.map((annotation) => `${annotation.name} (${describeAnnotation(annotation)})`).join(", ");
    this.panel.describeAnnotated(list(annotations), list(annotations.filter(({ id }) => !ownIds.includes(id))));
  }

  /**
   * Ask for a name, and save the labels as an annotated stack.
   * @param {LabelEditor} editor @param {number} timePoint used if the job is a series @returns {Promise<boolean>} false if the user canceled
   */
  async add(editor, timePoint) {
    const { job, stack, stem } = this;
    const time = job.time_points ? timePoint : undefined;
    const name = time === undefined ? stem : `${stem}, time ${time}`;
    const changes = editor.done.length;
    const report = await saveAnnotationDialog({ labels: editor.labels, changes, stack, job: job.id, time, name });
    if (report === null) return false;
    await correctionStore.addAnnotation(job.id, report.id);
    this.panel.showHint(`Saved as ${report.name}.`);
    this.describe();
    return true;
  }

  /** Open the training dialog. Unsaved corrections are saved as an annotated stack first. @param {LabelEditor} editor @param {number} timePoint used if the job is a series */
  async improve(editor, timePoint) {
    try {
      if (!(await this.#isSaved(editor, timePoint)) && !(await this.add(editor, timePoint))) return;
      await trainingDialog(this.abilities.training_minutes, this.job.model);
    } catch (error) {
      this.panel.showHint(/** @type {Error} */ (error).message);
    }
  }

  /** Return whether an annotated stack has all current corrections. @param {LabelEditor} editor @param {number} timePoint used if the job is a series */
  async #isSaved(editor, timePoint) {
    const edits = editor.done.length;
    if (edits === 0 || !this.abilities.corrections) return true;
    const annotations = await this.#fetch();
    return annotations.some(({ changes, time }) => changes === edits && (!this.job.time_points || time === timePoint));
  }
}
