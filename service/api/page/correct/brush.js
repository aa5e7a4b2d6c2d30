/** The brush and the eraser: what a stroke adds to or takes from, and the voxels that it paints. */

/** @typedef {import("../viewer/scene.js").Scene} Scene */
/** @typedef {import("../viewer/scene.js").Triple} Triple */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {{view: SliceView, id: number, at: Triple, fresh: boolean, erase: boolean}} Stroke fresh: its object is new */

const LARGEST_FACTOR = 200;
const FIRST_VOXELS = 4;
/** Between two stamps, as a share of the radius. */
const STAMP_DISTANCE = 1 / 6;

export class Brush {
  /** @param {Scene} scene @param {LabelEditor} editor */
  constructor(scene, editor) {
    this.scene = scene;
    this.editor = editor;
    /** In micrometres. */
    this.radius = FIRST_VOXELS * editor.voxel[2];
    /** Whether it paints in the planes above and below, too. */
    this.ball = true;
    /** Whether it paints over other objects. */
    this.over = false;
    /** What a stroke adds to that begins on empty ground. @type {"new" | "chosen"} */
    this.ground = "new";
    /** @type {Stroke | null} */
    this.stroke = null;
  }

  /** The smallest radius. */
  get least() {
    return Math.min(...this.editor.voxel) / 2;
  }

  /** @param {number} factor */
  resize(factor) {
    this.radius = Math.max(this.least, Math.min(LARGEST_FACTOR * this.least, this.radius * factor));
  }

  /** @param {Triple} at @param {boolean} erase @returns {number | null} the object that a stroke from there adds to or takes from; 0: a new one, null: there is none */
  targetAt(at, erase) {
    const here = this.editor.idAt(at);
    if (here) return here;
    if (!erase && this.ground === "new") return 0;
    const { selected } = this.scene.state;
    return this.editor.objects.has(selected) ? selected : null;
  }

  /** @param {SliceView} view @param {Triple} at @param {boolean} erase @returns {boolean} whether there is an object that the stroke is for */
  start(view, at, erase) {
    const target = this.targetAt(at, erase);
    if (target === null) return false;
    const id = target || this.editor.startObject();
    this.scene.set({ selected: id });
    this.stroke = { view, id, at, fresh: target === 0, erase };
    this.paintTo(at);
    return true;
  }

  /** Paint from where the stroke is to another voxel. @param {Triple} to */
  paintTo(to) {
    const { stroke, editor, radius } = this;
    if (stroke === null) return;
    const { id, erase, view } = stroke;
    const brush = { id, erase, axis: this.ball ? null : view.axis, over: this.over };
    const way = to.map((place, axis) => place - stroke.at[axis]);
    const length = Math.hypot(...way.map((part, axis) => part * editor.voxel[axis]));
    const stamps = Math.max(1, Math.ceil(length / Math.max(radius * STAMP_DISTANCE, Math.min(...editor.voxel))));
    for (let stamp = 1; stamp <= stamps; stamp += 1) {
      const centre = stroke.at.map((place, axis) => place + (way[axis] * stamp) / stamps);
      editor.stamp(/** @type {Triple} */ (centre), radius, brush);
    }
    stroke.at = to;
  }
}
