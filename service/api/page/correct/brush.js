/** Brush and eraser: they determine which object a stroke changes and which voxels it covers. */

/** @typedef {import("../viewer/scene.js").Scene} Scene */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {{view: SliceView, id: number, position: Triple, isNew: boolean, erase: boolean}} Stroke position: voxel that the stroke has reached; isNew: whether the stroke creates a new object */

/** Ratio of the largest and the smallest radius. */
const MAX_RADIUS_FACTOR = 200;
const INITIAL_RADIUS_VOXELS = 4;
/** Distance between the centers of two stamps, as a fraction of the radius. */
const STAMP_SPACING = 1 / 6;

/** The state of the brush and its stroke. */
export class Brush {
  /** @param {Scene} scene @param {LabelEditor} editor */
  constructor(scene, editor) {
    this.scene = scene;
    this.editor = editor;
    /** Radius in micrometers. */
    this.radius = INITIAL_RADIUS_VOXELS * editor.voxelSize[2];
    /** Whether the brush paints a ball across planes, not a disc in one plane. */
    this.isSpherical = true;
    /** Whether the brush paints over other objects. */
    this.overwrite = false;
    /** The object that a stroke changes if it starts on the background. @type {"new" | "selected"} */
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

  /** @param {Triple} position @param {boolean} erase @returns {number | null} the object that a stroke starting at this voxel would change; 0 for a new object, null for none */
  targetAt(position, erase) {
    const id = this.editor.idAt(position);
    if (id) return id;
    if (!erase && this.backgroundTarget === "new") return 0;
    const { selected } = this.scene.state;
    return this.editor.objects.has(selected) ? selected : null;
  }

  /** Start a stroke. @param {SliceView} view @param {Triple} position @param {boolean} erase @returns {boolean} false if there is no object to change */
  start(view, position, erase) {
    const target = this.targetAt(position, erase);
    if (target === null) return false;
    const id = target || this.editor.startObject();
    this.scene.set({ selected: id });
    this.stroke = { view, id, position, isNew: target === 0, erase };
    this.paintTo(position);
    return true;
  }

  /** Continue the stroke to another voxel. @param {Triple} to */
  paintTo(to) {
    const { stroke, editor, radius } = this;
    if (stroke === null) return;
    const { id, erase, view } = stroke;
    const brush = { id, erase, axis: this.isSpherical ? null : view.axis, overwrite: this.overwrite };
    const offset = to.map((end, axis) => end - stroke.position[axis]);
    const length = Math.hypot(...offset.map((voxels, axis) => voxels * editor.voxelSize[axis]));
    const stampCount = Math.max(1, Math.ceil(length / Math.max(radius * STAMP_SPACING, Math.min(...editor.voxelSize))));
    for (let stamp = 1; stamp <= stampCount; stamp += 1) {
      const center = stroke.position.map((start, axis) => start + (offset[axis] * stamp) / stampCount);
      editor.stamp(/** @type {Triple} */ (center), radius, brush);
    }
    stroke.position = to;
  }
}
