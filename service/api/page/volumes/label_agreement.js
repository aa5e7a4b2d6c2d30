/** How far two results of one stack have the same objects. Nothing here touches the document. */

import { entryOf } from "./slices.js";

/** @typedef {import("./planes.js").Volume} Volume */

/**
 * Compare the objects of two results.
 *
 * common: how many objects there are of which more than half of what either has is in both: at most one partner is possible
 * then. counts: how many objects each has. entries: for each id of the first and of the second that of its colour: objects of
 * which each shares most with the other look the same, all others are grey.
 * @param {Volume} one @param {Volume} other of the same shape
 */
export function compareObjects(one, other) {
  const overlaps = countOverlaps(one.data, other.data);
  /** @type {[Map<number, number>, Map<number, number>]} */
  const sizes = [new Map(), new Map()];
  for (const { id, partner, both } of overlaps) {
    if (id) sizes[0].set(id, (sizes[0].get(id) ?? 0) + both);
    if (partner) sizes[1].set(partner, (sizes[1].get(partner) ?? 0) + both);
  }
  const shared = overlaps.filter(({ id, partner }) => id && partner).sort((first, second) => second.both - first.both);
  const common = shared.filter(({ id, partner, both }) => {
    const union = (sizes[0].get(id) ?? 0) + (sizes[1].get(partner) ?? 0) - both;
    return 2 * both > union;
  }).length;
  const counts = sizes.map((found) => found.size);
  const most = sizes.map((found) => [...found.keys()].reduce((high, id) => Math.max(high, id), 0));
  const [own, theirs] = most.map((id) => new Uint8Array(id + 1));
  const [seen, seenPartners] = [new Set(), new Set()];
  for (const { id, partner } of shared) {
    if (!seen.has(id) && !seenPartners.has(partner)) own[id] = theirs[partner] = entryOf(id);
    seen.add(id);
    seenPartners.add(partner);
  }
  return { common, counts, entries: [own, theirs] };
}

/**
 * Count the voxels that each pair of ids has in both, 0 being what is no object.
 * @param {Volume["data"]} one @param {Volume["data"]} other @returns {{id: number, partner: number, both: number}[]}
 */
function countOverlaps(one, other) {
  /** @type {Map<number, Map<number, {id: number, partner: number, both: number}>>} */
  const found = new Map();
  for (let start = 0, stop = 0; start < one.length; start = stop) {
    const [id, partner] = [one[start], other[start]];
    while (stop < one.length && one[stop] === id && other[stop] === partner) stop += 1;
    const partners = found.get(id) ?? new Map();
    found.set(id, partners);
    const known = partners.get(partner);
    if (known) known.both += stop - start;
    else partners.set(partner, { id, partner, both: stop - start });
  }
  return [...found.values()].flatMap((partners) => [...partners.values()]);
}
