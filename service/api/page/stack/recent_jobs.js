/** The stacks and jobs of this browser: names, numbers and thumbnails, in its own storage. */

import { counted } from "../core/format.js";

/**
 * @typedef {{job: string, stack: string, name: string, model: string, parameters: string, objects: number | null,
 *   corrected: number | null, created: string, thumbnail: string}} Entry objects: as segmented; corrected: as corrected in
 *   this browser, null without corrections
 */

const HISTORY = "stackseg-jobs";
const MOST = 24;

/** @returns {Entry[]} newest first */
export function entries() {
  try {
    const kept = JSON.parse(localStorage.getItem(HISTORY) ?? "[]");
    return Array.isArray(kept) ? kept : [];
  } catch {
    return [];
  }
}

/** @param {Partial<Entry> & {job: string}} entry adds a job, or what has become known of it */
export function remember(entry) {
  const others = entries();
  const known = others.find((other) => other.job === entry.job);
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
  const merged = { ...empty, ...known, ...entry };
  if (known) others[others.indexOf(known)] = merged;
  else others.unshift(merged);
  write(others);
}

/** @param {Entry} entry of a result @returns {string} */
export function describeCount({ objects, corrected }) {
  // Entries that were written before anything was corrected have no number of corrected objects.
  return `${counted(corrected ?? objects ?? 0, "object")}${typeof corrected === "number" ? ", as corrected" : ""}`;
}

/** @param {string} job */
export function forget(job) {
  write(entries().filter((entry) => entry.job !== job));
}

/** @param {Entry[]} kept */
function write(kept) {
  try {
    localStorage.setItem(HISTORY, JSON.stringify(kept.slice(0, MOST)));
  } catch {
    // A full or forbidden storage only means that nothing is remembered.
  }
}
