/** Editor that merges, splits, deletes, outlines and paints objects in labels, with undo. This module does not use the DOM. */

import { haveSimilarColors } from "./label_colors.js";
import { createMask, divideMask, fillBetweenOutlines, fillPolygon } from "./label_shapes.js";
import { IN_PLANE_AXES } from "./slices.js";

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./slices.js").Axis} Axis */
/** @typedef {import("./label_shapes.js").Point} Point */
/** @typedef {"merge" | "split" | "delete" | "add" | "paint" | "erase" | "fill" | "accept" | "open"} EditKind */
/** @typedef {{kind: "split", ids: number[], seeds: Triple[]}} SplitSketch ids: ids of the parts of an object; seeds: the clicked voxel of each part */
/** @typedef {{kind: "add", id: number, axis: Axis, outlines: {at: number, points: Point[]}[]}} OutlineSketch id: id of the object; axis: normal to the planes of the outlines; at: index of the outline's plane along the axis (stored corrections contain this name) */

/**
 * @typedef {object} Edit a correction of the labels
 * @property {EditKind} kind
 * @property {Uint32Array} runs four numbers per run of voxels along x: index of the first voxel, length, old id, new id. The runs are
 *   in the order in which they were written.
 * @property {SplitSketch | OutlineSketch | null} sketch the clicks or outlines, which the next click or outline can continue
 */

/** @typedef {{voxelCount: number, low: Triple, high: Triple}} Extent number of voxels and bounding box of an object; the box may be larger than necessary */

/**
 * @typedef {object} Brush
 * @property {number} id of the object that is painted or erased
 * @property {boolean} isErasing whether to erase the object instead of painting it
 * @property {Axis | null} axis normal of a disc, null for a ball
 * @property {boolean} isOverwriting whether to paint over other objects
 */

/** Maximum number of cells of the grid on which objects are split. Larger objects are split on a coarser grid. */
const MAX_GRID_CELLS = 400_000;
/** Maximum number of ids to try when searching for an id whose color differs from the colors of neighboring objects. */
const MAX_COLOR_ATTEMPTS = 16;

/** Error that is thrown if a correction is not possible. The message explains what to do instead. */
export class EditError extends Error {}

/** Editor of one volume of labels. It records corrections, so that they can be undone and stored. */
export class LabelEditor {
  /** @param {Volume} labels at full resolution, changed in place @param {Triple} voxelSize in micrometers */
  constructor(labels, voxelSize) {
    this.labels = labels;
    this.voxelSize = voxelSize;
    const [, height, width] = labels.shape;
    this.strides = /** @type {Triple} */ ([height * width, width, 1]);
    /** @type {Map<number, Extent>} */
    this.objects = new Map();
    /** The largest id used so far. Ids are never reused. */
    this.maxId = 0;
    /** Applied corrections, newest last. @type {Edit[]} */
    this.edits = [];
    /** Undone corrections, most recently undone last. @type {Edit[]} */
    this.undoneEdits = [];
    /** Completed runs of the uncommitted correction, in the format of `Edit.runs`. @type {number[]} */
    this.pendingRuns = [];
    /** The current run, which the next voxel may extend. */
    this.openRun = { start: 0, length: 0, oldId: 0, newId: 0 };
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

  /** Add a run to the extent of an object, or remove a run from it. @param {number} id @param {number} start @param {number} length negative to remove the run */
  #updateExtent(id, start, length) {
    const { strides, objects } = this;
    const extent = objects.get(id);
    const voxelCount = (extent?.voxelCount ?? 0) + length;
    if (length < 0 && extent) {
      extent.voxelCount = voxelCount;
      if (voxelCount === 0) objects.delete(id);
      return;
    }
    const z = Math.floor(start / strides[0]);
    const y = Math.floor((start % strides[0]) / strides[1]);
    const x = start % strides[1];
    if (id > this.maxId) this.maxId = id;
    if (extent === undefined) {
      objects.set(id, { voxelCount, low: [z, y, x], high: [z + 1, y + 1, x + length] });
      return;
    }
    extent.voxelCount = voxelCount;
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
    return data[this.#getIndex(position)];
  }

  /** Return the index of a voxel in the data of the labels. @param {Triple} position */
  #getIndex(position) {
    return position[0] * this.strides[0] + position[1] * this.strides[1] + position[2];
  }

  /** @param {number[]} [neighbors] ids of neighboring objects @returns {number} an unused id, if possible with a color that differs from the colors of the neighbors */
  #createId(neighbors = []) {
    const first = this.maxId + 1;
    const candidates = Array.from({ length: MAX_COLOR_ATTEMPTS }, (_, offset) => first + offset);
    this.maxId = candidates.find((id) => !neighbors.some((neighbor) => haveSimilarColors(id, neighbor))) ?? first;
    this.#widenType(this.maxId);
    return this.maxId;
  }

  /** Write one voxel of the current correction. @param {number} index @param {number} newId */
  #writeVoxel(index, newId) {
    const { data } = this.labels;
    const oldId = data[index];
    if (oldId === newId) return;
    data[index] = newId;
    const { openRun } = this;
    const extendsRun =
      openRun.length > 0 &&
      index === openRun.start + openRun.length &&
      oldId === openRun.oldId &&
      newId === openRun.newId;
    if (extendsRun && index % this.strides[1] !== 0) {
      openRun.length += 1;
      return;
    }
    this.#closeRun();
    this.openRun = { start: index, length: 1, oldId, newId };
  }

  /** End the current run. */
  #closeRun() {
    const { start, length, oldId, newId } = this.openRun;
    if (length === 0) return;
    this.pendingRuns.push(start, length, oldId, newId);
    if (oldId) this.#updateExtent(oldId, start, -length);
    if (newId) this.#updateExtent(newId, start, length);
    this.openRun.length = 0;
  }

  /** Complete the current correction. @param {EditKind} kind @param {Edit["sketch"]} [sketch] @returns {Edit | null} null if no voxel changed */
  commit(kind, sketch = null) {
    this.#closeRun();
    if (this.pendingRuns.length === 0) return null;
    const edit = { kind, runs: Uint32Array.from(this.pendingRuns), sketch };
    this.pendingRuns = [];
    this.edits.push(edit);
    this.undoneEdits = [];
    return edit;
  }

  /** @returns {Edit | null} the undone correction, null if there is none */
  undo() {
    const edit = this.edits.pop();
    if (edit === undefined) return null;
    for (let runOffset = edit.runs.length - 4; runOffset >= 0; runOffset -= 4)
      this.#rewriteRun(edit.runs, runOffset, 3, 2);
    this.undoneEdits.push(edit);
    return edit;
  }

  /** @returns {Edit | null} the redone correction, null if there is none */
  redo() {
    const edit = this.undoneEdits.pop();
    if (edit === undefined) return null;
    this.#applyEdit(edit);
    return edit;
  }

  /** Apply stored corrections. @param {Edit[]} edits @returns {boolean} false, with the labels unchanged, if the corrections do not match the labels */
  restore(edits) {
    const editsMatch = edits.every((edit) => this.#applyEdit(edit));
    if (!editsMatch) while (this.undo() !== null);
    this.undoneEdits = [];
    return editsMatch;
  }

  /** @returns {Volume["data"]} a copy of the labels before any correction */
  copyOriginalData() {
    const data = this.labels.data.slice();
    for (const { runs } of [...this.edits].reverse())
      for (let runOffset = runs.length - 4; runOffset >= 0; runOffset -= 4)
        data.fill(runs[runOffset + 2], runs[runOffset], runs[runOffset] + runs[runOffset + 1]);
    return data;
  }

  /** Apply a correction. @param {Edit} edit @returns {boolean} false, with the labels unchanged, if the correction does not match the labels */
  #applyEdit(edit) {
    const { labels } = this;
    const { runs } = edit;
    const maxId = runs.reduce((max, value, index) => (index % 4 === 3 && value > max ? value : max), 0);
    this.#widenType(maxId);
    for (let runOffset = 0; runOffset < runs.length; runOffset += 4) {
      if (labels.data[runs[runOffset]] !== runs[runOffset + 2]) {
        for (let previousRunOffset = runOffset - 4; previousRunOffset >= 0; previousRunOffset -= 4)
          this.#rewriteRun(runs, previousRunOffset, 3, 2);
        return false;
      }
      this.#rewriteRun(runs, runOffset, 2, 3);
    }
    this.edits.push(edit);
    return true;
  }

  /** Convert the labels to uint32 if their type cannot hold an id. @param {number} id */
  #widenType(id) {
    const { data } = this.labels;
    if (data.BYTES_PER_ELEMENT < 4 && id >= 2 ** (8 * data.BYTES_PER_ELEMENT))
      this.labels.data = Uint32Array.from(data);
  }

  /** Replace the id of a run. @param {Uint32Array} runs @param {number} runOffset index of the first number of the run in `runs` @param {number} oldIdOffset @param {number} newIdOffset offsets of the id to replace and of the new id within the run */
  #rewriteRun(runs, runOffset, oldIdOffset, newIdOffset) {
    const [start, length, oldId, newId] = [
      runs[runOffset],
      runs[runOffset + 1],
      runs[runOffset + oldIdOffset],
      runs[runOffset + newIdOffset],
    ];
    this.labels.data.fill(newId, start, start + length);
    if (oldId) this.#updateExtent(oldId, start, -length);
    if (newId) this.#updateExtent(newId, start, length);
  }

  /** The sketch of the newest correction, or null. */
  get sketch() {
    return this.edits.at(-1)?.sketch ?? null;
  }

  /** @returns {Set<number>} ids of the objects that corrections have changed */
  listEditedIds() {
    /** @type {Set<number>} */
    const ids = new Set();
    for (const { runs } of this.edits)
      for (let runOffset = 0; runOffset < runs.length; runOffset += 4)
        for (const id of runs.subarray(runOffset + 2, runOffset + 4)) ids.add(id);
    return ids;
  }

  /** @returns {Map<EditKind, number>} the number of corrections of each kind */
  countByKind() {
    /** @type {Map<EditKind, number>} */
    const counts = new Map();
    for (const { kind } of this.edits) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    return counts;
  }

  /** Call a function for each voxel of an object. @param {number} id @param {(index: number, z: number, y: number, x: number) => void} visit */
  #forEachVoxel(id, visit) {
    const extent = this.objects.get(id);
    if (extent === undefined) throw new EditError("This object no longer exists. Select another one.");
    const { low, high } = extent;
    const { data } = this.labels;
    for (let z = low[0]; z < high[0]; z += 1) {
      for (let y = low[1]; y < high[1]; y += 1) {
        const row = z * this.strides[0] + y * this.strides[1];
        for (let x = low[2]; x < high[2]; x += 1) if (data[row + x] === id) visit(row + x, z, y, x);
      }
    }
  }

  /** Replace the id of all voxels of an object, run by run. @param {number} oldId @param {number} newId */
  #replaceId(oldId, newId) {
    const extent = this.objects.get(oldId);
    if (extent === undefined) throw new EditError("This object no longer exists. Select another one.");
    const { data } = this.labels;
    const [depth, height] = [0, 1].map((axis) => extent.high[axis] - extent.low[axis]);
    const first = this.#getIndex(extent.low);
    const width = extent.high[2] - extent.low[2];
    this.#closeRun();
    for (let row = 0; row < depth * height; row += 1) {
      const rowStart = first + Math.floor(row / height) * this.strides[0] + (row % height) * this.strides[1];
      const rowStop = rowStart + width;
      for (let start = rowStart; start < rowStop; start += 1) {
        if (data[start] !== oldId) continue;
        const runStart = start;
        while (start < rowStop && data[start] === oldId) start += 1;
        // Runs are short, so that a loop is faster than `fill`.
        for (let index = runStart; index < start; index += 1) data[index] = newId;
        this.openRun = { start: runStart, length: start - runStart, oldId, newId };
        this.#closeRun();
      }
    }
  }

  /** Merge one object into another. @param {number} id of the object that remains @param {number} otherId of the object that is merged */
  merge(id, otherId) {
    if (id === otherId) throw new EditError("This is the same object. Click another one.");
    if (!this.objects.has(id)) throw new EditError("This object no longer exists. Select another one.");
    this.#replaceId(otherId, id);
    return this.commit("merge");
  }

  /** Delete objects. @param {...number} ids */
  delete(...ids) {
    for (const id of ids) this.#replaceId(id, 0);
    return this.commit("delete");
  }

  /**
   * Fill the planes between the planes in which objects are labeled, with interpolated shapes. Other objects keep their voxels.
   * @param {number[]} ids @param {Axis} axis along which planes are filled; if there are none, a single object is filled along another axis
   */
  fillBetweenPlanes(ids, axis) {
    const otherAxes = /** @type {Axis[]} */ ([0, 1, 2]).filter((otherAxis) => otherAxis !== axis);
    const axes = ids.length === 1 ? [axis, ...otherAxes] : [axis];
    for (const id of ids) {
      const fillAxis = axes.find((candidate) => this.#hasEmptyPlane(id, candidate));
      if (fillAxis === undefined) continue;
      const masks = [...this.#extractMasks(id, fillAxis)].sort(([first], [second]) => first - second);
      const planes = masks.map(([at]) => ({ at }));
      const outlineMasks = masks.map(([, mask]) => mask);
      this.#writeMasks(id, fillAxis, fillBetweenOutlines(planes, outlineMasks));
    }
    const edit = this.commit("fill");
    if (edit === null)
      throw new EditError("There are no planes to fill. Label the same object in two planes that are not adjacent.");
    return edit;
  }

  /** Return whether an object has no voxels in a plane between two planes in which it has voxels. @param {number} id @param {Axis} axis */
  #hasEmptyPlane(id, axis) {
    const extent = this.objects.get(id);
    if (extent === undefined) return false;
    const { data } = this.labels;
    const [depth, height, width] = extent.low.map((low, extentAxis) => extent.high[extentAxis] - low);
    const occupied = new Uint8Array([depth, height, width][axis]);
    const first = this.#getIndex(extent.low);
    for (let row = 0; row < depth * height; row += 1) {
      const plane = axis === 0 ? Math.floor(row / height) : row % height;
      if (axis < 2 && occupied[plane]) continue;
      const start = first + Math.floor(row / height) * this.strides[0] + (row % height) * this.strides[1];
      const rowIds = data.subarray(start, start + width);
      if (axis < 2) occupied[plane] = Number(rowIds.includes(id));
      else for (let x = 0; x < width; x += 1) occupied[x] ||= Number(rowIds[x] === id);
    }
    // The extent of an object may be larger than necessary.
    return occupied.subarray(occupied.indexOf(1), occupied.lastIndexOf(1)).includes(0);
  }

  /** Return the masks of the planes in which an object has voxels. @param {number} id @param {Axis} axis @returns {Map<number, import("./label_shapes.js").Mask>} by plane */
  #extractMasks(id, axis) {
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    /** Points down and to the right by plane. @type {Map<number, number[]>} */
    const points = new Map();
    this.#forEachVoxel(id, (_, ...position) => {
      const planePoints = points.get(position[axis]) ?? [];
      if (planePoints.length === 0) points.set(position[axis], planePoints);
      planePoints.push(position[downAxis], position[rightAxis]);
    });
    return new Map([...points].map(([plane, planePoints]) => [plane, createMask(planePoints)]));
  }

  /** Write the masks of an object to voxels of the background. @param {number} id @param {Axis} axis @param {Map<number, import("./label_shapes.js").Mask>} masks by plane */
  #writeMasks(id, axis, masks) {
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    const { strides } = this;
    const { data, shape } = this.labels;
    for (const [plane, { values, top, left, width }] of masks) {
      values.forEach((isInside, index) => {
        const [v, u] = [top + Math.floor(index / width), left + (index % width)];
        if (!isInside || v < 0 || u < 0 || v >= shape[downAxis] || u >= shape[rightAxis]) return;
        const voxelIndex = plane * strides[axis] + v * strides[downAxis] + u * strides[rightAxis];
        if (data[voxelIndex] === 0) this.#writeVoxel(voxelIndex, id);
      });
    }
  }

  /**
   * Cut an object along a line drawn in a view, through all planes of the view. The smaller part gets a new id.
   * @param {number} id @param {Axis} axis of the view @param {Point} lineStart @param {Point} lineEnd ends of the line as [down, right] voxel coordinates in the view
   */
  cut(id, axis, lineStart, lineEnd) {
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    const [deltaDown, deltaRight] = [lineEnd[0] - lineStart[0], lineEnd[1] - lineStart[1]];
    /** @type {[number[], number[]]} */
    const sides = [[], []];
    this.#forEachVoxel(id, (index, ...position) => {
      const side =
        (position[rightAxis] + 0.5 - lineStart[1]) * deltaDown - (position[downAxis] + 0.5 - lineStart[0]) * deltaRight;
      sides[side < 0 ? 0 : 1].push(index);
    });
    const smallerSide = sides[0].length < sides[1].length ? sides[0] : sides[1];
    if (smallerSide.length === 0)
      throw new EditError("The line does not cross the object. Draw a line from one side of the object to the other.");
    const newId = this.#createId([id]);
    for (const index of smallerSide) this.#writeVoxel(index, newId);
    return this.commit("split");
  }

  /**
   * Find the object that contains the longest part of a line drawn in a view.
   * @param {Axis} axis @param {number} plane @param {Point} lineStart @param {Point} lineEnd @returns {number} id of the object, 0 if there is none
   */
  findObjectUnderLine(axis, plane, lineStart, lineEnd) {
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    const stepCount = Math.ceil(2 * Math.hypot(lineEnd[0] - lineStart[0], lineEnd[1] - lineStart[1])) + 1;
    /** @type {Map<number, number>} */
    const counts = new Map();
    for (let step = 0; step <= stepCount; step += 1) {
      /** @type {Triple} */
      const position = [plane, plane, plane];
      position[downAxis] = Math.floor(lineStart[0] + ((lineEnd[0] - lineStart[0]) * step) / stepCount);
      position[rightAxis] = Math.floor(lineStart[1] + ((lineEnd[1] - lineStart[1]) * step) / stepCount);
      const id = this.idAt(position);
      if (id) counts.set(id, (counts.get(id) ?? 0) + 1);
    }
    return [...counts].reduce((longest, entry) => (entry[1] > longest[1] ? entry : longest), [0, 0])[0];
  }

  /**
   * Split an object into one part per seed. Parts grow from their seeds, fast through thick regions and slowly through
   * necks. The first part keeps the id.
   * @param {number[]} ids of the existing parts @param {Triple[]} seeds clicked voxels; there are more seeds than `ids`
   */
  split(ids, seeds) {
    const extents = ids.flatMap((id) => this.objects.get(id) ?? []);
    if (extents.length < ids.length) throw new EditError("This object no longer exists. Select another one.");
    const low = /** @type {Triple} */ ([0, 1, 2].map((axis) => Math.min(...extents.map((extent) => extent.low[axis]))));
    const high = /** @type {Triple} */ (
      [0, 1, 2].map((axis) => Math.max(...extents.map((extent) => extent.high[axis])))
    );
    const lengths = low.map((index, axis) => high[axis] - index);
    // Split large objects on a coarser grid, so that the split feels immediate.
    const cellSize = Math.max(1, Math.ceil(Math.cbrt((lengths[0] * lengths[1] * lengths[2]) / MAX_GRID_CELLS)));
    // With a margin of one empty cell, no bounds checks are needed.
    const shape = /** @type {Triple} */ (lengths.map((length) => Math.ceil(length / cellSize) + 2));
    const mask = new Uint8Array(shape[0] * shape[1] * shape[2]);
    const [z0, y0, x0] = low.map((index) => index - cellSize);
    /** @param {number} z @param {number} y @param {number} x */
    const toCellIndex = (z, y, x) =>
      (Math.floor((z - z0) / cellSize) * shape[1] + Math.floor((y - y0) / cellSize)) * shape[2] +
      Math.floor((x - x0) / cellSize);
    for (const id of ids) this.#forEachVoxel(id, (_, z, y, x) => (mask[toCellIndex(z, y, x)] = 1));
    const seedIndices = seeds.map((seed) => toCellIndex(...seed));
    if (new Set(seedIndices).size < seedIndices.length || !seeds.every((seed) => ids.includes(this.idAt(seed))))
      throw new EditError("Click once inside each part of the object.");
    const parts = divideMask(mask, shape, this.voxelSize, seedIndices);
    const partIds = [...ids];
    while (partIds.length < seeds.length) partIds.push(this.#createId(partIds));
    // Collect all changes before writing them, because writing would affect which voxels are visited.
    /** @type {number[]} */
    const writes = [];
    for (const id of ids)
      this.#forEachVoxel(id, (index, z, y, x) => {
        const newId = partIds[Math.max(0, parts[toCellIndex(z, y, x)] - 1)];
        if (newId !== id) writes.push(index, newId);
      });
    for (let write = 0; write < writes.length; write += 2) this.#writeVoxel(writes[write], writes[write + 1]);
    return this.commit("split", { kind: "split", ids: partIds, seeds });
  }

  /**
   * Add an object by outlining it in a plane, or add an outline to the object that is being drawn. Planes between two
   * outlines are filled with interpolated shapes. Other objects keep their voxels.
   * @param {Axis} axis normal to the plane @param {number} planeIndex @param {Point[]} points of the outline @param {OutlineSketch | null} sketch of the object that is being drawn
   */
  addOutline(axis, planeIndex, points, sketch) {
    const isContinued = sketch !== null && sketch.axis === axis && this.objects.has(sketch.id);
    const otherOutlines = isContinued ? sketch.outlines.filter((outline) => outline.at !== planeIndex) : [];
    const outlines = [...otherOutlines, { at: planeIndex, points }].sort((first, second) => first.at - second.at);
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    const { shape } = this.labels;
    const outlineMasks = outlines.map((outline) => fillPolygon(outline.points, [shape[downAxis], shape[rightAxis]]));
    if (outlineMasks.some((mask) => mask === null))
      throw new EditError("The outline contains no voxels. Draw a larger outline.");
    const id = isContinued ? sketch.id : this.#createId();
    const masks = fillBetweenOutlines(outlines, /** @type {import("./label_shapes.js").Mask[]} */ (outlineMasks));
    if (isContinued) this.#removeVoxelsOutside(id, axis, masks);
    this.#writeMasks(id, axis, masks);
    return this.commit("add", { kind: "add", id, axis, outlines });
  }

  /**
   * Add an outline to an existing object, and fill the planes between the outline and the nearest labeled planes.
   * @param {number} id @param {Axis} axis normal to the plane @param {number} planeIndex @param {Point[]} points of the outline
   */
  extendWithOutline(id, axis, planeIndex, points) {
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    const { shape } = this.labels;
    const outlineMask = fillPolygon(points, [shape[downAxis], shape[rightAxis]]);
    if (outlineMask === null) throw new EditError("The outline contains no voxels. Draw a larger outline.");
    const masks = this.#extractMasks(id, axis).set(planeIndex, outlineMask);
    const planes = [...masks.keys()].sort((first, second) => first - second);
    const index = planes.indexOf(planeIndex);
    const neighbors = planes.slice(Math.max(0, index - 1), index + 2).map((at) => ({ at }));
    const neighborMasks = neighbors.map(({ at }) => /** @type {import("./label_shapes.js").Mask} */ (masks.get(at)));
    this.#writeMasks(id, axis, fillBetweenOutlines(neighbors, neighborMasks));
    return this.commit("add");
  }

  /** Remove the voxels of an object that are outside the masks. @param {number} id @param {Axis} axis @param {Map<number, import("./label_shapes.js").Mask>} masks */
  #removeVoxelsOutside(id, axis, masks) {
    const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
    /** @type {number[]} */
    const outsideIndices = [];
    this.#forEachVoxel(id, (index, ...position) => {
      const mask = masks.get(position[axis]);
      const [v, u] = mask ? [position[downAxis] - mask.top, position[rightAxis] - mask.left] : [-1, -1];
      const isInside = mask && v >= 0 && u >= 0 && v < mask.height && u < mask.width && mask.values[v * mask.width + u];
      if (!isInside) outsideIndices.push(index);
    });
    for (const index of outsideIndices) this.#writeVoxel(index, 0);
  }

  /**
   * Paint or erase an object within a ball or a disc. `commit` completes the stroke.
   * @param {Triple} center in voxels @param {number} radius in micrometers @param {Brush} brush
   */
  stamp(center, radius, brush) {
    const { voxelSize, strides } = this;
    const { shape } = this.labels;
    // A brush that is smaller than a voxel still paints the voxel under the brush.
    const squaredRadius = Math.max(radius, 0.5 * Math.max(...voxelSize)) ** 2;
    const reach = voxelSize.map((length, axis) => (axis === brush.axis ? 0 : Math.sqrt(squaredRadius) / length));
    const low = center.map((index, axis) => Math.max(0, Math.ceil(index - reach[axis])));
    const high = center.map((index, axis) => Math.min(shape[axis] - 1, Math.floor(index + reach[axis])));
    for (let z = low[0]; z <= high[0]; z += 1) {
      for (let y = low[1]; y <= high[1]; y += 1) {
        const remainingSquaredRadius =
          squaredRadius - ((z - center[0]) * voxelSize[0]) ** 2 - ((y - center[1]) * voxelSize[1]) ** 2;
        if (remainingSquaredRadius < 0) continue;
        const halfLength = Math.sqrt(remainingSquaredRadius) / voxelSize[2];
        const first = Math.max(low[2], Math.ceil(center[2] - halfLength));
        const last = Math.min(high[2], Math.floor(center[2] + halfLength));
        const row = z * strides[0] + y * strides[1];
        for (let index = row + first; index <= row + last; index += 1) this.#paintVoxel(index, brush);
      }
    }
  }

  /** Paint or erase one voxel. @param {number} index @param {Brush} brush */
  #paintVoxel(index, { id, isErasing, isOverwriting }) {
    const currentId = this.labels.data[index];
    if (isOverwriting || currentId === (isErasing ? id : 0)) this.#writeVoxel(index, isErasing ? 0 : id);
  }

  /** Copy objects of other labels to voxels of the background. @param {LabelEditor} other editor of labels with the same shape @param {number[]} ids of objects in the other labels @returns {{edit: Edit | null, newIds: number[]}} newIds: ids of the copies */
  addObjects(other, ids) {
    const newIds = ids.map((id) => {
      const newId = this.#createId();
      other.#forEachVoxel(id, (index) => {
        if (this.labels.data[index] === 0) this.#writeVoxel(index, newId);
      });
      return newId;
    });
    return { edit: this.commit("accept"), newIds };
  }

  /** Add stored labels to voxels of the background. @param {Volume["data"]} data with the same shape @param {number} ignoredId label of voxels that are left out, 0 for none @returns {Edit | null} null if the labels contain no objects */
  addLabels(data, ignoredId) {
    for (let index = 0; index < data.length; index += 1) {
      const id = data[index];
      if (id === 0 || id === ignoredId || this.labels.data[index] !== 0) continue;
      this.#widenType(id);
      this.#writeVoxel(index, id);
    }
    return this.commit("open");
  }

  /** Reserve an id for a new object, which the caller paints next. @returns {number} */
  reserveId() {
    return this.#createId();
  }
}
