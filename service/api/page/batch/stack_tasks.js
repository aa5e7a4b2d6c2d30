/** Tasks that a batch runs for a stack: upload, inspection, thumbnail, and submission of a job. */

import { checkConnection } from "../core/connection.js";
import { isAbort } from "../core/error_bar.js";
import { buildQuery, Problem, requestJson, uploadStack } from "../core/requests.js";
import { saveThumbnail } from "./batch_store.js";
import { packStack } from "./collect_files.js";
import { getRequestParameters, makeKey } from "./entries.js";
import { isTemporary } from "./lane.js";
import { drawThumbnail, getThumbnailKey } from "./thumbnails.js";

/** @typedef {import("./batch.js").Batch} Batch */
/** @typedef {import("./entries.js").Entry} Entry */

/** Number of interrupted uploads of a file after which it is not uploaded again, although the service responds. */
const MAX_FAILED_UPLOADS = 3;

/** Upload the files of a stack. @param {Batch} batch @param {Entry} entry @param {AbortSignal} signal */
export async function uploadFiles(batch, entry, signal) {
  const showFraction = (/** @type {number} */ fraction) => {
    if (entry.upload) entry.upload.fraction = fraction;
    batch.dispatchEvent(new Event("change"));
  };
  try {
    const { content, name } = await packStack(entry.path, entry.parts, signal);
    signal.throwIfAborted();
    entry.stack = (await uploadStack(content, name, showFraction, signal)).id;
    entry.failedUploads = 0;
  } catch (error) {
    if (error instanceof Problem) await handleUploadProblem(entry, error);
    else if (!signal.aborted) entry.problem = toEntryProblem(/** @type {Error} */ (error));
    throw error;
  } finally {
    entry.upload = null;
  }
}

/** Decide whether a file is uploaded again. A service that refuses a large file may close the connection without a response. @param {Entry} entry @param {Problem} problem */
async function handleUploadProblem(entry, problem) {
  if (!isTemporary(problem)) entry.problem = toEntryProblem(problem);
  if (problem.status !== 0) return;
  const wasLost = await checkConnection();
  entry.failedUploads += wasLost ? 0 : 1;
  if (entry.failedUploads >= MAX_FAILED_UPLOADS) entry.problem = toEntryProblem(problem);
}

/** Inspect a stack with the current settings. @param {Batch} batch @param {Entry} entry */
export async function inspectStack(batch, entry) {
  const { signal } = batch.batchAbort;
  const key = batch.getKey(entry);
  const parameters = getRequestParameters(batch, entry);
  const query = buildQuery({ ...parameters, stack: entry.stack });
  try {
    /** @type {import("openapi").Inspection} */
    const inspection = await requestJson(`inspect?${query}`, { method: "POST", signal });
    const { file } = inspection;
    const lacksVoxelSize = parameters.voxel_size ? (entry.facts?.lacksVoxelSize ?? false) : !file.voxel_size;
    entry.facts = { channelCount: file.channels.length, times: file.times, lacksVoxelSize };
    entry.inspection = inspection;
  } catch (error) {
    if (isTemporary(error) || !(error instanceof Problem)) throw error;
    if (isMissingStack(error)) entry.stack = "";
    else if (entry.job === "") entry.problem = toEntryProblem(error);
  }
  entry.inspectedKey = key;
}

/** Draw the thumbnail of a stack. A stack that cannot be drawn keeps its previous thumbnail. @param {Batch} batch @param {Entry} entry */
export async function updateThumbnail(batch, entry) {
  const parameters = getRequestParameters(batch, entry);
  const key = getThumbnailKey(entry, parameters);
  try {
    entry.thumbnail = await drawThumbnail(entry, parameters, batch.batchAbort.signal);
    await saveThumbnail(batch.id, entry.index, entry.thumbnail);
  } catch (error) {
    if (isTemporary(error) || isAbort(error)) throw error;
    if (error instanceof Problem && isMissingStack(error)) entry.stack = "";
  }
  entry.thumbnailKey = key;
}

/** Submit a job for a stack with the current settings. @param {Batch} batch @param {Entry} entry */
export async function submitJob(batch, entry) {
  const { signal } = batch.batchAbort;
  const parameters = getRequestParameters(batch, entry);
  const measurements = entry.inspection?.output === "labels" ? "zip" : "";
  const query = buildQuery({ ...parameters, stack: entry.stack, measurements });
  // After a lost response or a reload, the same key leads to the same job.
  const headers = { "Idempotency-Key": `${batch.id}-${entry.index}-${entry.attempt}` };
  await batch.save();
  try {
    /** @type {import("openapi").JobReport} */
    const report = await requestJson(`jobs?${query}`, { method: "POST", headers, signal });
    const changes = { report, job: report.id, jobKey: makeKey(parameters), isVerified: true, isRequested: false };
    // The user may have canceled the stack in the meantime.
    Object.assign(entry, changes, { isCancelling: entry.isCancelled, isCancelled: false });
    await batch.save();
  } catch (error) {
    if (isTemporary(error) || !(error instanceof Problem)) throw error;
    if (isMissingStack(error)) entry.stack = "";
    else entry.problem = toEntryProblem(error);
  }
}

/** @param {Problem} problem @returns {boolean} whether the service no longer stores the stack */
function isMissingStack({ status, slug }) {
  return status === 404 && slug === "unknown-stack";
}

/** @param {Error} error @returns {import("./entries.js").EntryProblem} */
function toEntryProblem(error) {
  const { message } = error;
  if (!(error instanceof Problem)) return { slug: "", message, detail: message, suggestedValues: {} };
  const { slug, detail, suggestedValues } = error;
  return { slug, message, detail, suggestedValues };
}
