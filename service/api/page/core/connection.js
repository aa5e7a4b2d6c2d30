/** State of the connection to the service. While the service does not respond, a banner says so and the page tries to reconnect. */

import { byId } from "./elements.js";
import { Store } from "./store.js";

/** A health check without a response after this time counts as a lost connection. */
const CHECK_TIMEOUT_MILLISECONDS = 2000;
const CHECK_INTERVAL_MILLISECONDS = 1000;
/** The connection is checked whenever a request has made no progress for this time. */
export const PROGRESS_INTERVAL_MILLISECONDS = 2000;

/** `lostAt` is the time at which the service stopped responding, null while it responds. @type {Store<{lostAt: Date | null}>} */
export const connection = new Store({ lostAt: /** @type {Date | null} */ (null) });

/** The running check, shared by all callers. @type {Promise<boolean> | null} */
let runningCheck = null;

/** Check the connection, and wait until the service responds. @returns {Promise<boolean>} whether the connection was lost */
export function checkConnection() {
  runningCheck ??= waitUntilServiceResponds().finally(() => (runningCheck = null));
  return runningCheck;
}

/** Wait until the service responds, or throw the reason of the signal if it is aborted first. @param {AbortSignal} signal @returns {Promise<boolean>} whether the connection was lost */
export function waitForConnection(signal) {
  const aborted = new Promise((_, reject) => {
    if (signal.aborted) reject(signal.reason);
    signal.addEventListener("abort", () => reject(signal.reason));
  });
  return Promise.race([checkConnection(), /** @type {Promise<never>} */ (aborted)]);
}

async function waitUntilServiceResponds() {
  let wasLost = false;
  while (!(await isServiceAlive())) {
    if (!wasLost) connection.set({ lostAt: new Date() });
    wasLost = true;
    await new Promise((resolve) => setTimeout(resolve, CHECK_INTERVAL_MILLISECONDS));
  }
  connection.set({ lostAt: null });
  return wasLost;
}

async function isServiceAlive() {
  try {
    const signal = AbortSignal.timeout(CHECK_TIMEOUT_MILLISECONDS);
    // A proxy responds with status 502, 503 or 504 if the service does not.
    return (await fetch("health/live", { signal, cache: "no-store" })).status < 500;
  } catch {
    return false;
  }
}

/** Show the banner while the connection is lost. @param {() => unknown} onreconnect called when the service responds again */
export function watchConnection(onreconnect) {
  const banner = byId("connection");
  connection.subscribe(() => {
    const { lostAt } = connection.state;
    banner.hidden = lostAt === null;
    banner.textContent = lostAt
      ? `The service has not responded since ${formatTime(lostAt)}. This page reconnects automatically.`
      : "";
    if (lostAt === null) onreconnect();
  });
}

/** @param {Date} time */
export function formatTime(time) {
  return time.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}
