/** Entries of a batch: files with their stacks and jobs, and functions that derive their phases and request parameters. */

import { isFinished } from "../core/job_requests.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {Record<string, string>} Parameters values by parameter name; parameters with empty values are not sent */
/** @typedef {{channel: string, time: string, link: string, voxel_size: string}} SharedMetadata parameters that apply only to files that need them: channel: files with several channels; time and link: time series; voxel_size: files without one */
/** @typedef {{channelCount: number, times: number, lacksVoxelSize: boolean}} Facts the content of a file, regardless of the request parameters */
/** @typedef {{slug: string, message: string, detail: string, suggestedValues: Record<string, string>}} EntryProblem message: in the terms of the web UI; detail: the message of the service */

/**
 * A file of a batch.
 * @typedef {object} Entry
 * @property {number} index
 * @property {string} path relative to the dropped or chosen folder
 * @property {number} bytes
 * @property {string} skipReason why the file is not a stack, "" if it can be one
 * @property {import("./collect_files.js").FilePart[]} parts empty after a reload of the page
 * @property {{fraction: number, abort: AbortController} | null} upload null unless the file is being uploaded
 * @property {boolean} isBusy whether a task reads the stack
 * @property {string} stack id, "" if the service does not store the stack
 * @property {Parameters} parameters of this file only
 * @property {Facts | null} facts
 * @property {Inspection | null} inspection
 * @property {string} inspectedKey key of the request parameters of the inspection
 * @property {EntryProblem | null} problem why the stack could not be uploaded, inspected or submitted
 * @property {number} failedUploads number of interrupted uploads in a row
 * @property {boolean} isRequested whether the stack is to be segmented
 * @property {boolean} isCancelled whether the user canceled the stack before it had a job
 * @property {boolean} isCancelling whether the user canceled the job, and the service has not confirmed it
 * @property {string} job id, "" if there is no job
 * @property {string} jobKey key of the request parameters of the job
 * @property {number} attempt number of the request, part of its idempotency key
 * @property {Job | null} report
 * @property {boolean} isVerified whether the service has reported the job since the page was opened
 * @property {boolean} isGone whether the service no longer knows the job
 * @property {string} thumbnail data URL, "" if there is none
 * @property {string} thumbnailKey identifies the stack or job that the thumbnail shows, or that has no thumbnail
 */

/** @typedef {"skipped" | "checking" | "gone" | Job["state"] | "cancelling" | "uploading" | "queued" | "missing" | "inspecting" | "question" | "problem" | "ready" | "requested"} Phase */

/** Create an entry for a file. @param {number} index @param {import("./collect_files.js").FoundFile} found @returns {Entry} */
export function createEntry(index, { path, parts, skipReason }) {
  return {
    index,
    path,
    bytes: parts.reduce((sum, { file }) => sum + file.size, 0),
    skipReason,
    parts: skipReason ? [] : parts,
    upload: null,
    isBusy: false,
    stack: "",
    parameters: {},
    facts: null,
    inspection: null,
    inspectedKey: "",
    problem: null,
    failedUploads: 0,
    isRequested: false,
    isCancelled: false,
    isCancelling: false,
    job: "",
    jobKey: "",
    attempt: 0,
    report: null,
    isVerified: false,
    isGone: false,
    thumbnail: "",
    thumbnailKey: "",
  };
}

/** @param {Entry} entry @returns {Phase} */
export function getPhase(entry) {
  if (entry.skipReason) return "skipped";
  if (entry.job) return getJobPhase(entry);
  if (entry.isCancelled) return "cancelled";
  if (entry.problem) return isAnswerable(entry.problem) ? "question" : "problem";
  if (entry.upload) return "uploading";
  if (needsUpload(entry)) return entry.parts.length > 0 ? "queued" : "missing";
  if (!entry.inspection) return "inspecting";
  if (entry.inspection.problem) return "question";
  return entry.isRequested ? "requested" : "ready";
}

/** @param {Entry} entry with a job @returns {Phase} */
function getJobPhase({ isGone, report, isCancelling }) {
  if (isGone) return "gone";
  if (report === null) return "checking";
  return isCancelling && !isFinished(report.state) ? "cancelling" : report.state;
}

/** @param {EntryProblem} problem @returns {boolean} whether the user can solve the problem by a setting of the file */
export function isAnswerable({ slug, suggestedValues }) {
  return slug === "ambiguous-axes" || "axes" in suggestedValues || "allow_incomplete" in suggestedValues;
}

/** Return whether the file has to be uploaded. A stack that the service deleted to make room is uploaded again only when it is segmented. @param {Entry} entry */
export function needsUpload(entry) {
  return entry.stack === "" && (entry.isRequested || entry.inspection === null);
}

/** @param {Entry} entry @returns {boolean} whether the entry has a job that has not ended, or whose state is not known */
export function isPending(entry) {
  if (entry.job === "" || entry.isGone) return false;
  return entry.report === null || !entry.isVerified || !isFinished(entry.report.state);
}

/**
 * Return the request parameters of a stack: the settings for all stacks, the metadata that its file needs, and its own settings.
 * @param {{parameters: Parameters, shared: SharedMetadata}} batch @param {Pick<Entry, "facts" | "parameters">} entry
 * @returns {Parameters}
 */
export function getRequestParameters({ parameters, shared }, { facts, parameters: ownParameters }) {
  const isSeries = facts !== null && facts.times > 1;
  const merged = {
    ...parameters,
    channel: facts !== null && facts.channelCount > 1 ? shared.channel : "",
    time: isSeries ? shared.time : "",
    link: isSeries && shared.time === "all" ? shared.link : "",
    voxel_size: facts?.lacksVoxelSize ? shared.voxel_size : "",
    ...ownParameters,
  };
  return Object.fromEntries(Object.entries(merged).filter(([, value]) => value !== ""));
}

/** @param {Parameters} parameters @returns {string} */
export function makeKey(parameters) {
  return JSON.stringify(Object.entries(parameters).sort());
}

/** @param {string} path @returns {string} name of a file without its folder */
export function getFileName(path) {
  return path.split("/").at(-1) ?? path;
}

/** @param {string} path @returns {string} path without the suffix of a stack */
export function getStem(path) {
  return path.replace(
    /(\.ome)?\.(tiff?|tf2|tf8|btf|lsm|stk|czi|nd2|lif|oib|oif|oif\.zip|ims|ozx|zarr|zarr\.zip|zip)$/i,
    "",
  );
}

/** @param {string[]} paths @returns {string} name of the folder that contains all files, "" if there is none */
export function getFolder(paths) {
  const folders = new Set(paths.map((path) => (path.includes("/") ? path.split("/")[0] : "")));
  return folders.size === 1 ? [...folders][0] : "";
}
