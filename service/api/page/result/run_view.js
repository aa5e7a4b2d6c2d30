/** Progress of a job: its state, the remaining time, and a button that cancels the job. */

import { button, element } from "../core/elements.js";
import { formatCount, formatDuration } from "../core/format.js";
import { request, requestJson } from "../core/requests.js";

/** @typedef {import("openapi").JobReport} Job */

const POLL_INTERVAL_MILLISECONDS = 400;

/** @param {string} state */
export function isFinished(state) {
  return ["done", "failed", "cancelled", "expired"].includes(state);
}

/**
 * Poll a job until it is finished. If the service does not respond, keep trying, because the service may be restarting.
 * @param {string} id @param {AbortSignal} signal @param {(job: Job) => void} onpoll called with each report
 * @returns {Promise<Job>}
 */
export async function pollJob(id, signal, onpoll) {
  for (;;) {
    try {
      /** @type {Job} */
      const job = await requestJson(`jobs/${id}`, { signal });
      onpoll(job);
      if (isFinished(job.state)) return job;
    } catch (error) {
      if (/** @type {{status?: number}} */ (error).status !== 0) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_INTERVAL_MILLISECONDS));
    signal.throwIfAborted();
  }
}

/** The progress bar and the descriptions of an unfinished job. */
export class ProgressView {
  /** @param {HTMLElement} root @param {string} id */
  constructor(root, id) {
    this.progressBar = element("progress", { max: 1, "aria-label": "Progress of the job" });
    this.stateText = element("p", { class: "big", role: "status" }, "Sending the request");
    this.detailText = element("p", { class: "muted" });
    const cancelButton = button(
      "Cancel",
      async () => {
        cancelButton.disabled = true;
        await request(`jobs/${id}`, { method: "DELETE" }).catch(() => undefined);
      },
      "secondary",
    );
    root.replaceChildren(
      element(
        "div",
        { class: "run" },
        element("h2", {}, "Segmenting"),
        this.stateText,
        this.progressBar,
        this.detailText,
        element(
          "p",
          { class: "muted small" },
          "You can leave this page. The job continues, and the start screen lists it.",
        ),
        cancelButton,
      ),
    );
  }

  /** @param {Job} job */
  show(job) {
    const { done, total } = job.progress;
    if (job.state === "running" && total) this.progressBar.value = Math.min(done / total, 1);
    else this.progressBar.removeAttribute("value");
    this.stateText.textContent = describeState(job);
    const remainingText = job.seconds_left === null ? "" : `${formatDuration(job.seconds_left)} left`;
    const percentText = total ? `${Math.floor((100 * done) / total)}% done` : "";
    this.detailText.textContent = [job.state === "running" && percentText, remainingText].filter(Boolean).join(", ");
  }
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
