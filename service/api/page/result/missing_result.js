/** Export of the corrected labels of a result that the service no longer stores. The original labels are saved in this browser. */

import { button, downloadBlob, element, openDialog } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import * as correctionStore from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { encodeNpy, encodeTiff } from "../volumes/label_files.js";
import { countVoxels } from "../volumes/planes.js";
import { formatTimePoint } from "../volumes/time_points.js";

const ARRAY_TYPES = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

/**
 * Offer to export the corrected labels as files.
 * @param {string} job id @param {string} name file name of the stack @param {() => void} ondiscard called after the user has discarded the corrections
 * @returns {Promise<boolean>} false if there are no corrections
 */
export async function offerCorrections(job, name, ondiscard) {
  const entries = [...(await correctionStore.countAllCorrections())].filter(([key]) => key.split("@")[0] === job);
  if (entries.length === 0) return false;
  const stem = name.replace(/(\.ome)?\.tiff?$/i, "");
  const problemText = element("p", { class: "warning-text", role: "alert" });
  const correctionCount = entries.reduce((sum, [, count]) => sum + count, 0);
  const discardCorrections = async () => {
    if (!confirm(`Discard ${formatCount(correctionCount, "correction")} of ${name}?`)) return;
    await correctionStore.forgetCorrections(job);
    dialog.close();
    ondiscard();
  };
  const content = element(
    "div",
    { class: "dialog-form" },
    element(
      "p",
      { class: "muted" },
      `The service no longer stores this result for ${name}. Your ${formatCount(correctionCount, "correction")} and the original labels are saved in this browser. You can export the corrected labels as a file.`,
    ),
    ...entries.map(([key, count]) => createExportRow(key, count, stem, problemText)),
    problemText,
    element(
      "div",
      { class: "row between" },
      button("Discard the corrections", discardCorrections, "link"),
      button("Close", () => dialog.close(), "secondary"),
    ),
  );
  const dialog = openDialog("This result has expired", content);
  return true;
}

/** @param {string} key of a result, or of one time point of a time series @param {number} correctionCount @param {string} stem @param {HTMLElement} problemText */
function createExportRow(key, correctionCount, stem, problemText) {
  const timeIndex = key.split("@")[1];
  const time = timeIndex === undefined ? undefined : formatTimePoint(Number(timeIndex));
  const fileStem = `${stem}${time === undefined ? "" : `_t${time}`}_corrected`;
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

/** @typedef {{volume: import("../volumes/planes.js").Volume, voxelSize: import("openapi").VoxelSize | null}} Labels */

/** Load the original labels, and apply their corrections. @param {string} key @returns {Promise<Labels | null>} null if the labels are not saved in this browser */
async function loadCorrectedLabels(key) {
  const [originalLabels, edits] = await Promise.all([
    correctionStore.loadOriginalLabels(key),
    correctionStore.loadCorrections(key),
  ]);
  if (originalLabels === undefined) return null;
  const { zipped, bytes, shape, voxelSize } = originalLabels;
  const buffer = await new Response(zipped.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const data = new ARRAY_TYPES[/** @type {keyof typeof ARRAY_TYPES} */ (bytes)](buffer, 0, countVoxels(shape));
  const editor = new LabelEditor({ data, shape, step: [1, 1, 1], fullShape: shape }, [1, 1, 1]);
  return editor.restore(edits) ? { volume: editor.labels, voxelSize } : null;
}
