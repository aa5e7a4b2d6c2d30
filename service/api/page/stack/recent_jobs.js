/** The list of recent jobs with their thumbnails, in the local storage of this browser. */

import { formatCount } from "../core/format.js";

/**
 * @typedef {{job: string, stack: string, name: string, model: string, parameters: string, objects: number | null,
 *   corrected: number | null, created: string, thumbnail: string}} RecentJob objects: the number of segmented objects;
 *   corrected: the number of objects after corrections in this browser, null without corrections
 */

const STORAGE_KEY = "stackseg-jobs";
const MAX_JOBS = 24;

/** @returns {RecentJob[]} newest first */
export function recentJobs() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "[]");
    return Array.isArray(stored) ? stored : [];
  } catch {
    return [];
  }
}

/** Add a job to the list, or update its entry. @param {Partial<RecentJob> & {job: string}} entry */
export function rememberJob(entry) {
  const jobs = recentJobs();
  const existing = jobs.find((job) => job.job === entry.job);
  const empty = {
    stack: "",
    name: "",
    model: "",
    parameters: "",
    objects: null,
    corrected: null,
    created: new Date().toISOString(),
    thumbnail: "",
  };
  const merged = { ...empty, ...existing, ...entry };
  if (existing) jobs[jobs.indexOf(existing)] = merged;
  else jobs.unshift(merged);
  write(jobs);
}

/** Describe the number of objects of a result. @param {RecentJob} entry @returns {string} */
export function describeCount({ objects, corrected }) {
  // `corrected` is undefined in entries from before corrections were counted.
  return `${formatCount(corrected ?? objects ?? 0, "object")}${typeof corrected === "number" ? ", corrected" : ""}`;
}

/** @param {string} job */
export function forgetJob(job) {
  write(recentJobs().filter((entry) => entry.job !== job));
}

/** @param {RecentJob[]} jobs */
function write(jobs) {
  try {
    localStorage.setItem(STORAGE_KEY, JSON.stringify(jobs.slice(0, MAX_JOBS)));
  } catch {
    // If the storage is full or disabled, the list is not saved.
  }
}
