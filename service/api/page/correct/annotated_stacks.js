/** Corrected labels as annotated stacks: which ones were made of a result, how another one is, and a training with them. */

import { describeAnnotation, fetchAnnotations, keepDialog } from "../training/annotations.js";
import { trainingDialog } from "../training/training_dialog.js";
import * as kept from "../volumes/correction_store.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */

export class AnnotatedStacks {
  /**
   * @param {{job: import("openapi").JobReport, stack: string}} result @param {string} stem name of the file without its suffix
   * @param {import("openapi").Abilities} abilities of the service @param {import("./correct_panel.js").CorrectPanel} panel says what was kept
   */
  constructor({ job, stack }, stem, abilities, panel) {
    this.job = job;
    this.stack = stack;
    this.stem = stem;
    this.abilities = abilities;
    this.panel = panel;
  }

  /** Those that were made of the result, in any browser. */
  async #fetch() {
    return (await fetchAnnotations()).filter((one) => one.job === this.job.id);
  }

  /** Say which ones were made of the result, maybe in another browser. */
  async describe() {
    if (!this.abilities.corrections) return;
    const own = await this.#fetch().catch(() => []);
    const made = await kept.annotationsOf(this.job.id);
    const list = (/** @type {Annotation[]} */ some) =>
      some.map((one) => `${one.name} (${describeAnnotation(one)})`).join(", ");
    this.panel.describeAnnotated(list(own), list(own.filter(({ id }) => !made.includes(id))));
  }

  /**
   * Ask for a name, and keep labels with their stack.
   * @param {LabelEditor} editor @param {number} at time point, of a series @returns {Promise<boolean>} false: the reader thought better of it
   */
  async add(editor, at) {
    const { job, stack, stem } = this;
    const time = job.time_points ? at : undefined;
    const name = time === undefined ? stem : `${stem}, time ${time}`;
    const changes = editor.done.length;
    const report = await keepDialog({ labels: editor.labels, changes, stack, job: job.id, time, name });
    if (report === null) return false;
    await kept.addAnnotation(job.id, report.id);
    this.panel.say(`Kept as ${report.name}.`);
    this.describe();
    return true;
  }

  /** Train on what is corrected here, too: it is kept first. @param {LabelEditor} editor @param {number} at time point, of a series */
  async improve(editor, at) {
    try {
      if (!(await this.#has(editor, at)) && !(await this.add(editor, at))) return;
      await trainingDialog(this.abilities.training_minutes, this.job.model);
    } catch (error) {
      this.panel.say(/** @type {Error} */ (error).message);
    }
  }

  /** Whether no correction is missing among them. @param {LabelEditor} editor @param {number} at time point, of a series */
  async #has(editor, at) {
    const edits = editor.done.length;
    if (edits === 0 || !this.abilities.corrections) return true;
    const own = await this.#fetch();
    return own.some((one) => one.changes === edits && (!this.job.time_points || one.time === at));
  }
}
