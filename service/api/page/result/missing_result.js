/** Export of corrections of a result that the service no longer stores. This browser also stores the original labels. */

import { button, downloadBlob, element, openDialog } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import * as correctionStore from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { asNpy, asTiff } from "../volumes/label_files.js";
import { countVoxels } from "../volumes/planes.js";

const TYPES = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

/**
 * Offer the corrected labels as files.
 * @param {string} job @param {string} name of the stack's file @param {() => void} ondiscard called after the user discarded the corrections
 * @returns {Promise<boolean>} false if there are no corrections
 */
export async function offerCorrections(job, name, ondiscard) {
  const keys = [...(await correctionStore.counts())].filter(([key]) => key.split("@")[0] === job);
  if (keys.length === 0) return false;
  const stem = name.replace(/(\.ome)?\.tiff?$/i, "");
  const problem = element("p", { class: "warning-text", role: "alert" });
  const edits = keys.reduce((sum, [, number]) => sum + number, 0);
  const discard = async () => {
    if (!confirm(`Discard ${formatCount(edits, "correction")} of ${name}?`)) return;
    await correctionStore.forget(job);
    dialog.close();
    ondiscard();
  };
  const content = element(
    "div",
    { class: "dialog-form" },
    element(
      "p",
      { class: "muted" },
      `The service no longer stores this result of ${name}. Your ${formatCount(edits, "correction")} and the original labels are saved in this browser. You can export the corrected labels as a file.`,
    ),
    ...keys.map(([key, number]) => exportRow(key, number, stem, problem)),
    problem,
    element(
      "div",
      { class: "row between" },
      button("Discard the corrections", discard, "link"),
      button("Close", () => dialog.close(), "secondary"),
    ),
  );
  const dialog = openDialog("This result has expired", content);
  return true;
}

/** @param {string} key of a result, or of a time point @param {number} edits @param {string} stem @param {HTMLElement} problem */
function exportRow(key, edits, stem, problem) {
  const time = key.split("@")[1];
  const file = `${stem}${time === undefined ? "" : `_t${time}`}_corrected`;
  /** @param {string} text @param {string} suffix @param {(labels: Labels) => Blob} write */
  const exportButton = (text, suffix, write) =>
    button(
      text,
      async () => {
        const labels = await correctedLabels(key);
        if (labels) downloadBlob(write(labels), file + suffix);
        else problem.textContent = "The original labels of these corrections are not saved in this browser.";
      },
      "secondary",
    );
  return element(
    "div",
    { class: "row" },
    element("span", {}, `${time === undefined ? "" : `Time point ${time}: `}${formatCount(edits, "correction")}`),
    exportButton("OME-TIFF", ".ome.tif", ({ volume, voxelSize }) => asTiff(volume, voxelSize)),
    exportButton("NumPy", ".npy", ({ volume }) => asNpy(volume)),
  );
}

/** @typedef {{volume: import("../volumes/planes.js").Volume, voxelSize: import("openapi").VoxelSize | null}} Labels */

/** @param {string} key @returns {Promise<Labels | null>} */
async function correctedLabels(key) {
  const [original, edits] = await Promise.all([correctionStore.loadOriginalLabels(key), correctionStore.load(key)]);
  if (original === undefined) return null;
  const { zipped, bytes, shape, voxelSize } = original;
  const buffer = await new Response(zipped.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const data = new TYPES[/** @type {keyof typeof TYPES} */ (bytes)](buffer, 0, countVoxels(shape));
  const editor = new LabelEditor({ data, shape, step: [1, 1, 1], fullShape: shape }, [1, 1, 1]);
  return editor.restore(edits) ? { volume: editor.labels, voxelSize } : null;
}
