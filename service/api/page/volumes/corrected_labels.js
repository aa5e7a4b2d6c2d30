/** Corrected labels and their measurements, computed from the corrections that this browser stores. This module does not use the DOM. */

import * as correctionStore from "./correction_store.js";
import { LabelEditor } from "./label_edit.js";
import { measureObjects } from "./label_measure.js";
import { completeCorrectedTable } from "./object_table.js";
import { countVoxels } from "./planes.js";

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("openapi").VoxelSize} VoxelSize */
/** @typedef {{editor: LabelEditor, voxelSize: VoxelSize | null}} CorrectedLabels */

const ARRAY_TYPES = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

/** Load the original labels, and apply their corrections. @param {string} key of the corrections @returns {Promise<CorrectedLabels | null>} null if the labels are not saved in this browser */
export async function loadCorrectedLabels(key) {
  const [originalLabels, edits] = await Promise.all([
    correctionStore.loadOriginalLabels(key),
    correctionStore.loadCorrections(key),
  ]);
  if (originalLabels === undefined) {
    // An annotation started from nothing, so that only the shape of the labels is saved.
    const description = (await correctionStore.loadDescriptions()).find(
      ([descriptionKey]) => descriptionKey === key,
    )?.[1];
    return description ? applyEdits(new Uint16Array(countVoxels(description.shape)), description, edits) : null;
  }
  const { zipped, bytes, shape } = originalLabels;
  const buffer = await new Response(zipped.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const data = new ARRAY_TYPES[/** @type {keyof typeof ARRAY_TYPES} */ (bytes)](buffer, 0, countVoxels(shape));
  return applyEdits(data, originalLabels, edits);
}

/**
 * @param {Volume["data"]} data labels before any edit, changed in place @param {{shape: Triple, voxelSize: VoxelSize | null}} properties
 * @param {import("./label_edit.js").Edit[]} edits @returns {CorrectedLabels | null} null if the edits do not match the labels
 */
function applyEdits(data, { shape, voxelSize }, edits) {
  const { z, y, x } = voxelSize ?? { z: 1, y: 1, x: 1 };
  const editor = new LabelEditor({ data, shape, step: [1, 1, 1], fullShape: shape }, [z, y, x]);
  return editor.restore(edits) ? { editor, voxelSize } : null;
}

/**
 * Measure corrected objects. Objects that were not corrected keep their confidence.
 * @param {CorrectedLabels} labels @param {Volume | null} image with the same shape, null to omit the intensities
 * @param {import("./object_table.js").Table | null} originalTable of the objects before the corrections
 * @param {number} channel index of the segmented channel, -1 if unknown @returns {import("./object_table.js").Table}
 */
export function measureCorrectedObjects({ editor, voxelSize }, image, originalTable, channel) {
  const table = measureObjects(editor.labels, image, editor.objects.keys(), voxelSize && editor.voxelSize);
  return originalTable ? completeCorrectedTable(table, originalTable, editor.listEditedIds(), channel) : table;
}

/** Remove the hidden objects from labels. @param {Volume} labels @param {Uint8Array | null} hiddenFlags for each id, 1 to leave out the object; null for all objects @returns {Volume} */
export function removeHiddenObjects(labels, hiddenFlags) {
  return hiddenFlags ? { ...labels, data: labels.data.map((id) => (hiddenFlags[id] ? 0 : id)) } : labels;
}
