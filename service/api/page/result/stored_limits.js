/** Limits of the displayed objects of each result, saved in the local storage of this browser. */

import { loadList, saveValue } from "../core/browser_storage.js";

/** @typedef {Map<string, [number, number]>} Limits smallest and largest value by column of the table; infinite if there is no limit */
/** @typedef {{job: string, limits: [string, number | null, number | null][], shown: number}} StoredLimits limits: column, smallest and largest value, null if there is no limit; shown: number of objects within the limits */

const STORAGE_KEY = "stackseg-filters";
const MAX_RESULTS = 200;

/** @returns {StoredLimits[]} newest first */
function loadEntries() {
  return loadList(STORAGE_KEY);
}

/** @param {string} job id @returns {Limits} empty if all objects are displayed */
export function loadLimits(job) {
  const entry = loadEntries().find((candidate) => candidate.job === job);
  return new Map((entry?.limits ?? []).map(([column, low, high]) => [column, [low ?? -Infinity, high ?? Infinity]]));
}

/** @returns {Map<string, number>} number of displayed objects by job, for jobs of which not all objects are displayed */
export function loadShownCounts() {
  return new Map(loadEntries().map(({ job, shown }) => [job, shown]));
}

/** @param {string} job id @param {Limits} limits @param {number} shown number of objects within the limits */
export function saveLimits(job, limits, shown) {
  const entries = loadEntries().filter((entry) => entry.job !== job);
  // JSON represents infinite limits as null.
  const rows = [...limits].map(
    ([column, [low, high]]) => /** @type {[string, number, number]} */ ([column, low, high]),
  );
  if (rows.length > 0) entries.unshift({ job, limits: rows, shown });
  saveValue("localStorage", STORAGE_KEY, JSON.stringify(entries.slice(0, MAX_RESULTS)));
}

/** Return the query string that makes the service leave out the hidden objects of a result. @param {Limits} limits @returns {string} "" if all objects are displayed */
export function createFilterQuery(limits) {
  const formatEnd = (/** @type {number} */ value) => (Number.isFinite(value) ? String(value) : "");
  const filters = [...limits].map(([column, [low, high]]) => [
    "filter",
    [column, ...[low, high].map(formatEnd)].join(":"),
  ]);
  return new URLSearchParams(filters).toString();
}
