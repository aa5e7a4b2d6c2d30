/** Export of the edited labels of a result or stack that the service no longer stores. The labels are saved in this browser. */

import { button, downloadBlob, element, openDialog } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import * as correctionStore from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { encodeNpy, encodeTiff } from "../volumes/label_files.js";
import { countVoxels } from "../volumes/planes.js";
import { formatTimePoint } from "../volumes/time_points.js";

const ARRAY_TYPES = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

/**
 * Offer to export the edited labels as files.
 * @param {{id: string, isEmpty: boolean}} source id: prefix of the keys of the edits; isEmpty: whether the labels contained no objects before the first edit
 * @param {string} name file name of the stack @param {() => void} ondiscard called after the user has discarded the edits
 * @returns {Promise<boolean>} false if there are no edits
 */
export async function offerCorrections({ id, isEmpty }, name, ondiscard) {
  const entries = [...(await correctionStore.countAllCorrections())].filter(([key]) => key.split("@")[0] === id);
  if (entries.length === 0) return false;
  const stem = name.replace(/(\.ome)?\.tiff?$/i, "");
  const problemText = element("p", { class: "warning-text", role: "alert" });
  const correctionCount = entries.reduce((sum, [, count]) => sum + count, 0);
  const discardCorrections = async () => {
    if (!confirm(`Discard ${formatCount(correctionCount, isEmpty ? "change" : "correction")} of ${name}?`)) return;
    await correctionStore.forgetCorrections(id);
    dialog.close();
    ondiscard();
  };
  const content = element(
    "div",
    { class: "dialog-form" },
    element(
      "p",
      { class: "muted" },
      isEmpty
        ? `The service no longer stores the stack ${name}. Your ${formatCount(correctionCount, "change")} and the region are saved in this browser. You can export the labels as a file.`
        : `The service no longer stores this result for ${name}. Your ${formatCount(correctionCount, "correction")} and the original labels are saved in this browser. You can export the corrected labels as a file.`,
    ),
    ...entries.map(([key, count]) => createExportRow(key, count, stem, problemText)),
    problemText,
    element(
      "div",
      { class: "row between" },
      button(isEmpty ? "Discard the annotation" : "Discard the corrections", discardCorrections, "link"),
      button("Close", () => dialog.close(), "secondary"),
    ),
  );
  const dialog = openDialog(isEmpty ? "This stack has expired" : "This result has expired", content);
  return true;
}

/** @param {string} key of a result, or of one time point of a time series @param {number} correctionCount @param {string} stem @param {HTMLElement} problemText */
function createExportRow(key, correctionCount, stem, problemText) {
  const timeIndex = key.split("@")[1];
  const time = timeIndex === undefined ? undefined : formatTimePoint(Number(timeIndex));
  const fileStem = `${stem}${time === undefined ? "" : `_t${time}`}_${key.startsWith("annotation:") ? "labels" : "corrected"}`;
  /** @param {string} text @param {string} suffix @param {(labels: Labels) => Blob} encode */
  const createExportButton = (text, suffix, encode) =>
    button(
      text,
      async () => {
        const labels = await loadCorrectedLabels(key);
        if (labels) downloadBlob(encode(labels), fileStem + suffix);
        else problemText.textContent = "The original labels of these corrections are not saved in this browser.";
      },
      "secondary",
    );
  return element(
    "div",
    { class: "row" },
    element(
      "span",
      {},
      `${time === undefined ? "" : `Time point ${time}: `}${formatCount(correctionCount, "correction")}`,
    ),
    createExportButton("OME-TIFF", ".ome.tif", ({ volume, voxelSize }) => encodeTiff(volume, voxelSize)),
    createExportButton("NumPy", ".npy", ({ volume }) => encodeNpy(volume)),
  );
}

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {{volume: Volume, voxelSize: import("openapi").VoxelSize | null}} Labels */

/** Load the original labels, and apply their corrections. @param {string} key @returns {Promise<Labels | null>} null if the labels are not saved in this browser */
async function loadCorrectedLabels(key) {
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
 * @param {Volume["data"]} data labels before any edit, changed in place @param {{shape: import("../volumes/planes.js").Triple, voxelSize: Labels["voxelSize"]}} properties
 * @param {import("../volumes/label_edit.js").Edit[]} edits @returns {Labels | null} null if the edits do not match the labels
 */
function applyEdits(data, { shape, voxelSize }, edits) {
  const editor = new LabelEditor({ data, shape, step: [1, 1, 1], fullShape: shape }, [1, 1, 1]);
  return editor.restore(edits) ? { volume: editor.labels, voxelSize } : null;
}
