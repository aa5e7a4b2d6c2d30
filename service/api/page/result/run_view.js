/** A job while it waits and runs: how far it is, how long it takes, a way to give it up. */

import { button, element } from "../core/elements.js";
import { counted, duration } from "../core/format.js";
import { json, request } from "../core/requests.js";

/** @typedef {import("openapi").JobReport} Job */

const POLL_MILLISECONDS = 400;

/** @param {string} state */
export function isOver(state) {
  return ["done", "failed", "cancelled", "expired"].includes(state);
}

/**
 * Follow a job until it is over. A service that restarts meanwhile is waited for.
 * @param {string} id @param {AbortSignal} signal @param {(job: Job) => void} onchange
 * @returns {Promise<Job>}
 */
export async function follow(id, signal, onchange) {
  for (;;) {
    try {
      /** @type {Job} */
      const job = await json(`jobs/${id}`, { signal });
      onchange(job);
      if (isOver(job.state)) return job;
    } catch (error) {
      if (/** @type {{status?: number}} */ (error).status !== 0) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
    signal.throwIfAborted();
  }
}

/** The words and the bar of a job that is not over. */
export class RunView {
  /** @param {HTMLElement} root @param {string} id */
  constructor(root, id) {
    this.bar = element("progress", { max: 1, "aria-label": "How far the job is" });
    this.words = element("p", { class: "big", role: "status" }, "Sending the request");
    this.detail = element("p", { class: "muted" });
    const cancel = button(
      "Cancel",
      async () => {
        cancel.disabled = true;
        await request(`jobs/${id}`, { method: "DELETE" }).catch(() => undefined);
      },
      "secondary",
    );
    root.replaceChildren(
      element(
        "div",
        { class: "run" },
        element("h2", {}, "Segmenting"),
        this.words,
        this.bar,
        this.detail,
        element(
          "p",
          { class: "muted small" },
          "You may leave this page: the job goes on, and the first screen lists it.",
        ),
        cancel,
      ),
    );
  }

  /** @param {Job} job */
  show(job) {
    const { done, total } = job.progress;
    if (job.state === "running" && total) this.bar.value = Math.min(done / total, 1);
    else this.bar.removeAttribute("value");
    this.words.textContent = describe(job);
    const left = job.seconds_left === null ? "" : `${duration(job.seconds_left)} left`;
    const share = total ? `${Math.floor((100 * done) / total)} % done` : "";
    this.detail.textContent = [job.state === "running" && share, left].filter(Boolean).join(", ");
  }
}

/** @param {Job} job */
function describe(job) {
  if (job.state === "loading") return "The model is being made ready";
  if (job.state === "waiting")
    return job.position && job.position > 1
      ? `${counted(job.position - 1, "job")} before this one`
      : "Reading the stack";
  return job.progress.total && job.progress.done >= job.progress.total ? "Writing the result" : "Computing";
}
