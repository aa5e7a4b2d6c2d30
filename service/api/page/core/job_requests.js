/** Requests that submit, poll and cancel a job. They are repeated while the service does not respond. */

import { checkConnection, waitForConnection } from "./connection.js";
import { Problem, request, requestJson } from "./requests.js";

/** @typedef {import("openapi").JobReport} Job */

const POLL_INTERVAL_MILLISECONDS = 400;
/** HTTP statuses after which a request is repeated: no response, rate limit, and responses of a proxy or of a service that is starting. */
const TEMPORARY_STATUSES = [0, 429, 502, 503, 504];

/** @param {string} state */
export function isFinished(state) {
  return ["done", "failed", "cancelled", "expired"].includes(state);
}

/** @param {unknown} error @returns {boolean} whether the request may succeed if it is repeated */
function isTemporary(error) {
  return error instanceof Problem && TEMPORARY_STATUSES.includes(error.status);
}

/**
 * Poll a job until it is finished. If the service does not respond, wait until it does, because it may be restarting.
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
      if (!isTemporary(error)) throw error;
      await waitForConnection(signal);
    }
    await delay();
    signal.throwIfAborted();
  }
}

/** Submit a job. If the service does not respond, submit it again, which does not create a second job. @param {string} query @returns {Promise<Job>} */
export async function createJob(query) {
  // `crypto.randomUUID` does not exist on pages without HTTPS.
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0"));
  const headers = { "Idempotency-Key": key.join("") };
  for (;;) {
    try {
      return await requestJson(`jobs?${query}`, { method: "POST", headers });
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 0) throw error;
      await checkConnection();
      await delay();
    }
  }
}

/** Cancel a job. If the service does not respond, cancel it as soon as the service responds. @param {string} id */
export async function cancelJob(id) {
  for (;;) {
    try {
      await request(`jobs/${id}`, { method: "DELETE" });
      return;
    } catch (error) {
      if (error instanceof Problem && error.status === 404) return;
      if (!isTemporary(error)) throw error;
      await checkConnection();
      await delay();
    }
  }
}

/** Return whether a request failed because the connection was lost. If so, wait until the service responds. @param {unknown} error @param {AbortSignal} signal @returns {Promise<boolean>} false also if the signal is aborted first */
export async function wasConnectionLost(error, signal) {
  return error instanceof Problem && error.status === 0 && waitForConnection(signal).catch(() => false);
}

function delay() {
  return new Promise((resolve) => setTimeout(resolve, POLL_INTERVAL_MILLISECONDS));
}
