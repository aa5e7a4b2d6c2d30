/** Corrected labels of time series, whose time points are corrected separately. This module does not use the DOM. */

import { loadCorrectedLabels, measureCorrectedObjects } from "./corrected_labels.js";
import { loadCorrections, makeKey } from "./correction_store.js";
import { addColumns, getColumn, joinRows, selectRows } from "./object_table.js";
import { countVoxels, fetchShape, fetchVolume } from "./planes.js";

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./object_table.js").Table} Table */
/** @typedef {import("openapi").VoxelSize} VoxelSize */
/** @typedef {{time: number, labels: Volume, table: Table}} TimePoint labels and objects of a time point; time: its index in the file */

/** Maximum size of the labels of all time points, which have to fit in the memory of the browser. */
const MAX_SERIES_BYTES = 300_000_000;

/**
 * Load the labels of all time points, with the corrections that this browser stores. In a tracked series, objects that were
 * added get ids that no track has.
 * @param {{job: string, times: number[], table: Table, channel: number, fetchImage: (time: number) => Promise<Volume | null>}} source
 *   table: of the objects before the corrections; channel: index of the segmented channel, -1 if unknown
 * @param {AbortSignal} signal
 * @returns {Promise<TimePoint[] | null>} null if this browser does not store the labels of a correction, or if the series is too large
 */
export async function loadCorrectedSeries({ job, times, table, channel, fetchImage }, signal) {
  const url = `jobs/${job}/planes`;
  const fullShape = await fetchShape({ url, parameters: { time: 0 } }, signal);
  if (countVoxels(fullShape) * times.length * Uint32Array.BYTES_PER_ELEMENT > MAX_SERIES_BYTES) return null;
  let nextId = 1 + getColumn(table, "label").reduce((max, label) => Math.max(max, label), 0);
  const timePoints = [];
  for (const [index, time] of times.entries()) {
    const key = makeKey({ id: job, isSeries: true }, time);
    const ownTable = selectRows(table, (row) => getColumn(table, "time")[row] === time);
    const isCorrected = (await loadCorrections(key)).length > 0;
    const corrected = isCorrected ? await loadCorrectedLabels(key) : null;
    if (isCorrected && corrected === null) return null;
    if (corrected === null) {
      const source = { url, parameters: { time: index }, fullShape };
      timePoints.push({ time, labels: await fetchVolume(source, signal, () => undefined, [1, 1, 1]), table: ownTable });
      continue;
    }
    const measured = measureCorrectedObjects(corrected, await fetchImage(time), ownTable, channel);
    const { labels } = corrected.editor;
    const trackIds = table.columns.has("track_id") ? assignTracks(measured, ownTable, nextId) : new Map();
    nextId += trackIds.size;
    const data = trackIds.size > 0 ? Uint32Array.from(labels.data, (id) => trackIds.get(id) ?? id) : labels.data;
    const correctedTable = describeTimePoint(measured, ownTable, time, trackIds);
    timePoints.push({ time, labels: { ...labels, data }, table: correctedTable });
  }
  return timePoints;
}

/** Assign new ids to the objects that were added at a time point. @param {Table} measured @param {Table} original @param {number} nextId first unused id @returns {Map<number, number>} */
function assignTracks(measured, original, nextId) {
  const originalIds = new Set(getColumn(original, "label"));
  const addedIds = [...getColumn(measured, "label")].filter((id) => !originalIds.has(id));
  return new Map(addedIds.map((id, index) => [id, nextId + index]));
}

/** Add the columns that only time series have. @param {Table} measured @param {Table} original @param {number} time @param {Map<number, number>} trackIds new ids of the added objects @returns {Table} */
function describeTimePoint(measured, original, time, trackIds) {
  const labels = getColumn(measured, "label").map((id) => trackIds.get(id) ?? id);
  const columns = { label: labels, time: labels.map(() => time) };
  if (!original.columns.has("track_id")) return addColumns(measured, columns);
  const ids = getColumn(original, "label");
  const parents = getColumn(original, "parent");
  const parent = labels.map((id) => parents[ids.indexOf(id)] ?? 0);
  return addColumns(measured, { ...columns, track_id: labels, parent });
}

/** Join the time points of a series. @param {TimePoint[]} timePoints @returns {Table} */
export function joinTimePoints(timePoints) {
  return joinRows(timePoints.map(({ table }) => table));
}

/** Join volumes of the same shape, one after another. @param {Volume[]} volumes of unsigned integers @returns {Volume} shape: that of one volume */
export function joinVolumes(volumes) {
  const [first] = volumes;
  const bytes = Math.max(...volumes.map(({ data }) => data.BYTES_PER_ELEMENT));
  const length = first.data.length * volumes.length;
  const data = bytes === 1 ? new Uint8Array(length) : bytes === 2 ? new Uint16Array(length) : new Uint32Array(length);
  volumes.forEach((volume, index) => {
    data.set(volume.data, index * first.data.length);
  });
  return { ...first, data };
}
