/** Explanations that are shown next to the views before a stack is segmented, or if a job has no result. */

import { createShortcutList, element } from "../core/elements.js";
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
      job.problem ? toPageTerms(job.problem.detail) : "Change the settings if necessary, and press Segment again.",
    ),
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

/** Create an explanation of why a stack cannot be shown. @param {import("../core/requests.js").Problem} problem */
export function createUnreadableStackExplanation(problem) {
  const title = problem.slug === "ambiguous-axes" ? "Select the axes" : "This stack cannot be segmented";
  const text =
    problem.slug === "ambiguous-axes"
      ? "The file does not specify its axes. Select them on the left, then check the slices."
      : toPageTerms(problem.message);
  return element(
    "div",
    { class: "run" },
    element("h2", {}, title),
    element("p", { class: "muted" }, text),
    problem.slug !== "ambiguous-axes" && element("a", { href: "#" }, "Open another file"),
  );
}

/** Create a list of what to check before segmenting a stack, with the shortcuts of the views. */
export function createChecklist() {
  return element(
    "div",
    { class: "run" },
    element("h2", {}, "Check your stack"),
    element(
      "p",
      { class: "muted" },
      "If the slices, the channel and the proportions look right, press Segment to outline, count and measure the objects.",
    ),
    element("h3", {}, "Navigation"),
    createShortcutList([
      ["Wheel, J and K, arrow keys", "next or previous plane"],
      ["Drag", "move the view"],
      ["Ctrl + wheel, + and −", "zoom"],
      ["Click", "move the crosshair, select an object"],
      ["O", "show or hide objects"],
      ["F", "fill objects"],
      ["0", "fit to view"],
    ]),
  );
}
