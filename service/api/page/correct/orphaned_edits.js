/** Export of the edited labels of a result or stack that the service no longer stores. The labels are saved in this browser. */

import { button, downloadBlob, element, openDialog } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { loadCorrectedLabels } from "../volumes/corrected_labels.js";
import * as correctionStore from "../volumes/correction_store.js";
import { encodeNifti, encodeNpy, encodeTiff } from "../volumes/label_files.js";
import { formatTimePoint } from "../volumes/time_points.js";

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
  /** @param {string} text @param {string} suffix @param {(labels: import("../volumes/corrected_labels.js").CorrectedLabels) => Blob | Promise<Blob>} encode */
  const createExportButton = (text, suffix, encode) =>
    button(
      text,
      async () => {
        const labels = await loadCorrectedLabels(key);
        if (labels) downloadBlob(await encode(labels), fileStem + suffix);
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
    createExportButton("OME-TIFF", ".ome.tif", ({ editor, voxelSize }) => encodeTiff(editor.labels, voxelSize)),
    createExportButton("NIfTI", ".nii.gz", ({ editor, voxelSize }) => encodeNifti(editor.labels, voxelSize)),
    createExportButton("NumPy", ".npy", ({ editor }) => encodeNpy(editor.labels)),
  );
}
