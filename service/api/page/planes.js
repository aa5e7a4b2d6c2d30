/** Volumes in the browser: fetched in blocks from the middle outwards, in steps where the whole would be too large. */

import { queryOf, request } from "./server.js";

/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array} Numbers */
/** @typedef {[number, number, number]} Triple along z, y, x */

/**
 * @typedef {object} Volume
 * @property {Numbers} data in C order
 * @property {Triple} shape of what is here
 * @property {Triple} step every how many voxels of the whole
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

/**
 * Fetch one plane along z as finely as it fits into one answer.
 * @param {string} address @param {Record<string, unknown>} parameters @param {Triple} whole @param {number} z
 * @param {AbortSignal} signal
 * @returns {Promise<import("./slices.js").Plane>}
 */
export async function fetchPlane(address, parameters, whole, z, signal) {
  const step = chooseStep([1, whole[1], whole[2]]);
  const range = { from: z, to: z + 1, step: step.join() };
  const response = await request(`${address}?${queryOf({ ...parameters, ...range })}`, { signal });
  const kind = /** @type {keyof typeof TYPES} */ (response.headers.get("X-StackSeg-Dtype"));
  const [, height, width] = sampled(whole, step);
  return { data: new TYPES[kind](await response.arrayBuffer()), width, height };
}

/**
 * Fetch a volume. `onblock` is called after every block, so that its planes can be drawn.
 * @param {string} address of the planes
 * @param {Record<string, unknown>} parameters of the stack
 * @param {Triple} whole
 * @param {AbortSignal} signal
 * @param {(volume: Volume, share: number) => void} onblock
 * @param {Triple} [step] every how many voxels are fetched
 * @returns {Promise<Volume>}
 */
export async function fetchVolume(address, parameters, whole, signal, onblock, step = chooseStep(whole)) {
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
      const response = await request(`${address}?${queryOf({ ...parameters, ...range })}`, { signal });
      const kind = /** @type {keyof typeof TYPES} */ (response.headers.get("X-StackSeg-Dtype"));
      const block = new TYPES[kind](await response.arrayBuffer());
      volume ??= { data: new TYPES[kind](count(shape)), shape, step, whole };
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
