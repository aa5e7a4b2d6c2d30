/** Shapes as masks: splitting by seeds, filled outlines, and interpolation between outlines. */

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {[number, number]} Point voxel coordinates down and to the right; the center of the first voxel is at 0.5, 0.5 */
/** @typedef {{inside: Uint8Array, top: number, left: number, height: number, width: number}} Mask mask of a part of a plane */

/**
 * Add the squared distances along one line to squared distances across it: the lower envelope of parabolas (Felzenszwalb
 * and Huttenlocher, Distance transforms of sampled functions, 2012).
 * @param {Float64Array} values overwritten with the result @param {number} count number of values to use
 * @param {number} edge length of a voxel along the line @param {Int32Array} roots buffer of `count` values
 * @param {Float64Array} bounds buffer of `count` + 1 values @param {Float64Array} result buffer of `count` values
 */
function addLineDistances(values, count, edge, roots, bounds, result) {
  const square = edge * edge;
  let last = 0;
  roots[0] = 0;
  bounds[0] = -Infinity;
  bounds[1] = Infinity;
  for (let index = 1; index < count; index += 1) {
    let intersection = 0;
    for (;;) {
      const root = roots[last];
      intersection =
        (values[index] - values[root] + square * (index * index - root * root)) / (2 * square * (index - root));
      if (intersection > bounds[last]) break;
      last -= 1;
    }
    last += 1;
    roots[last] = index;
    bounds[last] = intersection;
    bounds[last + 1] = Infinity;
  }
  last = 0;
  for (let index = 0; index < count; index += 1) {
    while (bounds[last + 1] < index) last += 1;
    const distance = index - roots[last];
    result[index] = square * distance * distance + values[roots[last]];
  }
  values.set(result.subarray(0, count));
}

/**
 * Compute the squared Euclidean distance of each voxel from the nearest voxel outside.
 * @param {Uint8Array} inside @param {number[]} shape @param {number[]} voxel voxel size
 * @returns {Float32Array}
 */
export function squaredDistances(inside, shape, voxel) {
  // Larger than any distance in the shape, but small enough that subtractions stay exact.
  const upperBound = shape.reduce((sum, length, axis) => sum + (length * voxel[axis]) ** 2, 1);
  const distances = Float32Array.from(inside, (isInside) => (isInside ? upperBound : 0));
  const longest = Math.max(...shape);
  const values = new Float64Array(longest);
  const result = new Float64Array(longest);
  const roots = new Int32Array(longest);
  const bounds = new Float64Array(longest + 1);
  let stride = 1;
  for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
    const count = shape[axis];
    const block = stride * count;
    for (let line = 0; line < distances.length / count; line += 1) {
      const start = Math.floor(line / stride) * block + (line % stride);
      let hasInside = false;
      for (let index = 0; index < count; index += 1) {
        values[index] = distances[start + index * stride];
        hasInside ||= values[index] > 0;
      }
      if (!hasInside) continue;
      addLineDistances(values, count, voxel[axis], roots, bounds, result);
      for (let index = 0; index < count; index += 1) distances[start + index * stride] = values[index];
    }
    stride = block;
  }
  return distances;
}

/** Largest travel time of a front between neighboring voxels, which limits the number of buckets. */
const MAX_STEP_TIME = 4095;

/**
 * Divide a shape among seeds. A front starts at each seed, with a speed proportional to the squared distance from the
 * surface, so that fronts meet in necks (Dijkstra's algorithm with Dial's buckets).
 * @param {Uint8Array} inside with a margin of zeros on all sides @param {Triple} shape @param {Triple} voxel voxel size
 * @param {number[]} seeds indices of voxels inside
 * @returns {Uint16Array} the number of the seed of each voxel, from 1; 0 outside and in unreachable parts
 */
export function divide(inside, shape, voxel, seeds) {
  const distances = squaredDistances(inside, shape, voxel);
  const steps = [shape[1] * shape[2], shape[2], 1].flatMap((stride, axis) => [
    [stride, voxel[axis]],
    [-stride, voxel[axis]],
  ]);
  const finest = Math.min(...voxel);
  const unit = (8 / finest) * seeds.reduce((max, seed) => Math.max(max, distances[seed]), finest ** 2);
  const parts = new Uint16Array(inside.length);
  const arrival = new Float64Array(inside.length).fill(Infinity);
  /** @type {number[][]} */
  const buckets = Array.from({ length: MAX_STEP_TIME + 1 }, () => []);
  let pending = 0;
  /** @param {number} index @param {number} time @param {number} part */
  const enqueue = (index, time, part) => {
    arrival[index] = time;
    parts[index] = part;
    buckets[time % buckets.length].push(index);
    pending += 1;
  };
  /** @param {number} index */
  const spread = (index) => {
    for (const [offset, length] of steps) {
      const next = index + offset;
      if (!inside[next]) continue;
      const step = Math.max(1, Math.min(MAX_STEP_TIME, Math.round((unit * length) / distances[next])));
      const time = arrival[index] + step;
      if (time < arrival[next]) enqueue(next, time, parts[index]);
    }
  };
  for (const [number, seed] of seeds.entries()) enqueue(seed, 0, number + 1);
  for (let time = 0; pending > 0; time += 1) {
    const bucket = buckets[time % buckets.length];
    for (const index of bucket) if (arrival[index] === time) spread(index);
    pending -= bucket.length;
    bucket.length = 0;
  }
  return parts;
}

/**
 * Fill a closed outline: select the voxels whose center lies inside.
 * @param {Point[]} points @param {Point} size of the plane @returns {Mask | null} null if there are no such voxels
 */
export function fillPolygon(points, size) {
  const [downs, rights] = [0, 1].map((axis) => points.map((point) => point[axis]));
  const top = Math.max(0, Math.floor(Math.min(...downs)));
  const left = Math.max(0, Math.floor(Math.min(...rights)));
  const height = Math.min(size[0], Math.ceil(Math.max(...downs))) - top;
  const width = Math.min(size[1], Math.ceil(Math.max(...rights))) - left;
  if (!(height > 0 && width > 0)) return null;
  const inside = new Uint8Array(height * width);
  for (let v = 0; v < height; v += 1) {
    for (const [from, to] of spans(points, top + v + 0.5)) {
      const first = Math.max(0, Math.ceil(from - 0.5 - left));
      const last = Math.min(width - 1, Math.ceil(to - 0.5 - left) - 1);
      if (first <= last) inside.fill(1, v * width + first, v * width + last + 1);
    }
  }
  return inside.includes(1) ? { inside, top, left, height, width } : null;
}

/** Return the parts of a horizontal line inside an outline (nonzero winding rule). @param {Point[]} points @param {number} level */
function spans(points, level) {
  /** @type {[number, number][]} */
  const crossings = [];
  points.forEach((from, number) => {
    const to = points[(number + 1) % points.length];
    if (from[0] <= level === to[0] <= level) return;
    crossings.push([from[1] + ((level - from[0]) / (to[0] - from[0])) * (to[1] - from[1]), to[0] > from[0] ? 1 : -1]);
  });
  crossings.sort((first, second) => first[0] - second[0]);
  /** @type {[number, number][]} */
  const intervals = [];
  let winding = 0;
  crossings.forEach(([position, direction], number) => {
    winding += direction;
    if (winding !== 0 && number + 1 < crossings.length) intervals.push([position, crossings[number + 1][0]]);
  });
  return intervals;
}

/** Compute the signed distance from the border of a mask within a larger frame. @param {Mask} mask @param {number} height @param {number} width @param {Point} shift */
function signedDistances(mask, height, width, shift) {
  const inside = new Uint8Array(height * width);
  for (let v = 0; v < mask.height; v += 1)
    inside.set(mask.inside.subarray(v * mask.width, (v + 1) * mask.width), (v + shift[0]) * width + shift[1]);
  const insideSquares = squaredDistances(inside, [height, width], [1, 1]);
  const outsideSquares = squaredDistances(
    inside.map((isInside) => 1 - isInside),
    [height, width],
    [1, 1],
  );
  return insideSquares.map((square, index) => Math.sqrt(square) - Math.sqrt(outsideSquares[index]));
}

/**
 * Interpolate shapes between two masks: blend their signed distances while the center moves from one to the other (Raya
 * and Udupa, Shape-based interpolation of multidimensional objects, 1990).
 * @param {Mask} first @param {Mask} second @param {number} count number of shapes @returns {Mask[]}
 */
function interpolate(first, second, count) {
  if (count <= 0) return [];
  const margin = 1;
  const height = Math.max(first.height, second.height) + 2 * margin;
  const width = Math.max(first.width, second.width) + 2 * margin;
  const [start, end] = [first, second].map((mask) => {
    /** @type {Point} */
    const shift = [(height - mask.height) >> 1, (width - mask.width) >> 1];
    return {
      distances: signedDistances(mask, height, width, shift),
      top: mask.top - shift[0],
      left: mask.left - shift[1],
    };
  });
  return Array.from({ length: count }, (_, step) => {
    const fraction = (step + 1) / (count + 1);
    const inside = new Uint8Array(height * width);
    for (let index = 0; index < inside.length; index += 1)
      inside[index] = start.distances[index] * (1 - fraction) + end.distances[index] * fraction > 0 ? 1 : 0;
    const [top, left] = [
      start.top + (end.top - start.top) * fraction,
      start.left + (end.left - start.left) * fraction,
    ].map(Math.round);
    return { inside, top, left, height, width };
  });
}

/**
 * Create the masks of all planes from the first to the last outline.
 * @param {{at: number}[]} outlines sorted by plane @param {Mask[]} outlineMasks the filled outlines
 * @returns {Map<number, Mask>} by plane
 */
export function fillBetween(outlines, outlineMasks) {
  /** @type {Map<number, Mask>} */
  const masks = new Map();
  for (const [number, { at }] of outlines.entries()) {
    masks.set(at, outlineMasks[number]);
    if (number === 0) continue;
    const previous = outlines[number - 1].at;
    const between = interpolate(outlineMasks[number - 1], outlineMasks[number], at - previous - 1);
    for (const [step, mask] of between.entries()) masks.set(previous + 1 + step, mask);
  }
  return masks;
}
