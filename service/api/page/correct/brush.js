/** The brush and the eraser: the object that a stroke changes, and the voxels that it paints. */

/** @typedef {import("../viewer/scene.js").Scene} Scene */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {{view: SliceView, id: number, position: Triple, isNew: boolean, erase: boolean}} Stroke isNew: whether the stroke starts a new object */

/** Largest radius, relative to the smallest one. */
const MAX_RADIUS_FACTOR = 200;
const INITIAL_RADIUS_VOXELS = 4;
/** Distance between two stamps, relative to the radius. */
const STAMP_DISTANCE = 1 / 6;

export class Brush {
  /** @param {Scene} scene @param {LabelEditor} editor */
  constructor(scene, editor) {
    this.scene = scene;
    this.editor = editor;
    /** In micrometers. */
    this.radius = INITIAL_RADIUS_VOXELS * editor.voxel[2];
    /** Whether it paints a ball across planes instead of a disc in one plane. */
    this.ball = true;
    /** Whether it paints over other objects. */
    this.overwrite = false;
    /** The object that a stroke changes if it starts on the background. @type {"new" | "selected"} */
    this.backgroundTarget = "new";
    /** @type {Stroke | null} */
    this.stroke = null;
  }

  get minRadius() {
    return Math.min(...this.editor.voxel) / 2;
  }

  /** @param {number} factor */
  resize(factor) {
    this.radius = Math.max(this.minRadius, Math.min(MAX_RADIUS_FACTOR * this.minRadius, this.radius * factor));
  }

  /** @param {Triple} position @param {boolean} erase @returns {number | null} the object that a stroke from a voxel would change; 0: a new object, null: no object */
  targetAt(position, erase) {
    const id = this.editor.idAt(position);
    if (id) return id;
    if (!erase && this.backgroundTarget === "new") return 0;
    const { selected } = this.scene.state;
    return this.editor.objects.has(selected) ? selected : null;
  }

  /** @param {SliceView} view @param {Triple} position @param {boolean} erase @returns {boolean} false if there is no object to change */
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
    const brush = { id, erase, axis: this.ball ? null : view.axis, overwrite: this.overwrite };
    const offset = to.map((end, axis) => end - stroke.position[axis]);
    const length = Math.hypot(...offset.map((voxels, axis) => voxels * editor.voxel[axis]));
    const stamps = Math.max(1, Math.ceil(length / Math.max(radius * STAMP_DISTANCE, Math.min(...editor.voxel))));
    for (let stamp = 1; stamp <= stamps; stamp += 1) {
      const center = stroke.position.map((start, axis) => start + (offset[axis] * stamp) / stamps);
      editor.stamp(/** @type {Triple} */ (center), radius, brush);
    }
    stroke.position = to;
  }
}
