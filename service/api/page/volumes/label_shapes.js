/** Functions that split masks among seeds, fill outlines, and interpolate between outlines. They do not use the DOM. */

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {[number, number]} Point coordinates down and to the right in voxels; the center of the first voxel is at (0.5, 0.5) */
/** @typedef {{values: Uint8Array, top: number, left: number, height: number, width: number}} Mask mask of a rectangle in a plane; values: 1 inside the shape, 0 outside */

/**
 * Add the squared distances along one line to the squared distances already computed for the other axes. The result is
 * the lower envelope of parabolas (Felzenszwalb and Huttenlocher, Distance transforms of sampled functions, 2012).
 * @param {Float64Array} values overwritten with the result @param {number} count number of values to use
 * @param {number} spacing voxel size along the line @param {Int32Array} vertices buffer of `count` values, for the positions of the vertices of the parabolas
 * @param {Float64Array} bounds buffer of `count` + 1 values @param {Float64Array} result buffer of `count` values
 */
function addLineDistances(values, count, spacing, vertices, bounds, result) {
  const squaredSpacing = spacing * spacing;
  let last = 0;
  vertices[0] = 0;
  bounds[0] = -Infinity;
  bounds[1] = Infinity;
  for (let index = 1; index < count; index += 1) {
    let intersection = 0;
    for (;;) {
      const vertex = vertices[last];
      intersection =
        (values[index] - values[vertex] + squaredSpacing * (index * index - vertex * vertex)) /
        (2 * squaredSpacing * (index - vertex));
      if (intersection > bounds[last]) break;
      last -= 1;
    }
    last += 1;
    vertices[last] = index;
    bounds[last] = intersection;
    bounds[last + 1] = Infinity;
  }
  last = 0;
  for (let index = 0; index < count; index += 1) {
    while (bounds[last + 1] < index) last += 1;
    const distance = index - vertices[last];
    result[index] = squaredSpacing * distance * distance + values[vertices[last]];
  }
  values.set(result.subarray(0, count));
}

/**
 * Compute the squared Euclidean distance of each voxel to the nearest voxel outside the mask.
 * @param {Uint8Array} mask @param {number[]} shape @param {number[]} voxelSize
 * @returns {Float32Array}
 */
export function computeSquaredDistances(mask, shape, voxelSize) {
  // The bound is larger than any squared distance in the mask, but small enough for subtractions to be exact.
  const upperBound = shape.reduce((sum, length, axis) => sum + (length * voxelSize[axis]) ** 2, 1);
  const distances = Float32Array.from(mask, (isInside) => (isInside ? upperBound : 0));
  const maxLength = Math.max(...shape);
  const values = new Float64Array(maxLength);
  const result = new Float64Array(maxLength);
  const vertices = new Int32Array(maxLength);
  const bounds = new Float64Array(maxLength + 1);
  let stride = 1;
  for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
    const count = shape[axis];
    const block = stride * count;
    for (let line = 0; line < distances.length / count; line += 1) {
      const start = Math.floor(line / stride) * block + (line % stride);
      let hasInsideVoxel = false;
      for (let index = 0; index < count; index += 1) {
        values[index] = distances[start + index * stride];
        hasInsideVoxel ||= values[index] > 0;
      }
      if (!hasInsideVoxel) continue;
      addLineDistances(values, count, voxelSize[axis], vertices, bounds, result);
      for (let index = 0; index < count; index += 1) distances[start + index * stride] = values[index];
    }
    stride = block;
  }
  return distances;
}

/** Maximum travel time of a front between neighboring voxels. It determines the number of buckets. */
const MAX_STEP_TIME = 4095;

/**
 * Split a mask among seeds. A front starts at each seed, with a speed proportional to the squared distance to the
 * surface of the mask, so that the fronts meet in necks (Dijkstra's algorithm with Dial's buckets).
 * @param {Uint8Array} mask with a margin of zeros on all sides @param {Triple} shape @param {Triple} voxelSize
 * @param {number[]} seeds indices of voxels inside the mask
 * @returns {Uint16Array} for each voxel, the number of its seed, starting at 1; 0 outside the mask and in parts without a seed
 */
export function divideMask(mask, shape, voxelSize, seeds) {
  const distances = computeSquaredDistances(mask, shape, voxelSize);
  const steps = [shape[1] * shape[2], shape[2], 1].flatMap((stride, axis) => [
    [stride, voxelSize[axis]],
    [-stride, voxelSize[axis]],
  ]);
  const minSpacing = Math.min(...voxelSize);
  const timeScale = (8 / minSpacing) * seeds.reduce((max, seed) => Math.max(max, distances[seed]), minSpacing ** 2);
  const parts = new Uint16Array(mask.length);
  const arrivalTimes = new Float64Array(mask.length).fill(Infinity);
  /** @type {number[][]} */
  const buckets = Array.from({ length: MAX_STEP_TIME + 1 }, () => []);
  let pendingCount = 0;
  /** @param {number} index @param {number} time @param {number} part */
  const enqueue = (index, time, part) => {
    arrivalTimes[index] = time;
    parts[index] = part;
    buckets[time % buckets.length].push(index);
    pendingCount += 1;
  };
  /** @param {number} index */
  const spreadFront = (index) => {
    for (const [offset, length] of steps) {
      const next = index + offset;
      if (!mask[next]) continue;
      const stepTime = Math.max(1, Math.min(MAX_STEP_TIME, Math.round((timeScale * length) / distances[next])));
      const time = arrivalTimes[index] + stepTime;
      if (time < arrivalTimes[next]) enqueue(next, time, parts[index]);
    }
  };
  for (const [seedIndex, seed] of seeds.entries()) enqueue(seed, 0, seedIndex + 1);
  for (let time = 0; pendingCount > 0; time += 1) {
    const bucket = buckets[time % buckets.length];
    for (const index of bucket) if (arrivalTimes[index] === time) spreadFront(index);
    pendingCount -= bucket.length;
    bucket.length = 0;
  }
  return parts;
}

/** Create the mask of a set of voxels. @param {number[]} points coordinates down and to the right, alternating @returns {Mask} */
export function createMask(points) {
  let [top, left, bottom, right] = [Infinity, Infinity, 0, 0];
  for (let index = 0; index < points.length; index += 2) {
    top = Math.min(top, points[index]);
    bottom = Math.max(bottom, points[index] + 1);
    left = Math.min(left, points[index + 1]);
    right = Math.max(right, points[index + 1] + 1);
  }
  const [height, width] = [bottom - top, right - left];
  const values = new Uint8Array(height * width);
  for (let index = 0; index < points.length; index += 2)
    values[(points[index] - top) * width + points[index + 1] - left] = 1;
  return { values, top, left, height, width };
}

/**
 * Create the mask of the voxels whose centers are inside a closed outline.
 * @param {Point[]} points @param {Point} size of the plane @returns {Mask | null} null if there are no such voxels
 */
export function fillPolygon(points, size) {
  const [ys, xs] = [0, 1].map((axis) => points.map((point) => point[axis]));
  const top = Math.max(0, Math.floor(Math.min(...ys)));
  const left = Math.max(0, Math.floor(Math.min(...xs)));
  const height = Math.min(size[0], Math.ceil(Math.max(...ys))) - top;
  const width = Math.min(size[1], Math.ceil(Math.max(...xs))) - left;
  if (!(height > 0 && width > 0)) return null;
  const values = new Uint8Array(height * width);
  for (let v = 0; v < height; v += 1) {
    for (const [start, end] of findSpans(points, top + v + 0.5)) {
      const first = Math.max(0, Math.ceil(start - 0.5 - left));
      const last = Math.min(width - 1, Math.ceil(end - 0.5 - left) - 1);
      if (first <= last) values.fill(1, v * width + first, v * width + last + 1);
    }
  }
  return values.includes(1) ? { values, top, left, height, width } : null;
}

/** Return the parts of a horizontal line that are inside an outline, by the nonzero winding rule. @param {Point[]} points @param {number} level vertical position of the line */
function findSpans(points, level) {
  /** @type {[number, number][]} */
  const crossings = [];
  points.forEach((start, index) => {
    const end = points[(index + 1) % points.length];
    if (start[0] <= level === end[0] <= level) return;
    crossings.push([
      start[1] + ((level - start[0]) / (end[0] - start[0])) * (end[1] - start[1]),
      end[0] > start[0] ? 1 : -1,
    ]);
  });
  crossings.sort((first, second) => first[0] - second[0]);
  /** @type {[number, number][]} */
  const intervals = [];
  let winding = 0;
  crossings.forEach(([position, direction], index) => {
    winding += direction;
    if (winding !== 0 && index + 1 < crossings.length) intervals.push([position, crossings[index + 1][0]]);
  });
  return intervals;
}

/** For each voxel of a frame around a mask, compute the signed distance to the border of the mask. @param {Mask} mask @param {number} height @param {number} width size of the frame @param {Point} shift position of the mask in the frame */
function computeSignedDistances(mask, height, width, shift) {
  const frame = new Uint8Array(height * width);
  for (let v = 0; v < mask.height; v += 1)
    frame.set(mask.values.subarray(v * mask.width, (v + 1) * mask.width), (v + shift[0]) * width + shift[1]);
  const insideSquares = computeSquaredDistances(frame, [height, width], [1, 1]);
  const outsideSquares = computeSquaredDistances(
    frame.map((isInside) => 1 - isInside),
    [height, width],
    [1, 1],
  );
  return insideSquares.map((square, index) => Math.sqrt(square) - Math.sqrt(outsideSquares[index]));
}

/**
 * Interpolate between two masks. The signed distances of the masks are blended while the center moves from the first
 * mask to the second (Raya and Udupa, Shape-based interpolation of multidimensional objects, 1990).
 * @param {Mask} first @param {Mask} second @param {number} count number of masks to create @returns {Mask[]}
 */
function interpolateMasks(first, second, count) {
  if (count <= 0) return [];
  const margin = 1;
  const height = Math.max(first.height, second.height) + 2 * margin;
  const width = Math.max(first.width, second.width) + 2 * margin;
  const [start, end] = [first, second].map((mask) => {
    /** @type {Point} */
    const shift = [(height - mask.height) >> 1, (width - mask.width) >> 1];
    return {
      distances: computeSignedDistances(mask, height, width, shift),
      top: mask.top - shift[0],
      left: mask.left - shift[1],
    };
  });
  return Array.from({ length: count }, (_, step) => {
    const fraction = (step + 1) / (count + 1);
    const values = new Uint8Array(height * width);
    for (let index = 0; index < values.length; index += 1)
      values[index] = start.distances[index] * (1 - fraction) + end.distances[index] * fraction > 0 ? 1 : 0;
    const [top, left] = [
      start.top + (end.top - start.top) * fraction,
      start.left + (end.left - start.left) * fraction,
    ].map(Math.round);
    return { values, top, left, height, width };
  });
}

/**
 * Create the masks of all planes from the first to the last outline.
 * @param {{at: number}[]} outlines sorted by plane; at: index of the plane @param {Mask[]} outlineMasks masks of the filled outlines
 * @returns {Map<number, Mask>} by plane
 */
export function fillBetweenOutlines(outlines, outlineMasks) {
  /** @type {Map<number, Mask>} */
  const masks = new Map();
  for (const [index, { at: plane }] of outlines.entries()) {
    masks.set(plane, outlineMasks[index]);
    if (index === 0) continue;
    const previousPlane = outlines[index - 1].at;
    const interpolatedMasks = interpolateMasks(outlineMasks[index - 1], outlineMasks[index], plane - previousPlane - 1);
    for (const [step, mask] of interpolatedMasks.entries()) masks.set(previousPlane + 1 + step, mask);
  }
  return masks;
}
