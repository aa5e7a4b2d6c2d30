/** Shapes of objects as masks: parts that grow from seeds, filled outlines, shapes between two others. */

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {[number, number]} Point voxels down and to the right; the middle of the first voxel is at 0.5, 0.5 */
/** @typedef {{inside: Uint8Array, top: number, left: number, height: number, width: number}} Mask of a plane */

/**
 * Squared distances to the nearest zero along one line, added to squared distances across it: the lower envelope of
 * parabolas (Felzenszwalb and Huttenlocher, Distance transforms of sampled functions, 2012).
 * @param {Float64Array} values is overwritten @param {number} count how many of them @param {number} edge of a voxel
 * @param {Int32Array} roots @param {Float64Array} bounds room for as many, and one more
 * @param {Float64Array} found room for the result
 */
function envelope(values, count, edge, roots, bounds, found) {
  const square = edge * edge;
  let last = 0;
  roots[0] = 0;
  bounds[0] = -Infinity;
  bounds[1] = Infinity;
  for (let place = 1; place < count; place += 1) {
    let meet = 0;
    for (;;) {
      const root = roots[last];
      meet = (values[place] - values[root] + square * (place * place - root * root)) / (2 * square * (place - root));
      if (meet > bounds[last]) break;
      last -= 1;
    }
    last += 1;
    roots[last] = place;
    bounds[last] = meet;
    bounds[last + 1] = Infinity;
  }
  last = 0;
  for (let place = 0; place < count; place += 1) {
    while (bounds[last + 1] < place) last += 1;
    const away = place - roots[last];
    found[place] = square * away * away + values[roots[last]];
  }
  values.set(found.subarray(0, count));
}

/**
 * The squared Euclidean distance of each voxel from the nearest one outside.
 * @param {Uint8Array} inside @param {number[]} shape @param {number[]} voxel edges of a voxel
 * @returns {Float32Array}
 */
export function squaredDistances(inside, shape, voxel) {
  // Farther than any distance, and small enough to be subtracted exactly.
  const far = shape.reduce((sum, length, axis) => sum + (length * voxel[axis]) ** 2, 1);
  const distances = Float32Array.from(inside, (one) => (one ? far : 0));
  const longest = Math.max(...shape);
  const values = new Float64Array(longest);
  const found = new Float64Array(longest);
  const roots = new Int32Array(longest);
  const bounds = new Float64Array(longest + 1);
  let stride = 1;
  for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
    const count = shape[axis];
    const block = stride * count;
    for (let line = 0; line < distances.length / count; line += 1) {
      const start = Math.floor(line / stride) * block + (line % stride);
      let any = false;
      for (let place = 0; place < count; place += 1) {
        values[place] = distances[start + place * stride];
        any ||= values[place] > 0;
      }
      if (!any) continue;
      envelope(values, count, voxel[axis], roots, bounds, found);
      for (let place = 0; place < count; place += 1) distances[start + place * stride] = values[place];
    }
    stride = block;
  }
  return distances;
}

const SLOWEST = 4095;

/**
 * Divide a shape among seeds: fronts start at all of them, as fast as the square of the distance from the surface, so
 * that they meet in necks (Dijkstra's algorithm with Dial's buckets).
 * @param {Uint8Array} inside with a margin of zeros all around @param {Triple} shape @param {Triple} voxel edges of a voxel
 * @param {number[]} seeds places inside
 * @returns {Uint16Array} for each voxel the number of its seed, from 1; 0 outside, and where no front arrives
 */
export function divide(inside, shape, voxel, seeds) {
  const distances = squaredDistances(inside, shape, voxel);
  const steps = [shape[1] * shape[2], shape[2], 1].flatMap((stride, axis) => [
    [stride, voxel[axis]],
    [-stride, voxel[axis]],
  ]);
  const finest = Math.min(...voxel);
  const unit = (8 / finest) * seeds.reduce((most, seed) => Math.max(most, distances[seed]), finest ** 2);
  const parts = new Uint16Array(inside.length);
  const arrival = new Float64Array(inside.length).fill(Infinity);
  /** @type {number[][]} */
  const buckets = Array.from({ length: SLOWEST + 1 }, () => []);
  let waiting = 0;
  /** @param {number} place @param {number} when @param {number} part */
  const arrive = (place, when, part) => {
    arrival[place] = when;
    parts[place] = part;
    buckets[when % buckets.length].push(place);
    waiting += 1;
  };
  /** @param {number} place */
  const spread = (place) => {
    for (const [offset, length] of steps) {
      const next = place + offset;
      if (!inside[next]) continue;
      const when = arrival[place] + Math.max(1, Math.min(SLOWEST, Math.round((unit * length) / distances[next])));
      if (when < arrival[next]) arrive(next, when, parts[place]);
    }
  };
  for (const [number, seed] of seeds.entries()) arrive(seed, 0, number + 1);
  for (let now = 0; waiting > 0; now += 1) {
    const bucket = buckets[now % buckets.length];
    for (const place of bucket) if (arrival[place] === now) spread(place);
    waiting -= bucket.length;
    bucket.length = 0;
  }
  return parts;
}

/**
 * The voxels whose middle lies within a closed outline.
 * @param {Point[]} points @param {Point} size of the plane @returns {Mask | null} null: there are none
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

/** Where a horizontal line is inside of an outline, loops of which count as inside too. @param {Point[]} points @param {number} level */
function spans(points, level) {
  /** @type {[number, number][]} */
  const crossings = [];
  points.forEach((from, number) => {
    const to = points[(number + 1) % points.length];
    if (from[0] <= level === to[0] <= level) return;
    crossings.push([from[1] + ((level - from[0]) / (to[0] - from[0])) * (to[1] - from[1]), to[0] > from[0] ? 1 : -1]);
  });
  crossings.sort((one, other) => one[0] - other[0]);
  /** @type {[number, number][]} */
  const found = [];
  let winding = 0;
  crossings.forEach(([place, turn], number) => {
    winding += turn;
    if (winding !== 0 && number + 1 < crossings.length) found.push([place, crossings[number + 1][0]]);
  });
  return found;
}

/** Signed distance from the border of a mask that is put into a larger frame. @param {Mask} mask @param {number} height @param {number} width @param {Point} shift */
function signedDistances(mask, height, width, shift) {
  const inside = new Uint8Array(height * width);
  for (let v = 0; v < mask.height; v += 1)
    inside.set(mask.inside.subarray(v * mask.width, (v + 1) * mask.width), (v + shift[0]) * width + shift[1]);
  const within = squaredDistances(inside, [height, width], [1, 1]);
  const beyond = squaredDistances(
    inside.map((one) => 1 - one),
    [height, width],
    [1, 1],
  );
  return within.map((square, place) => Math.sqrt(square) - Math.sqrt(beyond[place]));
}

/**
 * Shapes between two: their signed distances are interpolated about a middle that moves from one to the other
 * (Raya and Udupa, Shape-based interpolation of multidimensional objects, 1990).
 * @param {Mask} one @param {Mask} other @param {number} count of shapes @returns {Mask[]}
 */
function blend(one, other, count) {
  if (count <= 0) return [];
  const margin = 1;
  const height = Math.max(one.height, other.height) + 2 * margin;
  const width = Math.max(one.width, other.width) + 2 * margin;
  const [near, far] = [one, other].map((mask) => {
    /** @type {Point} */
    const shift = [(height - mask.height) >> 1, (width - mask.width) >> 1];
    return {
      distances: signedDistances(mask, height, width, shift),
      top: mask.top - shift[0],
      left: mask.left - shift[1],
    };
  });
  return Array.from({ length: count }, (_, step) => {
    const share = (step + 1) / (count + 1);
    const inside = new Uint8Array(height * width);
    for (let place = 0; place < inside.length; place += 1)
      inside[place] = near.distances[place] * (1 - share) + far.distances[place] * share > 0 ? 1 : 0;
    const [top, left] = [near.top + (far.top - near.top) * share, near.left + (far.left - near.left) * share].map(
      Math.round,
    );
    return { inside, top, left, height, width };
  });
}

/**
 * Masks of all planes from the first to the last outline.
 * @param {{at: number}[]} outlines in the order of their planes @param {Mask[]} fills of the outlines
 * @returns {Map<number, Mask>} by plane
 */
export function fillBetween(outlines, fills) {
  /** @type {Map<number, Mask>} */
  const masks = new Map();
  for (const [number, { at }] of outlines.entries()) {
    masks.set(at, fills[number]);
    if (number === 0) continue;
    const before = outlines[number - 1].at;
    const between = blend(fills[number - 1], fills[number], at - before - 1);
    for (const [step, mask] of between.entries()) masks.set(before + 1 + step, mask);
  }
  return masks;
}
