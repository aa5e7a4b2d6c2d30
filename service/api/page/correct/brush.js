/** The brush and the eraser. They determine which object a stroke changes and which voxels the stroke covers. */

/** @typedef {import("../viewer/scene.js").Scene} Scene */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {{view: SliceView, id: number, position: Triple, isNew: boolean, isErasing: boolean}} Stroke id: id of the object that the stroke changes; position: voxel that the stroke has reached; isNew: whether the stroke creates the object */

/** Maximum radius, as a multiple of the minimum radius. */
const MAX_RADIUS_FACTOR = 200;
const INITIAL_RADIUS_VOXELS = 4;
/** Distance between the centers of consecutive stamps, as a fraction of the radius. */
const STAMP_SPACING = 1 / 6;

/** The options of the brush, and the stroke in progress. */
export class Brush {
  /** @param {Scene} scene @param {LabelEditor} editor */
  constructor(scene, editor) {
    this.scene = scene;
    this.editor = editor;
    /** Radius in micrometers. */
    this.radius = INITIAL_RADIUS_VOXELS * editor.voxelSize[2];
    /** Whether the brush paints a ball across planes instead of a disc in one plane. */
    this.isSpherical = true;
    /** Whether the brush paints over other objects. */
    this.isOverwriting = false;
    /** The object that a stroke changes if the stroke starts on the background. @type {"new" | "selected"} */
    this.backgroundTarget = "new";
    /** @type {Stroke | null} */
    this.stroke = null;
  }

  get minRadius() {
    return Math.min(...this.editor.voxelSize) / 2;
  }

  /** @param {number} factor */
  resize(factor) {
    this.radius = Math.max(this.minRadius, Math.min(MAX_RADIUS_FACTOR * this.minRadius, this.radius * factor));
  }

  /** @param {Triple} position @param {boolean} isErasing @returns {number | null} id of the object that a stroke starting at this voxel would change; 0 for a new object, null for none */
  targetAt(position, isErasing) {
    const id = this.editor.idAt(position);
    if (id) return id;
    if (!isErasing && this.backgroundTarget === "new") return 0;
    const { selectedId } = this.scene.state;
    return this.editor.objects.has(selectedId) ? selectedId : null;
  }

  /** Start a stroke. @param {SliceView} view @param {Triple} position @param {boolean} isErasing @returns {boolean} false if there is no object to change */
  startStroke(view, position, isErasing) {
    const target = this.targetAt(position, isErasing);
    if (target === null) return false;
    const id = target || this.editor.reserveId();
    this.scene.set({ selectedId: id });
    this.stroke = { view, id, position, isNew: target === 0, isErasing };
    this.paintTo(position);
    return true;
  }

  /** Continue the stroke to another voxel. @param {Triple} position */
  paintTo(position) {
    const { stroke, editor, radius } = this;
    if (stroke === null) return;
    const { id, isErasing, view } = stroke;
    const brush = { id, isErasing, axis: this.isSpherical ? null : view.axis, isOverwriting: this.isOverwriting };
    const offset = position.map((end, axis) => end - stroke.position[axis]);
    const length = Math.hypot(...offset.map((voxels, axis) => voxels * editor.voxelSize[axis]));
    const stampCount = Math.max(1, Math.ceil(length / Math.max(radius * STAMP_SPACING, Math.min(...editor.voxelSize))));
    for (let stamp = 1; stamp <= stampCount; stamp += 1) {
      const center = stroke.position.map((start, axis) => start + (offset[axis] * stamp) / stampCount);
      editor.stamp(/** @type {Triple} */ (center), radius, brush);
    }
    stroke.position = position;
  }
}
