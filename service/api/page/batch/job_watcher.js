/** Polling of the jobs of a batch. */

import { checkConnection } from "../core/connection.js";
import { isFinished } from "../core/job_requests.js";
import { Problem, request, requestJson } from "../core/requests.js";
import { isPending } from "./entries.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {import("openapi").JobReport} Job */

const POLL_INTERVAL_MILLISECONDS = 1000;
/** Number of jobs that were submitted elsewhere and are expected between those of the batch in the list of jobs. */
const MARGIN_JOBS = 50;
const MAX_LISTED_JOBS = 1000;

/** Polls the unfinished jobs of a batch with one request for all, and sends cancellations until the service confirms them. */
export class JobWatcher {
  /** @param {{entries: Entry[], batchAbort: AbortController}} batch @param {(error: unknown) => void} onoutcome called with null after each poll, or with the error with which it failed */
  constructor(batch, onoutcome) {
    this.batch = batch;
    this.onoutcome = onoutcome;
    this.isPolling = false;
  }

  /** Poll until all jobs have ended. */
  async run() {
    if (this.isPolling) return;
    this.isPolling = true;
    const { signal } = this.batch.batchAbort;
    while (!signal.aborted && this.batch.entries.some(isPending)) {
      try {
        await this.#updateReports(signal);
        this.onoutcome(null);
      } catch (error) {
        if (!signal.aborted) this.onoutcome(error);
        if (error instanceof Problem && error.status === 0) await checkConnection();
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_INTERVAL_MILLISECONDS));
    }
    this.isPolling = false;
  }

  /** @param {AbortSignal} signal */
  async #updateReports(signal) {
    const pendingEntries = this.batch.entries.filter(isPending);
    const limit = Math.min(pendingEntries.length + MARGIN_JOBS, MAX_LISTED_JOBS);
    /** @type {{jobs: Job[]}} */
    const { jobs } = await requestJson(`jobs?limit=${limit}`, { signal });
    const reports = new Map(jobs.map((report) => [report.id, report]));
    for (const entry of pendingEntries) {
      const { job } = entry;
      const report = reports.get(job) ?? (await fetchReport(job, signal));
      // The user may have segmented the stack again in the meantime.
      if (entry.job !== job) continue;
      if (report) entry.report = report;
      Object.assign(entry, { isGone: report === null, isVerified: true });
      if (entry.isCancelling && report && !isFinished(report.state))
        await request(`jobs/${job}`, { method: "DELETE", signal });
    }
  }
}

/** @param {string} job @param {AbortSignal} signal @returns {Promise<Job | null>} null if the service does not know the job */
async function fetchReport(job, signal) {
  try {
    return await requestJson(`jobs/${job}`, { signal });
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}
