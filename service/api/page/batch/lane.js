/** Queue of tasks that run concurrently up to a limit, and pause while the service is busy or does not respond. */

import { checkConnection } from "../core/connection.js";
import { isAbort } from "../core/error_bar.js";
import { Problem } from "../core/requests.js";

const RETRY_DELAY_MILLISECONDS = 2000;

/** Return whether a request failed for a reason that is likely to pass: no response, too many requests, a full queue, a restart. @param {unknown} error */
export function isTemporary(error) {
  return error instanceof Problem && (error.status === 0 || error.status === 429 || error.status === 503);
}

/** Tasks of one kind, such as uploads. */
export class Lane {
  /**
   * @param {number} limit maximum number of concurrent tasks
   * @param {() => (() => Promise<void>) | null} findTask returns the next task, which must not be returned again; null if there is none
   * @param {(error: unknown) => void} onoutcome called with null after a task, or with the error with which it failed
   */
  constructor(limit, findTask, onoutcome) {
    this.limit = limit;
    this.findTask = findTask;
    this.onoutcome = onoutcome;
    this.activeCount = 0;
    this.isPaused = false;
  }

  /** Start tasks until the limit is reached. */
  run() {
    while (!this.isPaused && this.activeCount < this.limit) {
      const task = this.findTask();
      if (task === null) return;
      this.#runTask(task);
    }
  }

  /** @param {() => Promise<void>} task */
  async #runTask(task) {
    this.activeCount += 1;
    try {
      await task();
      this.onoutcome(null);
    } catch (error) {
      // After an unexpected error, the same task would fail again immediately.
      if (isTemporary(error) || !(error instanceof Problem || isAbort(error)))
        this.#pause(error instanceof Problem && error.status === 0);
      if (!isAbort(error)) this.onoutcome(error);
    } finally {
      this.activeCount -= 1;
      this.run();
    }
  }

  /** Pause until the service may accept the request. @param {boolean} hasNoResponse */
  async #pause(hasNoResponse) {
    if (this.isPaused) return;
    this.isPaused = true;
    await (hasNoResponse ? checkConnection() : delay(RETRY_DELAY_MILLISECONDS));
    this.isPaused = false;
    this.run();
  }
}

/** @param {number} milliseconds */
function delay(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
