/** Comparison of the objects of two results for one stack. This module does not use the DOM. */

import { getColorIndex } from "./slices.js";

/** @typedef {import("./planes.js").Volume} Volume */

/**
 * Compare the objects of two results of the same shape. Returns three values:
 *
 * - commonCount: the number of pairs with an intersection over union above 0.5. Each object is in at most one such pair.
 * - objectCounts: the number of objects in each result.
 * - colorIndices: for each result, the color index of each id. An object and its counterpart in the other result have the
 *   same color if each of them overlaps more with the other than with any third object. All remaining objects are gray.
 * @param {Volume} first @param {Volume} second
 * @param {(Uint8Array | null)[]} hiddenFlags for each result and id, 1 to treat the object as background; null to compare all objects of a result
 */
export function compareObjects(first, second, hiddenFlags = [null, null]) {
  const overlaps = countOverlaps(first.data, second.data, hiddenFlags);
  /** @type {[Map<number, number>, Map<number, number>]} */
  const sizes = [new Map(), new Map()];
  for (const { id, partner, voxelCount } of overlaps) {
    if (id) sizes[0].set(id, (sizes[0].get(id) ?? 0) + voxelCount);
    if (partner) sizes[1].set(partner, (sizes[1].get(partner) ?? 0) + voxelCount);
  }
  const pairs = overlaps.filter(({ id, partner }) => id && partner).sort((a, b) => b.voxelCount - a.voxelCount);
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

/**
 * Count the voxels of each pair of ids at the same position. Id 0 is the background.
 * @param {Volume["data"]} first @param {Volume["data"]} second @param {(Uint8Array | null)[]} hiddenFlags @returns {{id: number, partner: number, voxelCount: number}[]}
 */
function countOverlaps(first, second, [firstHidden, secondHidden]) {
  /** @type {Map<number, Map<number, {id: number, partner: number, voxelCount: number}>>} */
  const overlaps = new Map();
  for (let start = 0, stop = 0; start < first.length; start = stop) {
    const [firstId, secondId] = [first[start], second[start]];
    while (stop < first.length && first[stop] === firstId && second[stop] === secondId) stop += 1;
    const [id, partner] = [firstHidden?.[firstId] ? 0 : firstId, secondHidden?.[secondId] ? 0 : secondId];
    const partners = overlaps.get(id) ?? new Map();
    overlaps.set(id, partners);
    const overlap = partners.get(partner);
    if (overlap) overlap.voxelCount += stop - start;
    else partners.set(partner, { id, partner, voxelCount: stop - start });
  }
  return [...overlaps.values()].flatMap((partners) => [...partners.values()]);
}
