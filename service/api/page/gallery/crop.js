/** A part of a stack at full resolution, as a file on which models are tried. */

import { encodeTiff } from "../volumes/label_files.js";
import { countVoxels, MAX_PLANE_VOXELS, makePlaneParameters, requestPlanes } from "../volumes/planes.js";

/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/planes.js").PixelArray} PixelArray */
/** @typedef {import("openapi").Description} Description */
/** @typedef {{start: Triple, shape: Triple}} Box first voxel, and size in voxels */

/** Maximum size of a part. Every bundled model segments it in seconds, and it contains several objects of usual size. */
const MAX_CROP_VOXELS = 4_000_000;

/** Choose the largest part of a stack around a voxel: the longest edges are shortened to the same length. @param {Triple} fullShape of the stack @param {Triple} center @returns {Box} */
export function chooseBox(fullShape, center) {
  let edge = Math.max(...fullShape);
  const limitEdges = () => /** @type {Triple} */ (fullShape.map((length) => Math.min(length, edge)));
  while (countVoxels(limitEdges()) > MAX_CROP_VOXELS) edge -= 1;
  const shape = limitEdges();
  const start = shape.map((length, axis) =>
    Math.min(Math.max(center[axis] - (length >> 1), 0), fullShape[axis] - length),
  );
  return { start: /** @type {Triple} */ (start), shape };
}

/**
 * Fetch a part of a stack.
 * @param {string} stack id @param {Description} file @param {Record<string, string>} parameters of the request: scene, channel, time point and axes @param {number} time displayed time point
 * @param {Box} box @param {AbortSignal} signal @param {(fraction: number) => void} onprogress
 * @returns {Promise<{channels: PixelArray[], channelNames: string[]}>} pixels `[Z, Y, X]` of the selected channel, or of all channels if none is selected
 */
export async function fetchCrop(stack, file, parameters, time, box, signal, onprogress) {
  const isOneChannel = Boolean(parameters.channel) || file.channels.length <= 1;
  const selectedChannels = isOneChannel ? [parameters.channel] : file.channels.map((_, index) => String(index));
  const channels = [];
  for (const [index, channel] of selectedChannels.entries()) {
    const query = makePlaneParameters(file, parameters, time, channel);
    const onblock = (/** @type {number} */ fraction) => onprogress((index + fraction) / selectedChannels.length);
    channels.push(await fetchBox(`stacks/${stack}/planes`, query, file, box, signal, onblock));
  }
  return { channels, channelNames: isOneChannel ? [parameters.channel ?? ""] : file.channels };
}

/**
 * Fetch the pixels in a box. The service sends whole planes, so the planes are normal to the axis along which the box is the smallest part of the stack.
 * @param {string} url @param {Record<string, unknown>} query @param {Description} file @param {Box} box
 * @param {AbortSignal} signal @param {(fraction: number) => void} onprogress
 * @returns {Promise<PixelArray>}
 */
async function fetchBox(url, query, { shape: [, ...lengths] }, { start, shape }, signal, onprogress) {
  const fullShape = /** @type {Triple} */ (lengths);
  const fractions = shape.map((length, axis) => length / fullShape[axis]);
  const axis = fractions.indexOf(Math.min(...fractions));
  const planeVoxels = countVoxels(fullShape) / fullShape[axis];
  const planesPerBlock = Math.max(1, Math.floor(MAX_PLANE_VOXELS / planeVoxels));
  /** @type {PixelArray | null} */
  let pixels = null;
  for (let first = 0; first < shape[axis]; first += planesPerBlock) {
    const count = Math.min(planesPerBlock, shape[axis] - first);
    const from = start[axis] + first;
    const { data } = await requestPlanes(url, { ...query, axis: "zyx"[axis], from, to: from + count }, signal);
    pixels ??= /** @type {PixelArray} */ (new /** @type {any} */ (data.constructor)(countVoxels(shape)));
    const blockShape = /** @type {Triple} */ (fullShape.map((length, index) => (index === axis ? count : length)));
    copyBlock(data, blockShape, pixels, shape, start, axis, first);
    onprogress((first + count) / shape[axis]);
  }
  if (pixels === null) throw new Error("The part of the stack is empty.");
  return pixels;
}

/**
 * Copy the voxels of a block of planes that are in the box.
 * @param {PixelArray} block @param {Triple} blockShape @param {PixelArray} pixels of the box @param {Triple} shape of the box
 * @param {Triple} start of the box @param {number} axis normal to the planes @param {number} first index of the first plane of the block in the box
 */
function copyBlock(block, blockShape, pixels, shape, start, axis, first) {
  const source = start.map((position, index) => (index === axis ? 0 : position));
  const target = [0, 0, 0].map((_, index) => (index === axis ? first : 0));
  const [depth, height, width] = shape.map((length, index) => (index === axis ? blockShape[axis] : length));
  for (let z = 0; z < depth; z += 1) {
    for (let y = 0; y < height; y += 1) {
      const from = ((source[0] + z) * blockShape[1] + source[1] + y) * blockShape[2] + source[2];
      const to = ((target[0] + z) * shape[1] + target[1] + y) * shape[2] + target[2];
      pixels.set(block.subarray(from, from + width), to);
    }
  }
}

/** Encode a part of a stack as a file. @param {PixelArray[]} channels @param {string[]} channelNames @param {Triple} shape @param {import("openapi").VoxelSize | null} voxelSize */
export function encodeCrop(channels, channelNames, shape, voxelSize) {
  const voxelCount = countVoxels(shape);
  const data = /** @type {PixelArray} */ (
    new /** @type {any} */ (channels[0].constructor)(channels.length * voxelCount)
  );
  for (const [index, pixels] of channels.entries()) data.set(pixels, index * voxelCount);
  return encodeTiff({ data, shape }, voxelSize, "part", channelNames);
}
