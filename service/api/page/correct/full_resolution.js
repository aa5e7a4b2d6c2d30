/** Functions that fetch and show labels and images at full resolution, which corrections require. */

import { formatBytes } from "../core/format.js";
import { countVoxels, fetchVolume, MAX_PLANE_VOXELS } from "../volumes/planes.js";

/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

/** Maximum size of labels that can be corrected in the browser. */
const MAX_LABEL_BYTES = 300_000_000;

/** @param {Volume} volume @returns {boolean} whether the volume is at full resolution, not subsampled */
export function isFullResolution(volume) {
  return volume.step.every((step) => step === 1);
}

/** @param {Pick<Volume, "data" | "fullShape">} labels @returns {string} explanation if the labels are too large to be corrected, otherwise "" */
export function explainSizeLimit({ fullShape, data }) {
  const bytes = countVoxels(fullShape) * data.BYTES_PER_ELEMENT;
  const isSmallEnough = bytes <= MAX_LABEL_BYTES && fullShape[1] * fullShape[2] <= MAX_PLANE_VOXELS;
  if (isSmallEnough) return "";
  return `These labels are too large to edit in the browser: ${formatBytes(bytes)} in planes of ${fullShape[2]} × ${fullShape[1]} voxels. Use a smaller part of the stack with at most ${formatBytes(MAX_LABEL_BYTES)} of labels. A part is sufficient to train a model.`;
}

/**
 * Fetch labels at full resolution. If the displayed labels are already at full resolution, copy them.
 * @param {Volume} labels displayed labels @param {Omit<import("../volumes/planes.js").Source, "fullShape">} source of the labels
 * @param {Viewer} viewer shows the progress @param {AbortSignal} signal
 * @returns {Promise<Volume>} labels with an unsigned integer type, which can be changed in place
 */
export async function fetchLabels(labels, source, viewer, signal) {
  const isLoaded = isFullResolution(labels);
  const onblock = createProgressCallback(viewer, "the labels");
  const { fullShape } = labels;
  const volume = isLoaded ? labels : await fetchVolume({ ...source, fullShape }, signal, onblock, [1, 1, 1]);
  const { data } = volume;
  const isUnsigned = data instanceof Uint8Array || data instanceof Uint16Array || data instanceof Uint32Array;
  const editableData = isUnsigned ? (isLoaded ? data.slice() : data) : Uint32Array.from(data);
  return { ...volume, data: editableData };
}

/** @param {Volume} image displayed image @param {Viewer} viewer @param {AbortSignal} signal @returns {Promise<Volume | null>} the image at full resolution, null if the stack is no longer stored */
export async function fetchImage(image, viewer, signal) {
  if (isFullResolution(image)) return image;
  return (
    (await viewer.fetchFullVolume?.(signal, createProgressCallback(viewer, "the stack at full resolution"))) ?? null
  );
}

/** @param {Viewer} viewer @param {string} subject of the progress message, such as "the labels" @returns {(volume: Volume, fraction: number) => void} */
function createProgressCallback(viewer, subject) {
  return (_, fraction) => {
    viewer.fetchStatus.textContent = fraction < 1 ? `Loading ${subject}, ${Math.round(fraction * 100)}%` : "";
  };
}

/** Return the voxel size at full resolution. @param {import("../viewer/scene.js").SceneState} state @param {Volume} image displayed image @returns {Triple} */
export function getFullResolutionVoxelSize({ voxelSize }, image) {
  return /** @type {Triple} */ (voxelSize.map((length, axis) => length / image.step[axis]));
}

/** Show an image at another resolution without moving the views. @param {Viewer} viewer @param {Volume} image */
export function showImage(viewer, image) {
  const { scene } = viewer;
  const { image: previousImage, position, center, isCalibrated } = scene.state;
  if (previousImage === null || previousImage === image) return;
  const ratio = previousImage.step.map((step, axis) => step / image.step[axis]);
  const [z, y, x] = getFullResolutionVoxelSize(scene.state, previousImage);
  viewer.open(image, isCalibrated ? { z, y, x } : null);
  const voxel = position.map((index, axis) => Math.min(image.shape[axis] - 1, Math.floor(index * ratio[axis])));
  scene.set({
    position: /** @type {Triple} */ (voxel),
    center: /** @type {Triple} */ (center.map((index, axis) => index * ratio[axis])),
  });
  viewer.adjustContrast();
}
