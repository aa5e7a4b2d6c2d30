/** Corrections of labels: merging, splitting, deleting, drawing and painting objects, with undo. Nothing here touches the document. */

import { divide, fillBetween, fillPolygon } from "./label_shapes.js";
import { ACROSS, lookAlike } from "./slices.js";

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./slices.js").Axis} Axis */
/** @typedef {import("./label_shapes.js").Point} Point */
/** @typedef {"merge" | "split" | "delete" | "add" | "paint" | "erase"} Kind */
/** @typedef {{kind: "split", ids: number[], seeds: Triple[]}} Splitting objects that were one, and where each was clicked */
/** @typedef {{kind: "add", id: number, axis: Axis, outlines: {at: number, points: Point[]}[]}} Drawing */

/**
 * @typedef {object} Edit what a correction changed
 * @property {Kind} kind
 * @property {Uint32Array} runs four numbers for each run of voxels along x, in the order of writing: first voxel, length,
 *   id before, id after
 * @property {Splitting | Drawing | null} sketch what was clicked or drawn, which further clicks go on with
 */

/** @typedef {{voxels: number, low: Triple, high: Triple}} Extent of an object; the box holds it, and may be larger */

/**
 * @typedef {object} Brush
 * @property {number} id of the object that is painted or erased
 * @property {boolean} erase
 * @property {Axis | null} axis of the plane of a disc, null: a ball
 * @property {boolean} over also where other objects are
 */

const MOST_CELLS = 400_000;
const COLOURS_TO_TRY = 16;

/** A correction that cannot be done as it was asked for; the message says what to do instead. */
export class CannotEdit extends Error {}

export class LabelEditor {
  /** @param {Volume} labels in full resolution, which are changed @param {Triple} voxel edges of a voxel, in micrometres */
  constructor(labels, voxel) {
    this.labels = labels;
    this.voxel = voxel;
    const [, height, width] = labels.shape;
    this.strides = /** @type {Triple} */ ([height * width, width, 1]);
    /** @type {Map<number, Extent>} */
    this.objects = new Map();
    /** The largest id that was ever used: ids are not used twice. */
    this.most = 0;
    /** @type {Edit[]} */
    this.done = [];
    /** Newest last. @type {Edit[]} */
    this.undone = [];
    /** Runs of the correction under way. @type {number[]} */
    this.pending = [];
    /** The last run, which the next voxel may continue. */
    this.open = { start: 0, length: 0, before: 0, after: 0 };
    this.#survey();
  }

  /** Find all objects in one pass over the rows. */
  #survey() {
    const { data, shape } = this.labels;
    const width = shape[2];
    for (let row = 0; row < data.length; row += width) {
      const end = row + width;
      for (let start = row; start < end; ) {
        const id = data[start];
        let stop = start + 1;
        while (stop < end && data[stop] === id) stop += 1;
        if (id) this.#count(id, start, stop - start);
        start = stop;
      }
    }
  }

  /** @param {number} id @param {number} start @param {number} length of a run that is added, negative: taken away */
  #count(id, start, length) {
    const { strides, objects } = this;
    const known = objects.get(id);
    const voxels = (known?.voxels ?? 0) + length;
    if (length < 0 && known) {
      known.voxels = voxels;
      if (voxels === 0) objects.delete(id);
      return;
    }
    const z = Math.floor(start / strides[0]);
    const y = Math.floor((start % strides[0]) / strides[1]);
    const x = start % strides[1];
    if (id > this.most) this.most = id;
    if (known === undefined) {
      objects.set(id, { voxels, low: [z, y, x], high: [z + 1, y + 1, x + length] });
      return;
    }
    known.voxels = voxels;
    const { low, high } = known;
    if (z < low[0]) low[0] = z;
    if (y < low[1]) low[1] = y;
    if (x < low[2]) low[2] = x;
    if (z >= high[0]) high[0] = z + 1;
    if (y >= high[1]) high[1] = y + 1;
    if (x + length > high[2]) high[2] = x + length;
  }

  /** @param {Triple} at @returns {number} the id there, 0 outside of the stack */
  idAt(at) {
    const { shape, data } = this.labels;
    if (at.some((place, axis) => place < 0 || place >= shape[axis])) return 0;
    return data[this.#place(at)];
  }

  /** @param {Triple} at */
  #place(at) {
    return at[0] * this.strides[0] + at[1] * this.strides[1] + at[2];
  }

  /** @param {number[]} [parts] ids of what lies beside it @returns {number} an id that no object has or had, in another colour than theirs */
  #newId(parts = []) {
    const first = this.most + 1;
    const candidates = Array.from({ length: COLOURS_TO_TRY }, (_, more) => first + more);
    this.most = candidates.find((id) => !parts.some((part) => lookAlike(id, part))) ?? first;
    this.#makeRoom(this.most);
    return this.most;
  }

  /** Write one voxel as a part of the correction under way. @param {number} place @param {number} after */
  #set(place, after) {
    const { data } = this.labels;
    const before = data[place];
    if (before === after) return;
    data[place] = after;
    const { open } = this;
    const next =
      open.length > 0 && place === open.start + open.length && before === open.before && after === open.after;
    if (next && place % this.strides[1] !== 0) {
      open.length += 1;
      return;
    }
    this.#close();
    this.open = { start: place, length: 1, before, after };
  }

  /** End the last run. */
  #close() {
    const { start, length, before, after } = this.open;
    if (length === 0) return;
    this.pending.push(start, length, before, after);
    if (before) this.#count(before, start, -length);
    if (after) this.#count(after, start, length);
    this.open.length = 0;
  }

  /** End the correction under way. @param {Kind} kind @param {Edit["sketch"]} [sketch] @returns {Edit | null} null: nothing has changed */
  commit(kind, sketch = null) {
    this.#close();
    if (this.pending.length === 0) return null;
    const edit = { kind, runs: Uint32Array.from(this.pending), sketch };
    this.pending = [];
    this.done.push(edit);
    this.undone = [];
    return edit;
  }

  /** @returns {Edit | null} what was taken back */
  undo() {
    const edit = this.done.pop();
    if (edit === undefined) return null;
    for (let run = edit.runs.length - 4; run >= 0; run -= 4) this.#rewrite(edit.runs, run, 3, 2);
    this.undone.push(edit);
    return edit;
  }

  /** @returns {Edit | null} what was done again */
  redo() {
    const edit = this.undone.pop();
    if (edit === undefined) return null;
    this.#apply(edit);
    return edit;
  }

  /** Repeat corrections of earlier. @param {Edit[]} edits @returns {boolean} whether they fit these labels; else nothing changes */
  restore(edits) {
    const fits = edits.every((edit) => this.#apply(edit));
    if (!fits) while (this.undo() !== null);
    this.undone = [];
    return fits;
  }

  /** @returns {Volume["data"]} a copy of the labels as they were before all corrections */
  original() {
    const data = this.labels.data.slice();
    for (const { runs } of [...this.done].reverse())
      for (let run = runs.length - 4; run >= 0; run -= 4)
        data.fill(runs[run + 2], runs[run], runs[run] + runs[run + 1]);
    return data;
  }

  /** @param {Edit} edit @returns {boolean} whether it fits; else nothing changes */
  #apply(edit) {
    const { labels } = this;
    const { runs } = edit;
    const most = runs.reduce((found, value, index) => (index % 4 === 3 && value > found ? value : found), 0);
    this.#makeRoom(most);
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

  /** Give the labels a wider type where theirs cannot hold an id. @param {number} id */
  #makeRoom(id) {
    const { data } = this.labels;
    if (data.BYTES_PER_ELEMENT < 4 && id >= 2 ** (8 * data.BYTES_PER_ELEMENT))
      this.labels.data = Uint32Array.from(data);
  }

  /** @param {Uint32Array} runs @param {number} run @param {number} from @param {number} to where the run has the ids */
  #rewrite(runs, run, from, to) {
    const [start, length, before, after] = [runs[run], runs[run + 1], runs[run + from], runs[run + to]];
    this.labels.data.fill(after, start, start + length);
    if (before) this.#count(before, start, -length);
    if (after) this.#count(after, start, length);
  }

  /** What the newest correction leaves to go on with. */
  get sketch() {
    return this.done.at(-1)?.sketch ?? null;
  }

  /** How many corrections of each kind were made. @returns {Map<Kind, number>} */
  counts() {
    /** @type {Map<Kind, number>} */
    const counts = new Map();
    for (const { kind } of this.done) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    return counts;
  }

  /** Call for each voxel of an object. @param {number} id @param {(place: number, z: number, y: number, x: number) => void} visit */
  #visit(id, visit) {
    const extent = this.objects.get(id);
    if (extent === undefined) throw new CannotEdit("There is no such object any more.");
    const { low, high } = extent;
    const { data } = this.labels;
    for (let z = low[0]; z < high[0]; z += 1) {
      for (let y = low[1]; y < high[1]; y += 1) {
        const row = z * this.strides[0] + y * this.strides[1];
        for (let x = low[2]; x < high[2]; x += 1) if (data[row + x] === id) visit(row + x, z, y, x);
      }
    }
  }

  /** Give the voxels of one object to another. @param {number} kept @param {number} other */
  merge(kept, other) {
    if (kept === other) throw new CannotEdit("These are one object already; click another one.");
    if (!this.objects.has(kept)) throw new CannotEdit("There is no such object any more.");
    this.#visit(other, (place) => this.#set(place, kept));
    return this.commit("merge");
  }

  /** @param {number} id */
  remove(id) {
    this.#visit(id, (place) => this.#set(place, 0));
    return this.commit("delete");
  }

  /**
   * Split an object by the plane through a line of a view and the direction of looking; the smaller part gets a new id.
   * @param {number} id @param {Axis} axis of the view @param {Point} from @param {Point} to in voxels down and to the right
   */
  cut(id, axis, from, to) {
    const [down, right] = ACROSS[axis];
    const [rise, run] = [to[0] - from[0], to[1] - from[1]];
    /** @type {[number[], number[]]} */
    const sides = [[], []];
    this.#visit(id, (place, ...at) => {
      const side = (at[right] + 0.5 - from[1]) * rise - (at[down] + 0.5 - from[0]) * run;
      sides[side < 0 ? 0 : 1].push(place);
    });
    const smaller = sides[0].length < sides[1].length ? sides[0] : sides[1];
    if (smaller.length === 0) throw new CannotEdit("The line passes beside the object; draw it across.");
    const own = this.#newId([id]);
    for (const place of smaller) this.#set(place, own);
    return this.commit("split");
  }

  /**
   * The object that a line of a view crosses most.
   * @param {Axis} axis @param {number} at plane @param {Point} from @param {Point} to @returns {number} 0: none
   */
  crossed(axis, at, from, to) {
    const [down, right] = ACROSS[axis];
    const steps = Math.ceil(2 * Math.hypot(to[0] - from[0], to[1] - from[1])) + 1;
    /** @type {Map<number, number>} */
    const seen = new Map();
    for (let step = 0; step <= steps; step += 1) {
      /** @type {Triple} */
      const place = [at, at, at];
      place[down] = Math.floor(from[0] + ((to[0] - from[0]) * step) / steps);
      place[right] = Math.floor(from[1] + ((to[1] - from[1]) * step) / steps);
      const id = this.idAt(place);
      if (id) seen.set(id, (seen.get(id) ?? 0) + 1);
    }
    return [...seen].reduce((best, now) => (now[1] > best[1] ? now : best), [0, 0])[0];
  }

  /**
   * Split an object into as many parts as there are seeds: each grows from its seed, fast where the object is thick and
   * slowly through necks. The first part keeps the id.
   * @param {number[]} ids of the parts so far @param {Triple[]} seeds voxels, one or more beyond the ids
   */
  split(ids, seeds) {
    const extents = ids.flatMap((id) => this.objects.get(id) ?? []);
    if (extents.length < ids.length) throw new CannotEdit("There is no such object any more.");
    const low = /** @type {Triple} */ ([0, 1, 2].map((axis) => Math.min(...extents.map((one) => one.low[axis]))));
    const high = /** @type {Triple} */ ([0, 1, 2].map((axis) => Math.max(...extents.map((one) => one.high[axis]))));
    const lengths = low.map((place, axis) => high[axis] - place);
    // Cells of several voxels keep the work on a large object within what feels immediate.
    const cell = Math.max(1, Math.ceil(Math.cbrt((lengths[0] * lengths[1] * lengths[2]) / MOST_CELLS)));
    // A margin of one cell saves looking for ends.
    const shape = /** @type {Triple} */ (lengths.map((length) => Math.ceil(length / cell) + 2));
    const inside = new Uint8Array(shape[0] * shape[1] * shape[2]);
    const [z0, y0, x0] = low.map((place) => place - cell);
    /** @param {number} z @param {number} y @param {number} x */
    const local = (z, y, x) =>
      (Math.floor((z - z0) / cell) * shape[1] + Math.floor((y - y0) / cell)) * shape[2] + Math.floor((x - x0) / cell);
    for (const id of ids) this.#visit(id, (_, z, y, x) => (inside[local(z, y, x)] = 1));
    const places = seeds.map((seed) => local(...seed));
    if (new Set(places).size < places.length || !seeds.every((seed) => ids.includes(this.idAt(seed))))
      throw new CannotEdit("Click once into each part of the object.");
    const parts = divide(inside, shape, this.voxel, places);
    const all = [...ids];
    while (all.length < seeds.length) all.push(this.#newId(all));
    // Places first: writing changes what is visited.
    /** @type {number[]} */
    const writes = [];
    for (const id of ids)
      this.#visit(id, (place, z, y, x) => {
        const to = all[Math.max(0, parts[local(z, y, x)] - 1)];
        if (to !== id) writes.push(place, to);
      });
    for (let write = 0; write < writes.length; write += 2) this.#set(writes[write], writes[write + 1]);
    return this.commit("split", { kind: "split", ids: all, seeds });
  }

  /**
   * Add an object by its outline in a plane, or a further outline to the object that is being drawn: planes between two
   * outlines are filled by what lies between them in shape. Other objects keep their voxels.
   * @param {Axis} axis @param {number} at plane @param {Point[]} points of the outline @param {Drawing | null} drawing
   */
  outline(axis, at, points, drawing) {
    const goesOn = drawing !== null && drawing.axis === axis && this.objects.has(drawing.id);
    const before = goesOn ? drawing.outlines.filter((outline) => outline.at !== at) : [];
    const outlines = [...before, { at, points }].sort((one, other) => one.at - other.at);
    const [down, right] = ACROSS[axis];
    const { shape } = this.labels;
    const fills = outlines.map((outline) => fillPolygon(outline.points, [shape[down], shape[right]]));
    if (fills.some((fill) => fill === null)) throw new CannotEdit("The outline holds no voxel; draw a larger one.");
    const id = goesOn ? drawing.id : this.#newId();
    const masks = fillBetween(outlines, /** @type {import("./label_shapes.js").Mask[]} */ (fills));
    if (goesOn) this.#trim(id, axis, masks);
    const { strides } = this;
    const { data } = this.labels;
    for (const [plane, { inside, top, left, width }] of masks) {
      inside.forEach((one, place) => {
        const [v, u] = [top + Math.floor(place / width), left + (place % width)];
        if (!one || v < 0 || u < 0 || v >= shape[down] || u >= shape[right]) return;
        const to = plane * strides[axis] + v * strides[down] + u * strides[right];
        if (data[to] === 0) this.#set(to, id);
      });
    }
    return this.commit("add", { kind: "add", id, axis, outlines });
  }

  /** Take away what of an object lies outside of masks of planes. @param {number} id @param {Axis} axis @param {Map<number, import("./label_shapes.js").Mask>} masks */
  #trim(id, axis, masks) {
    const [down, right] = ACROSS[axis];
    /** @type {number[]} */
    const gone = [];
    this.#visit(id, (place, ...at) => {
      const mask = masks.get(at[axis]);
      const [v, u] = mask ? [at[down] - mask.top, at[right] - mask.left] : [-1, -1];
      const kept = mask && v >= 0 && u >= 0 && v < mask.height && u < mask.width && mask.inside[v * mask.width + u];
      if (!kept) gone.push(place);
    });
    for (const place of gone) this.#set(place, 0);
  }

  /**
   * Add to an object, or take away, within a ball or a disc; `commit` ends the stroke.
   * @param {Triple} centre in voxels @param {number} radius in micrometres @param {Brush} brush
   */
  stamp(centre, radius, brush) {
    const { voxel, strides } = this;
    const { shape } = this.labels;
    // A brush finer than a voxel still paints the one that it is at.
    const square = Math.max(radius, 0.5 * Math.max(...voxel)) ** 2;
    const reach = voxel.map((edge, along) => (along === brush.axis ? 0 : Math.sqrt(square) / edge));
    const low = centre.map((place, along) => Math.max(0, Math.ceil(place - reach[along])));
    const high = centre.map((place, along) => Math.min(shape[along] - 1, Math.floor(place + reach[along])));
    for (let z = low[0]; z <= high[0]; z += 1) {
      for (let y = low[1]; y <= high[1]; y += 1) {
        const left = square - ((z - centre[0]) * voxel[0]) ** 2 - ((y - centre[1]) * voxel[1]) ** 2;
        if (left < 0) continue;
        const half = Math.sqrt(left) / voxel[2];
        const first = Math.max(low[2], Math.ceil(centre[2] - half));
        const last = Math.min(high[2], Math.floor(centre[2] + half));
        const row = z * strides[0] + y * strides[1];
        for (let place = row + first; place <= row + last; place += 1) this.#brush(place, brush);
      }
    }
  }

  /** @param {number} place @param {Brush} brush */
  #brush(place, { id, erase, over }) {
    const here = this.labels.data[place];
    if (over || here === (erase ? id : 0)) this.#set(place, erase ? 0 : id);
  }

  /** @returns {number} an id for an object that is painted from nothing */
  startObject() {
    return this.#newId();
  }
}
