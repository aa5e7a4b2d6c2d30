/** Upload of a stack: progress, a button that cancels the upload, and a new attempt after the connection was lost. */

import { connection, waitForConnection } from "../core/connection.js";
import { button, element } from "../core/elements.js";
import { formatBytes } from "../core/format.js";
import { Problem, uploadStack } from "../core/requests.js";

/** Number of attempts if the upload fails although the service responds. */
const MAX_ATTEMPTS = 2;

/**
 * Upload a file and show the progress. If the connection is lost, upload the file again when the service responds. Throws
 * an AbortError if the user cancels the upload.
 * @param {HTMLElement} root @param {Blob} file @param {string} name
 * @returns {Promise<import("openapi").StackReport>}
 */
export async function uploadWithProgress(root, file, name) {
  const [uploadAbort, endAbort] = [new AbortController(), new AbortController()];
  const { signal } = uploadAbort;
  const progressBar = element("progress", { max: 1, "aria-label": "Upload" });
  const progressText = element("p", { class: "muted", role: "status" }, formatBytes(file.size));
  const cancelButton = button("Cancel", () => uploadAbort.abort(), "secondary");
  const content = [element("h2", {}, `Uploading ${name}`), progressBar, progressText, cancelButton];
  root.replaceChildren(element("section", { class: "drop uploading" }, ...content));
  /** @param {number} fraction */
  const showProgress = (fraction) => {
    progressBar.value = fraction;
    progressText.textContent =
      fraction < 1
        ? `${formatBytes(file.size * fraction)} of ${formatBytes(file.size)}`
        : `${formatBytes(file.size)} sent. The service is storing the file.`;
  };
  const showLostConnection = () => {
    if (connection.state.lostAt === null) return;
    progressText.textContent = "The service does not respond. The upload continues as soon as it does.";
  };
  connection.subscribe(showLostConnection, endAbort.signal);
  try {
    return await repeatUpload(file, name, showProgress, signal);
  } finally {
    endAbort.abort();
  }
}

/** @param {Blob} file @param {string} name @param {(fraction: number) => void} showProgress @param {AbortSignal} signal */
async function repeatUpload(file, name, showProgress, signal) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await uploadStack(file, name, showProgress, signal);
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 0) throw error;
      const wasLost = await waitForConnection(signal);
      if (!wasLost && attempt >= MAX_ATTEMPTS) throw error;
    }
  }
}
