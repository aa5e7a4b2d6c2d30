/** Labels and images at full resolution, which corrections require even if the views show subsampled volumes. */

import { formatBytes } from "../core/format.js";
import { countVoxels, fetchVolume, MAX_PLANE_VOXELS } from "../volumes/planes.js";

/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

/** Largest labels that can be corrected in the browser. */
const MAX_BYTES = 300_000_000;

/** @param {Volume} volume @returns {boolean} whether it is not subsampled */
export function isFullResolution(volume) {
  return volume.step.every((step) => step === 1);
}

/** @param {Volume} labels @returns {string} explains why the labels are too large to be corrected, "" if they are not */
export function explainSizeLimit({ fullShape, data }) {
  const bytes = countVoxels(fullShape) * data.BYTES_PER_ELEMENT;
  const fits = bytes <= MAX_BYTES && fullShape[1] * fullShape[2] <= MAX_PLANE_VOXELS;
  if (fits) return "";
  return `These labels are too large to correct in the browser: ${formatBytes(bytes)} in planes of ${fullShape[2]} × ${fullShape[1]} voxels. Segment and correct a smaller part of the stack with at most ${formatBytes(MAX_BYTES)} of labels. A part is sufficient to train a model.`;
}

/**
 * Fetch labels at full resolution, unless the displayed labels are at full resolution.
 * @param {Volume} labels displayed labels @param {Omit<import("../volumes/planes.js").Source, "fullShape">} source of the labels
 * @param {Viewer} viewer shows the progress @param {AbortSignal} signal
 * @returns {Promise<Volume>} a copy with unsigned integers that can be changed
 */
export async function fetchLabels(labels, source, viewer, signal) {
  const isFull = isFullResolution(labels);
  const onblock = progressCallback(viewer, "the labels");
  const { fullShape } = labels;
  const volume = isFull ? labels : await fetchVolume({ ...source, fullShape }, signal, onblock, [1, 1, 1]);
  const { data } = volume;
  const isUnsigned = data instanceof Uint8Array || data instanceof Uint16Array || data instanceof Uint32Array;
  const editable = isUnsigned ? (isFull ? data.slice() : data) : Uint32Array.from(data);
  return { ...volume, data: editable };
}

/** @param {Volume} image displayed image @param {Viewer} viewer @param {AbortSignal} signal @returns {Promise<Volume | null>} the image at full resolution, null if the stack is no longer stored */
export async function fetchImage(image, viewer, signal) {
  if (isFullResolution(image)) return image;
  return (await viewer.fetchFullVolume?.(signal, progressCallback(viewer, "the stack at full resolution"))) ?? null;
}

/** @param {Viewer} viewer @param {string} name @returns {(volume: Volume, fraction: number) => void} */
function progressCallback(viewer, name) {
  return (_, fraction) => {
    viewer.fetchStatus.textContent = fraction < 1 ? `Loading ${name}, ${Math.round(fraction * 100)}%` : "";
  };
}

/** Return the voxel size at full resolution. @param {import("../viewer/scene.js").SceneState} state @param {Volume} image displayed image @returns {Triple} */
export function fullResolutionVoxel({ voxel }, image) {
  return /** @type {Triple} */ (voxel.map((edge, axis) => edge / image.step[axis]));
}

/** Show an image at another resolution without moving the views. @param {Viewer} viewer @param {Volume} image */
export function showImage(viewer, image) {
  const { scene } = viewer;
  const { image: before, position, center, isCalibrated } = scene.state;
  if (before === null || before === image) return;
  const ratio = before.step.map((step, axis) => step / image.step[axis]);
  const [z, y, x] = fullResolutionVoxel(scene.state, before);
  viewer.open(image, isCalibrated ? { z, y, x } : null);
  const voxel = position.map((index, axis) => Math.min(image.shape[axis] - 1, Math.floor(index * ratio[axis])));
  scene.set({
    position: /** @type {Triple} */ (voxel),
    center: /** @type {Triple} */ (center.map((index, axis) => index * ratio[axis])),
  });
  viewer.adjustContrast();
}
