/** Corrections that this browser stores for the results of a batch, and the corrected results. */

import { Problem } from "../core/requests.js";
import { loadLimits, loadShownCounts } from "../result/stored_limits.js";
import { loadRecentJobs } from "../stack/recent_jobs.js";
import { loadCorrectedLabels, measureCorrectedObjects, removeHiddenObjects } from "../volumes/corrected_labels.js";
import { joinTimePoints, joinVolumes, loadCorrectedSeries } from "../volumes/corrected_series.js";
import { countAllCorrections } from "../volumes/correction_store.js";
import { encodeTiff } from "../volumes/label_files.js";
import { encodeCsv } from "../volumes/label_measure.js";
import { createHiddenFlags, filterRows, findChannel, parseTable } from "../volumes/object_table.js";
import { fetchVolume, makePlaneParameters } from "../volumes/planes.js";
import { getFirstTime } from "../volumes/time_points.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {import("../volumes/object_table.js").Table} Table */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
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

/**
 * Return the displayed objects of a corrected result.
 * @param {Entry} entry @param {(mediaType: string) => Promise<Blob | null>} fetchResult fetches all objects of the result before the corrections, or null if the service no longer stores the result
 * @returns {Promise<CorrectedResult | null>} null if this browser does not store the labels of a correction, or if a time series is too large
 */
export async function loadCorrectedResult(entry, fetchResult) {
  const csv = await (await fetchResult("text/csv"))?.text();
  const originalTable = csv ? parseTable(csv) : null;
  const load = entry.report?.time_points ? loadSeries : loadVolume;
  const corrected = await load(entry, originalTable);
  if (corrected === null) return null;
  const { timePoints, voxelSize } = corrected;
  const table = joinTimePoints(timePoints);
  const rows = filterRows(table, "label", false, loadLimits(entry.job)).toSorted();
  const shownVolumes = timePoints.map(({ labels, time }) =>
    removeHiddenObjects(labels, createHiddenFlags(table, rows, time)),
  );
  return {
    labels: encodeTiff(joinVolumes(shownVolumes), voxelSize, "labels", ["labels"], timePoints.length),
    table: new Blob([encodeCsv(table, rows)], { type: "text/csv" }),
  };
}

/** @typedef {{timePoints: import("../volumes/corrected_series.js").TimePoint[], voxelSize: import("openapi").VoxelSize | null}} CorrectedTimePoints */

/** @param {Entry} entry @param {Table | null} originalTable @returns {Promise<CorrectedTimePoints | null>} the labels of a result for one time point */
async function loadVolume(entry, originalTable) {
  const labels = await loadCorrectedLabels(entry.job);
  if (labels === null) return null;
  const { time } = /** @type {Record<string, string | undefined>} */ (entry.report?.parameters ?? {});
  const image = await fetchImage(entry, time, labels.editor.labels.fullShape);
  const table = measureCorrectedObjects(labels, image, originalTable, findEntryChannel(entry));
  return { timePoints: [{ time: 0, labels: labels.editor.labels, table }], voxelSize: labels.voxelSize };
}

/** @param {Entry} entry @param {Table | null} table @returns {Promise<CorrectedTimePoints | null>} the labels of a time series */
async function loadSeries(entry, table) {
  const { job, report, inspection } = entry;
  if (table === null || report === null) return null;
  const firstTime = getFirstTime(report.parameters.time);
  const times = Array.from({ length: report.time_points?.total ?? 0 }, (_, index) => firstTime + index);
  const shape = /** @type {Triple} */ (inspection?.file.shape.slice(1) ?? []);
  const source = {
    ...{ job, times, table, channel: findEntryChannel(entry) },
    fetchImage: (/** @type {number} */ time) => fetchImage(entry, time, shape),
  };
  const timePoints = await loadCorrectedSeries(source, new AbortController().signal);
  return timePoints && { timePoints, voxelSize: inspection?.file.voxel_size ?? null };
}

/** @param {Entry} entry @returns {number} index of the segmented channel, -1 if unknown */
function findEntryChannel({ inspection, report }) {
  return findChannel(inspection?.file.channels ?? [], report?.parameters.channel);
}

/** Fetch the segmented image. @param {Entry} entry @param {number | string | undefined} time @param {Triple} fullShape @returns {Promise<import("../volumes/planes.js").Volume | null>} null if the service no longer stores the stack */
async function fetchImage({ stack, report, inspection }, time, fullShape) {
  if (stack === "" || inspection === null || report === null) return null;
  const { file } = inspection;
  const { channel } = /** @type {Record<string, string | undefined>} */ (report.parameters);
  const parameters = makePlaneParameters(file, report.parameters, time, channel);
  try {
    const source = { url: `stacks/${stack}/planes`, parameters, fullShape };
    return await fetchVolume(source, new AbortController().signal, () => undefined, [1, 1, 1]);
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}
