/** List of recent jobs with thumbnails, saved in the local storage of this browser. */

import { formatCount } from "../core/format.js";

/**
 * @typedef {{job: string, stack: string, name: string, model: string, parameters: string, objects: number | null,
 *   corrected: number | null, created: string, thumbnail: string}} RecentJob objects: the number of segmented objects;
 *   corrected: the number of objects after corrections in this browser, null if there are no corrections
 */

const JOBS_STORAGE_KEY = "stackseg-jobs";
const MAX_JOBS = 24;

/** @returns {RecentJob[]} newest first */
export function loadRecentJobs() {
  try {
    const storedJobs = JSON.parse(localStorage.getItem(JOBS_STORAGE_KEY) ?? "[]");
    return Array.isArray(storedJobs) ? storedJobs : [];
  } catch {
    return [];
  }
}

/** Add a job to the list, or update its entry. @param {Partial<RecentJob> & {job: string}} entry */
export function rememberJob(entry) {
  const jobs = loadRecentJobs();
  const existingEntry = jobs.find((job) => job.job === entry.job);
  const defaults = {
    stack: "",
    name: "",
    model: "",
    parameters: "",
    objects: null,
    corrected: null,
    created: new Date().toISOString(),
    thumbnail: "",
  };
  const mergedEntry = { ...defaults, ...existingEntry, ...entry };
  if (existingEntry) jobs[jobs.indexOf(existingEntry)] = mergedEntry;
  else jobs.unshift(mergedEntry);
  saveJobs(jobs);
}

/** Describe the number of objects in a result. @param {RecentJob} entry @returns {string} */
export function describeObjectCount({ objects, corrected }) {
  // `corrected` is undefined in entries that were saved by older versions of the web UI.
  return `${formatCount(corrected ?? objects ?? 0, "object")}${typeof corrected === "number" ? ", corrected" : ""}`;
}

/** Remove a job from the list. @param {string} job id */
export function forgetJob(job) {
  saveJobs(loadRecentJobs().filter((entry) => entry.job !== job));
}

/** @param {RecentJob[]} jobs */
function saveJobs(jobs) {
  try {
    localStorage.setItem(JOBS_STORAGE_KEY, JSON.stringify(jobs.slice(0, MAX_JOBS)));
  } catch {
    // If the storage is full or disabled, the list is not saved.
  }
}
