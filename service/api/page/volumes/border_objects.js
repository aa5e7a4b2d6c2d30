/** Objects that touch a face of a stack. This module does not use the DOM. */

/** @typedef {import("./planes.js").Volume} Volume */

/** Find the objects that may be cut off. Axes along which the stack has a single voxel have no faces. @param {Volume} labels @returns {Set<number>} ids */
export function findBorderObjects({ data, shape }) {
  const [depth, height, width] = shape;
  const ids = new Set();
  for (let z = 0; z < depth; z += 1) {
    for (let y = 0; y < height; y += 1) {
      const isInFace = isAtFace(z, depth) || isAtFace(y, height);
      // Other rows touch faces only with their ends.
      if (!isInFace && width === 1) continue;
      const start = (z * height + y) * width;
      for (let x = 0; x < width; x += isInFace ? 1 : width - 1) ids.add(data[start + x]);
    }
  }
  ids.delete(0);
  return ids;
}

/** @param {number} index @param {number} length @returns {boolean} */
function isAtFace(index, length) {
  return length > 1 && (index === 0 || index === length - 1);
}
