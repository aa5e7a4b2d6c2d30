/** Labels and images in full resolution, which corrections need, where the views show them in coarse steps. */

import { size } from "../core/format.js";
import { count, fetchVolume, MOST_PLANE_VOXELS } from "../volumes/planes.js";

/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

const MOST_BYTES = 300_000_000;

/** @param {Volume} volume @returns {boolean} whether it has all voxels */
export function isFine(volume) {
  return volume.step.every((step) => step === 1);
}

/** @param {Volume} labels @returns {string} why they cannot be corrected; "" where they can */
export function refusalOf({ whole, data }) {
  const bytes = count(whole) * data.BYTES_PER_ELEMENT;
  const fits = bytes <= MOST_BYTES && whole[1] * whole[2] <= MOST_PLANE_VOXELS;
  if (fits) return "";
  return `All labels have to be in the browser to be corrected, and these are ${size(bytes)} in planes of ${whole[2]} × ${whole[1]}. Segment a smaller part of the stack, ${size(MOST_BYTES)} of labels at most, and correct that: a model learns as well from parts.`;
}

/**
 * @param {Volume} labels that the views show @param {Omit<import("../volumes/planes.js").Source, "whole">} source of them
 * @param {Viewer} viewer says how much has come @param {AbortSignal} signal
 * @returns {Promise<Volume>} a copy that may be changed, of unsigned integers
 */
export async function fetchLabels(labels, source, viewer, signal) {
  const fine = isFine(labels);
  const progress = sayProgress(viewer, "the labels");
  const { whole } = labels;
  const found = fine ? labels : await fetchVolume({ ...source, whole }, signal, progress, [1, 1, 1]);
  const { data } = found;
  const unsigned = data instanceof Uint8Array || data instanceof Uint16Array || data instanceof Uint32Array;
  const own = unsigned ? (fine ? data.slice() : data) : Uint32Array.from(data);
  return { ...found, data: own };
}

/** @param {Volume} image that the views show @param {Viewer} viewer @param {AbortSignal} signal @returns {Promise<Volume | null>} null: the stack is not kept */
export async function fetchImage(image, viewer, signal) {
  if (isFine(image)) return image;
  return (await viewer.fetchWhole?.(signal, sayProgress(viewer, "the whole stack"))) ?? null;
}

/** @param {Viewer} viewer @param {string} what @returns {(volume: Volume, share: number) => void} */
function sayProgress(viewer, what) {
  return (_, share) => {
    viewer.waiting.textContent = share < 1 ? `Fetching ${what}, ${Math.round(share * 100)} %` : "";
  };
}

/** Edges of a voxel of the whole stack. @param {import("../viewer/scene.js").SceneState} state @param {Volume} image that it has @returns {Triple} */
export function edgesOfWhole({ voxel }, image) {
  return /** @type {Triple} */ (voxel.map((edge, axis) => edge / image.step[axis]));
}

/** Show a stack in another resolution, at the same place. @param {Viewer} viewer @param {Volume} image */
export function showImage(viewer, image) {
  const { scene } = viewer;
  const { image: before, at, centre, known } = scene.state;
  if (before === null || before === image) return;
  const ratio = before.step.map((step, axis) => step / image.step[axis]);
  const [z, y, x] = edgesOfWhole(scene.state, before);
  viewer.open(image, known ? { z, y, x } : null);
  const voxel = at.map((place, axis) => Math.min(image.shape[axis] - 1, Math.floor(place * ratio[axis])));
  scene.set({
    at: /** @type {Triple} */ (voxel),
    centre: /** @type {Triple} */ (centre.map((place, axis) => place * ratio[axis])),
  });
  viewer.settle();
}
