/** Volumes in the browser: fetched in blocks from the middle outwards, in steps where the whole would be too large. */

import { Problem, queryOf, request } from "../core/requests.js";
import { cut } from "./slices.js";

/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array} Numbers */
/** @typedef {[number, number, number]} Triple along z, y, x */

/**
 * @typedef {object} Volume
 * @property {Numbers} data in C order
 * @property {Triple} shape of what is here
 * @property {Triple} step every how many voxels of the whole
 * @property {Triple} whole shape of the whole volume
 */

/**
 * Where planes come from.
 * @typedef {object} Source
 * @property {string} address of the planes of a stack or a job
 * @property {Record<string, unknown>} parameters which channel, time point and axes
 * @property {Triple} whole shape of the whole volume
 */

const TYPES = {
  uint8: Uint8Array,
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  float32: Float32Array,
};
const MOST_VOXELS = 24_000_000;
export const MOST_PLANE_VOXELS = 8_000_000;
const BLOCK_VOXELS = 2_000_000;
const AT_ONCE = 3;
const BUSY_MILLISECONDS = 500;

/** @param {Triple} whole @returns {Triple} the smallest steps with which a volume fits, and a plane into one answer */
export function chooseStep(whole) {
  /** @type {Triple} */
  const step = [1, 1, 1];
  for (;;) {
    const [z, y, x] = sampled(whole, step);
    const large = y * x > MOST_PLANE_VOXELS;
    if (!large && z * y * x <= MOST_VOXELS) return step;
    if (large || Math.max(y, x) >= z) {
      step[1] += 1;
      step[2] += 1;
    } else step[0] += 1;
  }
}

/** @param {Triple} whole @param {Triple} step @returns {Triple} */
function sampled(whole, step) {
  return [Math.ceil(whole[0] / step[0]), Math.ceil(whole[1] / step[1]), Math.ceil(whole[2] / step[2])];
}

/** @param {Triple} shape */
export function count(shape) {
  return shape[0] * shape[1] * shape[2];
}

/** @param {Triple} whole @param {import("./slices.js").Axis} axis @returns {Triple} the steps with which one plane fits into one answer */
function choosePlaneStep(whole, axis) {
  for (let each = 1; ; each += 1) {
    /** @type {Triple} */
    const step = [each, each, each];
    step[axis] = 1;
    const shape = sampled(whole, step);
    shape[axis] = 1;
    if (count(shape) <= MOST_PLANE_VOXELS) return step;
  }
}

/**
 * Ask for planes; a service that has too many on their way is asked again.
 * @param {string} address @param {Record<string, unknown>} query @param {AbortSignal} signal
 * @returns {Promise<Numbers>}
 */
async function requestPlanes(address, query, signal) {
  for (;;) {
    try {
      const response = await request(`${address}?${queryOf(query)}`, { signal });
      const kind = /** @type {keyof typeof TYPES} */ (response.headers.get("X-StackSeg-Dtype"));
      return new TYPES[kind](await response.arrayBuffer());
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 429) throw error;
      await new Promise((resolve) => setTimeout(resolve, BUSY_MILLISECONDS));
      signal.throwIfAborted();
    }
  }
}

/**
 * Fetch one plane as finely as it fits into one answer.
 * @param {Source} source @param {import("./slices.js").Axis} axis across the plane @param {number} at voxel along it @param {AbortSignal} signal
 * @returns {Promise<{plane: import("./slices.js").Plane, step: Triple}>}
 */
export async function fetchPlane({ address, parameters, whole }, axis, at, signal) {
  const step = choosePlaneStep(whole, axis);
  const range = { axis: "zyx"[axis], from: at, to: at + 1, step: step.join() };
  const data = await requestPlanes(address, { ...parameters, ...range }, signal);
  const shape = sampled(whole, step);
  shape[axis] = 1;
  return { plane: cut({ data, shape, step, whole }, axis, 0), step };
}

/**
 * Fetch a small picture of the plane in the middle of a stack.
 * @param {Source} source @param {number} pixels of the longer edge @param {AbortSignal} signal
 * @returns {Promise<Volume>}
 */
export async function fetchMiddle({ address, parameters, whole }, pixels, signal) {
  const coarse = Math.ceil(Math.max(whole[1], whole[2]) / pixels);
  /** @type {Triple} */
  const step = [1, coarse, coarse];
  const from = whole[0] >> 1;
  const data = await requestPlanes(address, { ...parameters, from, to: from + 1, step: step.join() }, signal);
  const [, rows, columns] = sampled(whole, step);
  return { data, shape: [1, rows, columns], step, whole };
}

/**
 * The part of a stack that is looked at, as parameters of its planes.
 * @param {import("openapi").Description} file @param {Record<string, unknown>} parameters of the request
 * @param {number | string | undefined} time point, where there are several @param {number | string | undefined} channel
 */
export function partOf(file, { axes }, time, channel) {
  const index = file.channels.indexOf(String(channel ?? ""));
  return { channel: index >= 0 ? index : (channel ?? 0), time: file.times > 1 ? (time ?? 0) : undefined, axes };
}

/**
 * Fetch a volume. `onblock` is called after every block, so that its planes can be drawn.
 * @param {Source} source @param {AbortSignal} signal
 * @param {(volume: Volume, share: number) => void} onblock
 * @param {Triple} [step] every how many voxels are fetched
 * @returns {Promise<Volume>}
 */
export async function fetchVolume({ address, parameters, whole }, signal, onblock, step = chooseStep(whole)) {
  const shape = sampled(whole, step);
  const thick = Math.max(1, Math.floor(BLOCK_VOXELS / (shape[1] * shape[2])));
  const starts = Array.from({ length: Math.ceil(shape[0] / thick) }, (_, block) => block * thick);
  const middle = shape[0] / 2 - thick / 2;
  starts.sort((one, other) => Math.abs(one - middle) - Math.abs(other - middle));
  /** @type {Volume | null} */
  let volume = null;
  let done = 0;
  const total = starts.length;

  async function work() {
    for (let start = starts.shift(); start !== undefined; start = starts.shift()) {
      const range = { from: start * step[0], to: Math.min((start + thick) * step[0], whole[0]), step: step.join() };
      const block = await requestPlanes(address, { ...parameters, ...range }, signal);
      const kind = /** @type {any} */ (block.constructor);
      volume ??= { data: /** @type {Numbers} */ (new kind(count(shape))), shape, step, whole };
      volume.data.set(block, start * shape[1] * shape[2]);
      done += 1;
      onblock(volume, done / total);
    }
  }

  // The first block alone: the service decodes the file for it, and the others then find it decoded.
  const first = starts.splice(1);
  await work();
  starts.push(...first);
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  if (volume === null) throw new Error("A volume without planes.");
  return volume;
}
