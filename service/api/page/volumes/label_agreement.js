/** Comparison of the objects of two results for one stack. This module does not use the DOM. */

import { getColorIndex } from "./label_colors.js";

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {{id: number, partner: number, voxelCount: number}} Overlap number of voxels with an id in one result and an id in the other. Id 0 is the background. */

/** Longest time without a pause, so that the page reacts to input while it counts. */
const MAX_SLICE_MILLISECONDS = 8;
/** Number of voxels between two checks of the time. */
const BLOCK_VOXELS = 1 << 15;

/**
 * Compare the objects of two results. Returns three values:
 *
 * - commonCount: the number of pairs with an intersection over union above 0.5. Each object is in at most one such pair.
 * - objectCounts: the number of objects in each result.
 * - colorIndices: for each result, the color index of each id. An object and its counterpart in the other result have the
 *   same color if each of them overlaps more with the other than with any third object. All remaining objects are gray.
 * @param {Overlap[]} overlaps from `countOverlaps`
 * @param {(Uint8Array | null)[]} hiddenFlags for each result and id, 1 to treat the object as background; null to compare all objects of a result
 */
export function compareObjects(overlaps, hiddenFlags = [null, null]) {
  const shownOverlaps = hideObjects(overlaps, hiddenFlags);
  /** @type {[Map<number, number>, Map<number, number>]} */
  const sizes = [new Map(), new Map()];
  for (const { id, partner, voxelCount } of shownOverlaps) {
    if (id) sizes[0].set(id, (sizes[0].get(id) ?? 0) + voxelCount);
    if (partner) sizes[1].set(partner, (sizes[1].get(partner) ?? 0) + voxelCount);
  }
  const pairs = shownOverlaps.filter(({ id, partner }) => id && partner).sort((a, b) => b.voxelCount - a.voxelCount);
  const commonCount = pairs.filter(({ id, partner, voxelCount }) => {
    const union = (sizes[0].get(id) ?? 0) + (sizes[1].get(partner) ?? 0) - voxelCount;
    return 2 * voxelCount > union;
  }).length;
  const objectCounts = sizes.map((sizeById) => sizeById.size);
  const maxIds = sizes.map((sizeById) => [...sizeById.keys()].reduce((max, id) => Math.max(max, id), 0));
  const [firstColors, secondColors] = maxIds.map((id) => new Uint8Array(id + 1));
  const [seenIds, seenPartners] = [new Set(), new Set()];
  for (const { id, partner } of pairs) {
    if (!seenIds.has(id) && !seenPartners.has(partner)) firstColors[id] = secondColors[partner] = getColorIndex(id);
    seenIds.add(id);
    seenPartners.add(partner);
  }
  return { commonCount, objectCounts, colorIndices: [firstColors, secondColors] };
}

/** @param {Overlap[]} overlaps @param {(Uint8Array | null)[]} hiddenFlags @returns {Overlap[]} the overlaps, with hidden objects as background */
function hideObjects(overlaps, [firstHidden, secondHidden]) {
  return overlaps.map(({ id, partner, voxelCount }) => ({
    id: firstHidden?.[id] ? 0 : id,
    partner: secondHidden?.[partner] ? 0 : partner,
    voxelCount,
  }));
}

/**
 * Count the voxels of each pair of ids at the same position, with pauses in which the page reacts to input.
 * @param {Volume} first @param {Volume} second of the same shape @param {AbortSignal} signal @returns {Promise<Overlap[] | null>} null if aborted
 */
export async function countOverlaps(first, second, signal) {
  /** @type {Map<number, Map<number, Overlap>>} */
  const overlaps = new Map();
  let sliceStart = performance.now();
  for (let start = 0; start < first.data.length; start += BLOCK_VOXELS) {
    if (performance.now() - sliceStart > MAX_SLICE_MILLISECONDS) {
      await new Promise((resolve) => setTimeout(resolve));
      if (signal.aborted) return null;
      sliceStart = performance.now();
    }
    const stop = start + BLOCK_VOXELS;
    addOverlaps(overlaps, first.data.subarray(start, stop), second.data.subarray(start, stop));
  }
  return [...overlaps.values()].flatMap((partners) => [...partners.values()]);
}

/** @param {Map<number, Map<number, Overlap>>} overlaps by id and partner @param {Volume["data"]} first @param {Volume["data"]} second */
function addOverlaps(overlaps, first, second) {
  for (let start = 0, stop = 0; start < first.length; start = stop) {
    const [id, partner] = [first[start], second[start]];
    while (stop < first.length && first[stop] === id && second[stop] === partner) stop += 1;
    const partners = overlaps.get(id) ?? new Map();
    overlaps.set(id, partners);
    const overlap = partners.get(partner);
    if (overlap) overlap.voxelCount += stop - start;
    else partners.set(partner, { id, partner, voxelCount: stop - start });
  }
}
