/** List of recent jobs with thumbnails, saved in the local storage of this browser. */

import { loadList, saveValue } from "../core/browser_storage.js";
import { formatCount } from "../core/format.js";
import { Problem, requestJson } from "../core/requests.js";

/** @typedef {import("openapi").JobReport} Job */

/**
 * @typedef {{job: string, stack: string, name: string, model: string, parameters: string, objects: number | null,
 *   corrected: number | null, created: string, thumbnail: string, isMissing: boolean}} RecentJob objects: the number of
 *   segmented objects; corrected: the number of objects after corrections in this browser, null if there are no
 *   corrections; isMissing: whether the service no longer stores the job
 */

const JOBS_STORAGE_KEY = "stackseg-jobs";
const MAX_JOBS = 24;
const MAX_LISTED_JOBS = 100;

/** @returns {RecentJob[]} newest first */
export function loadRecentJobs() {
  return loadList(JOBS_STORAGE_KEY);
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
    isMissing: false,
  };
  const mergedEntry = { ...defaults, ...existingEntry, ...entry };
  if (existingEntry) jobs[jobs.indexOf(existingEntry)] = mergedEntry;
  else jobs.unshift(mergedEntry);
  saveJobs(jobs);
}

/** Mark a job that the service no longer stores, if it is in the list. @param {string} job id */
export function markMissingJob(job) {
  if (loadRecentJobs().some((entry) => entry.job === job)) rememberJob({ job, isMissing: true });
}

/**
 * Ask the service for the states of recent jobs.
 * @param {RecentJob[]} jobs @returns {Promise<Map<string, Job | null>>} reports by job id, null if the service no longer stores the job
 */
export async function fetchReports(jobs) {
  /** @type {{jobs: Job[]}} */
  const list = await requestJson(`jobs?limit=${MAX_LISTED_JOBS}`);
  /** @type {Map<string, Job | null>} */
  const reports = new Map(list.jobs.map((report) => [report.id, report]));
  if (list.jobs.length === MAX_LISTED_JOBS) await fetchUnlistedReports(jobs, reports);
  return new Map(jobs.map(({ job }) => [job, reports.get(job) ?? null]));
}

/** Add the reports of jobs that are older than those in the list. @param {RecentJob[]} jobs @param {Map<string, Job | null>} reports */
async function fetchUnlistedReports(jobs, reports) {
  for (const { job } of jobs) {
    if (reports.has(job)) continue;
    const report = await requestJson(`jobs/${encodeURIComponent(job)}`).catch((error) => {
      if (error instanceof Problem && error.status === 404) return null;
      throw error;
    });
    reports.set(job, report);
  }
}

/** Describe the state of a job in the list. @param {RecentJob} entry @param {Job} report */
export function describeState(entry, report) {
  /** @type {Partial<Record<Job["state"], string>>} */
  const descriptions = {
    done: describeObjectCount({ ...entry, objects: report.objects ?? entry.objects }),
    failed: "failed",
    cancelled: "canceled",
    expired: "result deleted to free disk space",
    waiting: "waiting",
    loading: "waiting",
  };
  return descriptions[report.state] ?? "running";
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
  saveValue("localStorage", JOBS_STORAGE_KEY, JSON.stringify(jobs.slice(0, MAX_JOBS)));
}
