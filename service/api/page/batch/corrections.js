/** Corrections that this browser stores for the results of a batch, and the corrected results. */

import { Problem } from "../core/requests.js";
import { loadLimits, loadShownCounts } from "../result/stored_limits.js";
import { loadRecentJobs } from "../stack/recent_jobs.js";
import { loadCorrectedLabels, measureCorrectedObjects, removeHiddenObjects } from "../volumes/corrected_labels.js";
import { countAllCorrections } from "../volumes/correction_store.js";
import { encodeTiff } from "../volumes/label_files.js";
import { encodeCsv } from "../volumes/label_measure.js";
import { createHiddenFlags, filterRows, findChannel, parseTable } from "../volumes/object_table.js";
import { fetchVolume, makePlaneParameters } from "../volumes/planes.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {Map<string, {corrections: number, objects: number | null}>} CorrectionCounts by job: number of corrections, and of objects after the corrections if it is known */
/** @typedef {{labels: Blob, table: Blob}} CorrectedResult OME-TIFF and CSV with the displayed objects */

/** @returns {Promise<CorrectionCounts>} the corrected results, regardless of their batch */
export async function loadCorrectionCounts() {
  const objectCounts = new Map(loadRecentJobs().map(({ job, corrected }) => [job, corrected ?? null]));
  /** @type {CorrectionCounts} */
  const counts = new Map();
  for (const [key, count] of await countAllCorrections()) {
    const [job] = key.split("@");
    const corrections = (counts.get(job)?.corrections ?? 0) + count;
    counts.set(job, { corrections, objects: objectCounts.get(job) ?? null });
  }
  return counts;
}

/**
 * Count the objects of a result.
 * @param {Entry} entry @param {CorrectionCounts} correctionCounts
 * @returns {{shown: number, total: number | null, isOutdated: boolean}} shown: number of objects within the filters; total: null for a result
 *   without objects; isOutdated: whether these are the numbers before the corrections, because those of corrected results are known only for
 *   the recent results of this browser
 */
export function countObjects({ job, report }, correctionCounts) {
  const corrected = correctionCounts.get(job);
  const total = corrected?.objects ?? report?.objects ?? null;
  const shown = Math.min(loadShownCounts().get(job) ?? total ?? 0, total ?? 0);
  return { shown, total, isOutdated: corrected?.objects === null };
}

/** @param {Entry} entry @returns {boolean} whether the corrections of a result can be exported with the batch; each time point of a time series is corrected separately */
export function isSingleTimePoint({ report }) {
  return !report?.time_points;
}

/**
 * Return the displayed objects of a corrected result.
 * @param {Entry} entry @param {(mediaType: string) => Promise<Blob | null>} fetchResult fetches all objects of the result before the corrections, or null if the service no longer stores the result
 * @returns {Promise<CorrectedResult | null>} null if this browser stores no labels for the corrections
 */
export async function loadCorrectedResult(entry, fetchResult) {
  const labels = await loadCorrectedLabels(entry.job);
  if (labels === null) return null;
  const csv = await (await fetchResult("text/csv"))?.text();
  const channel = findChannel(entry.inspection?.file.channels ?? [], entry.report?.parameters.channel);
  const image = await fetchImage(entry, labels.editor.labels.fullShape);
  const table = measureCorrectedObjects(labels, image, csv ? parseTable(csv) : null, channel);
  const rows = filterRows(table, "label", false, loadLimits(entry.job));
  const shownLabels = removeHiddenObjects(labels.editor.labels, createHiddenFlags(table, rows));
  return {
    labels: encodeTiff(shownLabels, labels.voxelSize),
    table: new Blob([encodeCsv(table, rows)], { type: "text/csv" }),
  };
}

/** Fetch the segmented image. @param {Entry} entry @param {import("../volumes/planes.js").Triple} fullShape @returns {Promise<import("../volumes/planes.js").Volume | null>} null if the service no longer stores the stack */
async function fetchImage({ stack, report, inspection }, fullShape) {
  if (stack === "" || inspection === null || report === null) return null;
  const { file } = inspection;
  const { channel, time } = /** @type {Record<string, string | undefined>} */ (report.parameters);
  const parameters = makePlaneParameters(file, report.parameters, time, channel);
  try {
    const source = { url: `stacks/${stack}/planes`, parameters, fullShape };
    return await fetchVolume(source, new AbortController().signal, () => undefined, [1, 1, 1]);
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}
