/** Corrected labels as annotated stacks: which ones were made of a result, and how another one is. */

import { describeAnnotation, fetchAnnotations, keepDialog } from "../training/annotations.js";
import * as kept from "../volumes/correction_store.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */
/** @typedef {import("openapi").JobReport} Job */

/** @param {Job} job @returns {Promise<{own: string, foreign: string}>} those that were made of its labels, in words; foreign: those of other browsers */
export async function describeAnnotations(job) {
  const own = await fetchOf(job).catch(() => []);
  const made = await kept.annotationsOf(job.id);
  const list = (/** @type {Annotation[]} */ some) =>
    some.map((one) => `${one.name} (${describeAnnotation(one)})`).join(", ");
  return { own: list(own), foreign: list(own.filter(({ id }) => !made.includes(id))) };
}

/** @param {Job} job @param {number} time point that is corrected, of a series @param {number} edits @returns {Promise<boolean>} whether no correction is missing */
export async function isAnnotated(job, time, edits) {
  const own = await fetchOf(job);
  return own.some((one) => one.changes === edits && (!job.time_points || one.time === time));
}

/** @param {Job} job */
async function fetchOf(job) {
  return (await fetchAnnotations()).filter((one) => one.job === job.id);
}

/**
 * Ask for a name, and keep labels with their stack.
 * @param {{job: Job, stack: string, stem: string, time: number}} result stem: name of the file without its suffix
 * @param {import("../volumes/label_edit.js").LabelEditor} editor
 * @returns {Promise<Annotation | null>} null: the reader thought better of it
 */
export async function annotate({ job, stack, stem, time: at }, editor) {
  const time = job.time_points ? at : undefined;
  const name = time === undefined ? stem : `${stem}, time ${time}`;
  const changes = editor.done.length;
  const report = await keepDialog({ labels: editor.labels, changes, stack, job: job.id, time, name });
  if (report) await kept.addAnnotation(job.id, report.id);
  return report;
}
