/** Progress of a running job: its state as the service reports it, the remaining time, and a button that cancels the job. */

import { connection, formatTime } from "../core/connection.js";
import { element } from "../core/elements.js";
import { formatCount, formatDuration } from "../core/format.js";

/** @typedef {import("openapi").JobReport} Job */

/** The progress bar and the descriptions of an unfinished job. */
export class ProgressView {
  /**
   * @param {HTMLElement} root @param {boolean} isTemporary whether the service deletes its jobs when it stops
   * @param {AbortSignal} signal ends the view @param {() => void} oncancel called when the user cancels the job
   */
  constructor(root, isTemporary, signal, oncancel) {
    this.isCanceling = false;
    /** The last report, null before the first one. @type {Job | null} */
    this.job = null;
    this.reportedAt = new Date();
    this.heading = element("h2", {}, "Segmenting");
    this.progressBar = element("progress", { max: 1, "aria-label": "Progress of the job" });
    this.stateText = element("p", { class: "big", role: "status" });
    this.detailText = element("p", { class: "muted" });
    this.leaveText = element(
      "p",
      { class: "muted small" },
      `You can leave this page. The job continues${isTemporary ? " as long as the service runs" : ""}, and the start screen lists it.`,
    );
    const onclick = () => {
      this.isCanceling = this.cancelButton.disabled = true;
      this.#update();
      oncancel();
    };
    this.cancelButton = element("button", { type: "button", class: "secondary", onclick }, "Cancel");
    const { heading, stateText, progressBar, detailText, leaveText, cancelButton } = this;
    root.replaceChildren(
      element("div", { class: "run" }, heading, stateText, progressBar, detailText, leaveText, cancelButton),
    );
    connection.subscribe(() => this.#update(), signal);
    this.#update();
  }

  /** @param {Job} job */
  show(job) {
    this.job = job;
    this.reportedAt = new Date();
    this.#update();
  }

  #update() {
    const isLost = connection.state.lostAt !== null;
    this.heading.textContent = isLost ? "Connection lost" : "Segmenting";
    this.leaveText.hidden = isLost || this.isCanceling || this.job === null;
    this.progressBar.hidden = isLost;
    if (isLost) this.#showLostConnection();
    else this.#showReport();
  }

  /** Show the last report as such, because the service may have stopped since. */
  #showLostConnection() {
    const { job, isCanceling, reportedAt } = this;
    this.stateText.textContent = "The service does not respond";
    const lastReport = job
      ? `Last report at ${formatTime(reportedAt)}: ${describeProgress(job)}.`
      : "The request may not have arrived.";
    const nextStep = isCanceling
      ? "The job is canceled as soon as the service responds. Keep this page open until then."
      : "This page reconnects automatically, and then shows the state of the job.";
    this.detailText.textContent = `${lastReport} ${nextStep}`;
  }

  #showReport() {
    const { job } = this;
    const { done, total } = job?.progress ?? { done: 0, total: 0 };
    if (job?.state === "running" && total) this.progressBar.value = Math.min(done / total, 1);
    else this.progressBar.removeAttribute("value");
    const stateText = job ? describeState(job) : "Sending the request";
    this.stateText.textContent = this.isCanceling ? "Canceling" : stateText;
    const remainingText = job === null || job.seconds_left === null ? "" : `${formatDuration(job.seconds_left)} left`;
    this.detailText.textContent = [job && describePercentage(job), remainingText].filter(Boolean).join(", ");
  }
}

/** @param {Job} job */
export function describeProgress(job) {
  return [describeState(job), describePercentage(job)].filter(Boolean).join(", ");
}

/** @param {Job} job @returns {string} "" unless the job is running */
function describePercentage({ state, progress: { done, total } }) {
  return state === "running" && total ? `${Math.floor((100 * done) / total)}% done` : "";
}

/** @param {Job} job */
function describeState(job) {
  if (job.state === "loading") return "Loading the model";
  if (job.state === "waiting")
    return job.position && job.position > 1
      ? `${formatCount(job.position - 1, "job")} ahead in the queue`
      : "Reading the stack";
  return job.progress.total && job.progress.done >= job.progress.total ? "Writing the result" : "Segmenting the stack";
}
