/** Texts beside the views: before a stack is segmented, and where there is no result. */

import { element, keyList } from "../core/elements.js";
import { pageWords } from "../core/words.js";

/** @param {import("openapi").JobReport} job that is over without a result */
export function afterJob(job) {
  /** @type {Partial<Record<import("openapi").JobReport["state"], string>>} */
  const words = { failed: "The job has failed", cancelled: "Cancelled", expired: "The result had to make room" };
  return element(
    "div",
    { class: "run" },
    element("h2", {}, words[job.state] ?? job.state),
    element(
      "p",
      { class: job.problem ? "warning-text" : "muted" },
      job.problem ? pageWords(job.problem.detail) : "Change what you like, and segment again.",
    ),
  );
}

/** @param {import("../core/requests.js").Problem} problem that keeps the stack from being shown */
export function unreadable(problem) {
  const title = problem.slug === "ambiguous-axes" ? "One thing to settle" : "This stack cannot be segmented as it is";
  const text =
    problem.slug === "ambiguous-axes"
      ? "The file does not say which axis is which. Choose on the left; the slices then show whether it is right."
      : problem.message;
  return element("div", { class: "run" }, element("h2", {}, title), element("p", { class: "muted" }, text));
}

export function beforeRun() {
  return element(
    "div",
    { class: "run" },
    element("h2", {}, "Is this what you recorded?"),
    element(
      "p",
      { class: "muted" },
      "Check the slices, the channel and the proportions. Then press Segment: objects are outlined here, counted and measured.",
    ),
    element("h3", {}, "Moving about"),
    keyList([
      ["wheel, j and k, arrows", "next plane"],
      ["drag", "move"],
      ["ctrl + wheel, + and −", "zoom"],
      ["click", "crosshair, object"],
      ["o, f", "objects on or off, filled"],
      ["0", "fit"],
    ]),
  );
}
