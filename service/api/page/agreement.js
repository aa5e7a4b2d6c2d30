/** How far two results of one stack have the same objects. Nothing here touches the document. */

/** @typedef {import("./planes.js").Volume} Volume */

/** @param {Volume} labels @returns {Map<number, number>} voxels of each object */
function sizes(labels) {
  const counts = new Map();
  for (const id of labels.data) if (id !== 0) counts.set(id, (counts.get(id) ?? 0) + 1);
  return counts;
}

/**
 * Count the objects of which more than half of what either has is in both: at most one partner is possible then.
 * @param {Volume} one @param {Volume} other of the same shape
 */
export function countCommon(one, other) {
  /** @type {Map<number, Map<number, number>>} */
  const overlaps = new Map();
  for (let place = 0; place < one.data.length; place += 1) {
    const [id, partner] = [one.data[place], other.data[place]];
    if (id === 0 || partner === 0) continue;
    let partners = overlaps.get(id);
    if (partners === undefined) {
      partners = new Map();
      overlaps.set(id, partners);
    }
    partners.set(partner, (partners.get(partner) ?? 0) + 1);
  }
  const [own, theirs] = [sizes(one), sizes(other)];
  let common = 0;
  for (const [id, partners] of overlaps) {
    for (const [partner, both] of partners) {
      const union = (own.get(id) ?? 0) + (theirs.get(partner) ?? 0) - both;
      if (2 * both > union) common += 1;
    }
  }
  return common;
}
