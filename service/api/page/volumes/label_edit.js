/** Corrections of labels: merging, splitting, deleting, drawing and painting objects, with undo. Does not use the DOM. */

import { divide, fillBetween, fillPolygon } from "./label_shapes.js";
import { ACROSS, haveSimilarColors } from "./slices.js";

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./slices.js").Axis} Axis */
/** @typedef {import("./label_shapes.js").Point} Point */
/** @typedef {"merge" | "split" | "delete" | "add" | "paint" | "erase"} Kind */
/** @typedef {{kind: "split", ids: number[], seeds: Triple[]}} SplitSketch the parts of an object, and the clicked voxel of each */
/** @typedef {{kind: "add", id: number, axis: Axis, outlines: {at: number, points: Point[]}[]}} OutlineSketch at: plane along the axis */

/**
 * @typedef {object} Edit a correction
 * @property {Kind} kind
 * @property {Uint32Array} runs four numbers for each run of voxels along x, in the order of writing: first voxel, length,
 *   previous id, new id
 * @property {SplitSketch | OutlineSketch | null} sketch clicks or outlines that the next click or outline continues
 */

/** @typedef {{voxels: number, low: Triple, high: Triple}} Extent number of voxels and bounding box of an object; the box may be too large */

/**
 * @typedef {object} Brush
 * @property {number} id of the object that is painted or erased
 * @property {boolean} erase
 * @property {Axis | null} axis axis normal to a disc, null for a ball
 * @property {boolean} overwrite whether to paint over other objects
 */

/** Limits the work of a split: larger objects are split on a coarser grid. */
const MAX_CELLS = 400_000;
/** Number of ids tried to find one whose color differs from that of its neighbors. */
const COLORS_TO_TRY = 16;

/** A correction that is not possible. The message says what to do instead. */
export class CannotEdit extends Error {}

export class LabelEditor {
  /** @param {Volume} labels at full resolution, changed in place @param {Triple} voxel size in micrometers */
  constructor(labels, voxel) {
    this.labels = labels;
    this.voxel = voxel;
    const [, height, width] = labels.shape;
    this.strides = /** @type {Triple} */ ([height * width, width, 1]);
    /** @type {Map<number, Extent>} */
    this.objects = new Map();
    /** The largest id used so far. Ids are never reused. */
    this.maxId = 0;
    /** @type {Edit[]} */
    this.done = [];
    /** Newest last. @type {Edit[]} */
    this.undone = [];
    /** Runs of the uncommitted correction. @type {number[]} */
    this.pending = [];
    /** The current run, which the next voxel may extend. */
    this.openRun = { start: 0, length: 0, before: 0, after: 0 };
    this.#findObjects();
  }

  /** Find all objects in one pass over the rows. */
  #findObjects() {
    const { data, shape } = this.labels;
    const width = shape[2];
    for (let row = 0; row < data.length; row += width) {
      const end = row + width;
      for (let start = row; start < end; ) {
        const id = data[start];
        let stop = start + 1;
        while (stop < end && data[stop] === id) stop += 1;
        if (id) this.#updateExtent(id, start, stop - start);
        start = stop;
      }
    }
  }

  /** Add a run to the extent of an object, or remove it. @param {number} id @param {number} start @param {number} length negative for a removed run */
  #updateExtent(id, start, length) {
    const { strides, objects } = this;
    const extent = objects.get(id);
    const voxels = (extent?.voxels ?? 0) + length;
    if (length < 0 && extent) {
      extent.voxels = voxels;
      if (voxels === 0) objects.delete(id);
      return;
    }
    const z = Math.floor(start / strides[0]);
    const y = Math.floor((start % strides[0]) / strides[1]);
    const x = start % strides[1];
    if (id > this.maxId) this.maxId = id;
    if (extent === undefined) {
      objects.set(id, { voxels, low: [z, y, x], high: [z + 1, y + 1, x + length] });
      return;
    }
    extent.voxels = voxels;
    const { low, high } = extent;
    if (z < low[0]) low[0] = z;
    if (y < low[1]) low[1] = y;
    if (x < low[2]) low[2] = x;
    if (z >= high[0]) high[0] = z + 1;
    if (y >= high[1]) high[1] = y + 1;
    if (x + length > high[2]) high[2] = x + length;
  }

  /** @param {Triple} position @returns {number} the id at a voxel, 0 outside the stack */
  idAt(position) {
    const { shape, data } = this.labels;
    if (position.some((index, axis) => index < 0 || index >= shape[axis])) return 0;
    return data[this.#offsetOf(position)];
  }

  /** @param {Triple} position */
  #offsetOf(position) {
    return position[0] * this.strides[0] + position[1] * this.strides[1] + position[2];
  }

  /** @param {number[]} [neighbors] ids of neighboring objects @returns {number} an unused id whose color differs from that of the neighbors */
  #newId(neighbors = []) {
    const first = this.maxId + 1;
    const candidates = Array.from({ length: COLORS_TO_TRY }, (_, offset) => first + offset);
    this.maxId = candidates.find((id) => !neighbors.some((neighbor) => haveSimilarColors(id, neighbor))) ?? first;
    this.#widenType(this.maxId);
    return this.maxId;
  }

  /** Write one voxel of the current correction. @param {number} index @param {number} after */
  #set(index, after) {
    const { data } = this.labels;
    const before = data[index];
    if (before === after) return;
    data[index] = after;
    const { openRun } = this;
    const extendsRun =
      openRun.length > 0 &&
      index === openRun.start + openRun.length &&
      before === openRun.before &&
      after === openRun.after;
    if (extendsRun && index % this.strides[1] !== 0) {
      openRun.length += 1;
      return;
    }
    this.#closeRun();
    this.openRun = { start: index, length: 1, before, after };
  }

  /** End the current run. */
  #closeRun() {
    const { start, length, before, after } = this.openRun;
    if (length === 0) return;
    this.pending.push(start, length, before, after);
    if (before) this.#updateExtent(before, start, -length);
    if (after) this.#updateExtent(after, start, length);
    this.openRun.length = 0;
  }

  /** End the current correction. @param {Kind} kind @param {Edit["sketch"]} [sketch] @returns {Edit | null} null if no voxel changed */
  commit(kind, sketch = null) {
    this.#closeRun();
    if (this.pending.length === 0) return null;
    const edit = { kind, runs: Uint32Array.from(this.pending), sketch };
    this.pending = [];
    this.done.push(edit);
    this.undone = [];
    return edit;
  }

  /** @returns {Edit | null} the undone correction, null if there is none */
  undo() {
    const edit = this.done.pop();
    if (edit === undefined) return null;
    for (let run = edit.runs.length - 4; run >= 0; run -= 4) this.#rewrite(edit.runs, run, 3, 2);
    this.undone.push(edit);
    return edit;
  }

  /** @returns {Edit | null} the redone correction, null if there is none */
  redo() {
    const edit = this.undone.pop();
    if (edit === undefined) return null;
    this.#apply(edit);
    return edit;
  }

  /** Apply stored corrections. @param {Edit[]} edits @returns {boolean} false if they do not match these labels, which then stay unchanged */
  restore(edits) {
    const fits = edits.every((edit) => this.#apply(edit));
    if (!fits) while (this.undo() !== null);
    this.undone = [];
    return fits;
  }

  /** @returns {Volume["data"]} a copy of the labels before any correction */
  original() {
    const data = this.labels.data.slice();
    for (const { runs } of [...this.done].reverse())
      for (let run = runs.length - 4; run >= 0; run -= 4)
        data.fill(runs[run + 2], runs[run], runs[run] + runs[run + 1]);
    return data;
  }

  /** @param {Edit} edit @returns {boolean} false if it does not match the labels, which then stay unchanged */
  #apply(edit) {
    const { labels } = this;
    const { runs } = edit;
    const maxId = runs.reduce((max, value, index) => (index % 4 === 3 && value > max ? value : max), 0);
    this.#widenType(maxId);
    for (let run = 0; run < runs.length; run += 4) {
      if (labels.data[runs[run]] !== runs[run + 2]) {
        for (let back = run - 4; back >= 0; back -= 4) this.#rewrite(runs, back, 3, 2);
        return false;
      }
      this.#rewrite(runs, run, 2, 3);
    }
    this.done.push(edit);
    return true;
  }

  /** Convert the labels to a wider type if theirs cannot hold an id. @param {number} id */
  #widenType(id) {
    const { data } = this.labels;
    if (data.BYTES_PER_ELEMENT < 4 && id >= 2 ** (8 * data.BYTES_PER_ELEMENT))
      this.labels.data = Uint32Array.from(data);
  }

  /** Replace the id of a run. @param {Uint32Array} runs @param {number} run @param {number} from @param {number} to offsets of the old and the new id in the run */
  #rewrite(runs, run, from, to) {
    const [start, length, before, after] = [runs[run], runs[run + 1], runs[run + from], runs[run + to]];
    this.labels.data.fill(after, start, start + length);
    if (before) this.#updateExtent(before, start, -length);
    if (after) this.#updateExtent(after, start, length);
  }

  /** The sketch of the newest correction. */
  get sketch() {
    return this.done.at(-1)?.sketch ?? null;
  }

  /** @returns {Map<Kind, number>} the number of corrections of each kind */
  counts() {
    /** @type {Map<Kind, number>} */
    const counts = new Map();
    for (const { kind } of this.done) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    return counts;
  }

  /** Call a function for each voxel of an object. @param {number} id @param {(index: number, z: number, y: number, x: number) => void} visit */
  #visit(id, visit) {
    const extent = this.objects.get(id);
    if (extent === undefined) throw new CannotEdit("This object no longer exists. Select another one.");
    const { low, high } = extent;
    const { data } = this.labels;
    for (let z = low[0]; z < high[0]; z += 1) {
      for (let y = low[1]; y < high[1]; y += 1) {
        const row = z * this.strides[0] + y * this.strides[1];
        for (let x = low[2]; x < high[2]; x += 1) if (data[row + x] === id) visit(row + x, z, y, x);
      }
    }
  }

  /** Merge another object into this one. @param {number} id @param {number} other */
  merge(id, other) {
    if (id === other) throw new CannotEdit("This is the same object. Click another one.");
    if (!this.objects.has(id)) throw new CannotEdit("This object no longer exists. Select another one.");
    this.#visit(other, (index) => this.#set(index, id));
    return this.commit("merge");
  }

  /** Delete an object. @param {number} id */
  remove(id) {
    this.#visit(id, (index) => this.#set(index, 0));
    return this.commit("delete");
  }

  /**
   * Cut an object along a line drawn in a view, through all planes of the view. The smaller part gets a new id.
   * @param {number} id @param {Axis} axis of the view @param {Point} from @param {Point} to in voxels down and to the right
   */
  cut(id, axis, from, to) {
    const [down, right] = ACROSS[axis];
    const [rise, run] = [to[0] - from[0], to[1] - from[1]];
    /** @type {[number[], number[]]} */
    const sides = [[], []];
    this.#visit(id, (index, ...position) => {
      const side = (position[right] + 0.5 - from[1]) * rise - (position[down] + 0.5 - from[0]) * run;
      sides[side < 0 ? 0 : 1].push(index);
    });
    const smaller = sides[0].length < sides[1].length ? sides[0] : sides[1];
    if (smaller.length === 0)
      throw new CannotEdit("The line does not cross the object. Draw it from one side to the other.");
    const newId = this.#newId([id]);
    for (const index of smaller) this.#set(index, newId);
    return this.commit("split");
  }

  /**
   * Find the object that has the longest part of a line drawn in a view.
   * @param {Axis} axis @param {number} plane @param {Point} from @param {Point} to @returns {number} its id, 0 if there is none
   */
  objectUnderLine(axis, plane, from, to) {
    const [down, right] = ACROSS[axis];
    const steps = Math.ceil(2 * Math.hypot(to[0] - from[0], to[1] - from[1])) + 1;
    /** @type {Map<number, number>} */
    const counts = new Map();
    for (let step = 0; step <= steps; step += 1) {
      /** @type {Triple} */
      const position = [plane, plane, plane];
      position[down] = Math.floor(from[0] + ((to[0] - from[0]) * step) / steps);
      position[right] = Math.floor(from[1] + ((to[1] - from[1]) * step) / steps);
      const id = this.idAt(position);
      if (id) counts.set(id, (counts.get(id) ?? 0) + 1);
    }
    return [...counts].reduce((best, entry) => (entry[1] > best[1] ? entry : best), [0, 0])[0];
  }

  /**
   * Split an object into one part per seed. Parts grow from their seeds, fast in thick regions and slowly through necks. The
   * first part keeps the id.
   * @param {number[]} ids of the existing parts @param {Triple[]} seeds voxels, more than there are ids
   */
  split(ids, seeds) {
    const extents = ids.flatMap((id) => this.objects.get(id) ?? []);
    if (extents.length < ids.length) throw new CannotEdit("This object no longer exists. Select another one.");
    const low = /** @type {Triple} */ ([0, 1, 2].map((axis) => Math.min(...extents.map((extent) => extent.low[axis]))));
    const high = /** @type {Triple} */ (
      [0, 1, 2].map((axis) => Math.max(...extents.map((extent) => extent.high[axis])))
    );
    const lengths = low.map((index, axis) => high[axis] - index);
    // Large objects are split on a grid of coarser cells, so that the split feels immediate.
    const cell = Math.max(1, Math.ceil(Math.cbrt((lengths[0] * lengths[1] * lengths[2]) / MAX_CELLS)));
    // A margin of one empty cell makes bounds checks unnecessary.
    const shape = /** @type {Triple} */ (lengths.map((length) => Math.ceil(length / cell) + 2));
    const inside = new Uint8Array(shape[0] * shape[1] * shape[2]);
    const [z0, y0, x0] = low.map((index) => index - cell);
    /** @param {number} z @param {number} y @param {number} x */
    const local = (z, y, x) =>
      (Math.floor((z - z0) / cell) * shape[1] + Math.floor((y - y0) / cell)) * shape[2] + Math.floor((x - x0) / cell);
    for (const id of ids) this.#visit(id, (_, z, y, x) => (inside[local(z, y, x)] = 1));
    const indices = seeds.map((seed) => local(...seed));
    if (new Set(indices).size < indices.length || !seeds.every((seed) => ids.includes(this.idAt(seed))))
      throw new CannotEdit("Click once into each part of the object.");
    const parts = divide(inside, shape, this.voxel, indices);
    const partIds = [...ids];
    while (partIds.length < seeds.length) partIds.push(this.#newId(partIds));
    // Collect the changes first, because writing changes which voxels are visited.
    /** @type {number[]} */
    const writes = [];
    for (const id of ids)
      this.#visit(id, (index, z, y, x) => {
        const to = partIds[Math.max(0, parts[local(z, y, x)] - 1)];
        if (to !== id) writes.push(index, to);
      });
    for (let write = 0; write < writes.length; write += 2) this.#set(writes[write], writes[write + 1]);
    return this.commit("split", { kind: "split", ids: partIds, seeds });
  }

  /**
   * Add an object by its outline in a plane, or add an outline to the object that is being drawn. Planes between two
   * outlines are filled with interpolated shapes. Other objects keep their voxels.
   * @param {Axis} axis @param {number} at plane @param {Point[]} points of the outline @param {OutlineSketch | null} sketch of the object that is being drawn
   */
  outline(axis, at, points, sketch) {
    const isContinued = sketch !== null && sketch.axis === axis && this.objects.has(sketch.id);
    const others = isContinued ? sketch.outlines.filter((outline) => outline.at !== at) : [];
    const outlines = [...others, { at, points }].sort((first, second) => first.at - second.at);
    const [down, right] = ACROSS[axis];
    const { shape } = this.labels;
    const outlineMasks = outlines.map((outline) => fillPolygon(outline.points, [shape[down], shape[right]]));
    if (outlineMasks.some((mask) => mask === null))
      throw new CannotEdit("The outline contains no voxel. Draw a larger one.");
    const id = isContinued ? sketch.id : this.#newId();
    const masks = fillBetween(outlines, /** @type {import("./label_shapes.js").Mask[]} */ (outlineMasks));
    if (isContinued) this.#trim(id, axis, masks);
    const { strides } = this;
    const { data } = this.labels;
    for (const [plane, { inside, top, left, width }] of masks) {
      inside.forEach((isInside, index) => {
        const [v, u] = [top + Math.floor(index / width), left + (index % width)];
        if (!isInside || v < 0 || u < 0 || v >= shape[down] || u >= shape[right]) return;
        const to = plane * strides[axis] + v * strides[down] + u * strides[right];
        if (data[to] === 0) this.#set(to, id);
      });
    }
    return this.commit("add", { kind: "add", id, axis, outlines });
  }

  /** Remove the voxels of an object outside the masks of its planes. @param {number} id @param {Axis} axis @param {Map<number, import("./label_shapes.js").Mask>} masks */
  #trim(id, axis, masks) {
    const [down, right] = ACROSS[axis];
    /** @type {number[]} */
    const outside = [];
    this.#visit(id, (index, ...position) => {
      const mask = masks.get(position[axis]);
      const [v, u] = mask ? [position[down] - mask.top, position[right] - mask.left] : [-1, -1];
      const isInside = mask && v >= 0 && u >= 0 && v < mask.height && u < mask.width && mask.inside[v * mask.width + u];
      if (!isInside) outside.push(index);
    });
    for (const index of outside) this.#set(index, 0);
  }

  /**
   * Paint or erase an object within a ball or a disc. `commit` ends the stroke.
   * @param {Triple} center in voxels @param {number} radius in micrometers @param {Brush} brush
   */
  stamp(center, radius, brush) {
    const { voxel, strides } = this;
    const { shape } = this.labels;
    // A brush smaller than a voxel still paints the voxel under it.
    const square = Math.max(radius, 0.5 * Math.max(...voxel)) ** 2;
    const reach = voxel.map((edge, axis) => (axis === brush.axis ? 0 : Math.sqrt(square) / edge));
    const low = center.map((index, axis) => Math.max(0, Math.ceil(index - reach[axis])));
    const high = center.map((index, axis) => Math.min(shape[axis] - 1, Math.floor(index + reach[axis])));
    for (let z = low[0]; z <= high[0]; z += 1) {
      for (let y = low[1]; y <= high[1]; y += 1) {
        const remainder = square - ((z - center[0]) * voxel[0]) ** 2 - ((y - center[1]) * voxel[1]) ** 2;
        if (remainder < 0) continue;
        const half = Math.sqrt(remainder) / voxel[2];
        const first = Math.max(low[2], Math.ceil(center[2] - half));
        const last = Math.min(high[2], Math.floor(center[2] + half));
        const row = z * strides[0] + y * strides[1];
        for (let index = row + first; index <= row + last; index += 1) this.#brush(index, brush);
      }
    }
  }

  /** @param {number} index @param {Brush} brush */
  #brush(index, { id, erase, overwrite }) {
    const current = this.labels.data[index];
    if (overwrite || current === (erase ? id : 0)) this.#set(index, erase ? 0 : id);
  }

  /** @returns {number} an id for a new object that will be painted */
  startObject() {
    return this.#newId();
  }
}
