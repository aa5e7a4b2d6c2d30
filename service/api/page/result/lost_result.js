/** Corrections of a result that the service does not keep any more: what they were made on is kept with them in this browser. */

import { button, element, openDialog, save } from "../core/elements.js";
import { counted } from "../core/format.js";
import * as kept from "../volumes/correction_store.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { asNpy, asTiff } from "../volumes/label_files.js";
import { count } from "../volumes/planes.js";

const TYPES = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

/**
 * Offer the corrected labels as files.
 * @param {string} job @param {string} name of the stack's file @param {() => void} ondiscard the corrections are gone
 * @returns {Promise<boolean>} false: there are no corrections
 */
export async function offerCorrections(job, name, ondiscard) {
  const keys = [...(await kept.counts())].filter(([key]) => key.split("@")[0] === job);
  if (keys.length === 0) return false;
  const stem = name.replace(/(\.ome)?\.tiff?$/i, "");
  const problem = element("p", { class: "warning-text", role: "alert" });
  const edits = keys.reduce((sum, [, number]) => sum + number, 0);
  const discard = async () => {
    if (!confirm(`Discard ${counted(edits, "correction")} of ${name}?`)) return;
    await kept.forget(job);
    dialog.close();
    ondiscard();
  };
  const content = element(
    "div",
    { class: "dialog-form" },
    element(
      "p",
      { class: "muted" },
      `The service does not keep this result of ${name} any more. Your ${counted(edits, "correction")} and the labels that they were made on are in this browser: take the corrected labels as a file.`,
    ),
    ...keys.map(([key, number]) => files(key, number, stem, problem)),
    problem,
    element(
      "div",
      { class: "row between" },
      button("Discard the corrections", discard, "link"),
      button("Close", () => dialog.close(), "secondary"),
    ),
  );
  const dialog = openDialog("The result is gone", content);
  return true;
}

/** @param {string} key of a result, or of a time point @param {number} edits @param {string} stem @param {HTMLElement} problem */
function files(key, edits, stem, problem) {
  const time = key.split("@")[1];
  const file = `${stem}${time === undefined ? "" : `_t${time}`}_corrected`;
  /** @param {string} text @param {string} suffix @param {(labels: Labels) => Blob} write */
  const take = (text, suffix, write) =>
    button(
      text,
      async () => {
        const labels = await correctedLabels(key);
        if (labels) save(write(labels), file + suffix);
        else problem.textContent = "This browser has not kept the labels that these corrections were made on.";
      },
      "secondary",
    );
  return element(
    "div",
    { class: "row" },
    element("span", {}, `${time === undefined ? "" : `Time point ${time}: `}${counted(edits, "correction")}`),
    take("OME-TIFF", ".ome.tif", ({ volume, voxelSize }) => asTiff(volume, voxelSize)),
    take("NumPy", ".npy", ({ volume }) => asNpy(volume)),
  );
}

/** @typedef {{volume: import("../volumes/planes.js").Volume, voxelSize: import("openapi").VoxelSize | null}} Labels */

/** @param {string} key @returns {Promise<Labels | null>} */
async function correctedLabels(key) {
  const [segmented, edits] = await Promise.all([kept.loadSegmented(key), kept.load(key)]);
  if (segmented === undefined) return null;
  const { zipped, bytes, shape, voxelSize } = segmented;
  const buffer = await new Response(zipped.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const data = new TYPES[/** @type {keyof typeof TYPES} */ (bytes)](buffer, 0, count(shape));
  const editor = new LabelEditor({ data, shape, step: [1, 1, 1], whole: shape }, [1, 1, 1]);
  return editor.restore(edits) ? { volume: editor.labels, voxelSize } : null;
}
