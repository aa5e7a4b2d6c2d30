/** Explanations of why there is no result: the job failed, was canceled or expired, or the service no longer has it. */

import { button, element, formatMessage } from "../core/elements.js";
import { toPageTerms } from "../core/terminology.js";

/** Create an explanation of why a job has no result. @param {Pick<import("openapi").JobReport, "state"> & Partial<import("openapi").JobReport>} job that ended without a result */
export function createFailureExplanation(job) {
  /** @type {Partial<Record<import("openapi").JobReport["state"], string>>} */
  const titles = {
    failed: "The segmentation failed",
    cancelled: "The segmentation was canceled",
    expired: "The result has expired",
  };
  return element(
    "div",
    { class: "run" },
    element("h2", {}, titles[job.state] ?? job.state),
    element(
      "p",
      { class: job.problem ? "warning-text" : "muted" },
      formatMessage(
        job.problem ? toPageTerms(job.problem.detail) : "Change the settings if necessary, and press Segment again.",
      ),
    ),
  );
}

/** Create an explanation of why the page cannot show a result that the service has. @param {Error} error @param {() => unknown} retry */
export function createUnreadableResultExplanation(error, retry) {
  return element(
    "div",
    { class: "run" },
    element("h2", {}, "The result cannot be shown"),
    element("p", { class: "warning-text", role: "alert" }, formatMessage(error)),
    button("Try again", retry, "secondary"),
  );
}

/** Create an explanation of why the service no longer has a job. @param {boolean} isTemporary whether the service deletes its jobs when it stops @param {boolean} isStackMissing whether the service no longer stores the stack either */
export function createMissingJobExplanation(isTemporary, isStackMissing) {
  const reason = isTemporary
    ? "The service stores jobs only until it stops, and was restarted."
    : "The job was deleted, or the service was restarted with another folder for its jobs.";
  const nextStep = isStackMissing
    ? "The stack is no longer stored either. Open the file again."
    : "Press Segment to segment the stack again.";
  return element(
    "div",
    { class: "run" },
    element("h2", {}, "The service no longer has this job"),
    element("p", { class: "warning-text" }, `${reason} ${nextStep}`),
  );
}
