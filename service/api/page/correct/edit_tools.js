/** Tools that correct labels in the views: what clicks, drags and keys do, and what is drawn over the slices meanwhile. */

import { element } from "../core/elements.js";
import { clamp } from "../viewer/slice_view.js";
import { CannotEdit } from "../volumes/label_edit.js";
import { ACROSS, cssColour } from "../volumes/slices.js";

/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/label_shapes.js").Point} Point */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../viewer/slice_view.js").View} View */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {"look" | "merge" | "split" | "cut" | "delete" | "add" | "paint" | "erase"} ToolName */

/** @type {{name: ToolName, text: string, key: string, hint: string}[]} */
export const TOOLS = [
  { name: "look", text: "Look", key: "v", hint: "Click an object to choose it, drag to move. Nothing is changed." },
  { name: "merge", text: "Merge", key: "m", hint: "Click one object, then the other: they become one." },
  {
    name: "split",
    text: "Split",
    key: "s",
    hint: "Click once into each part of one object. Further clicks into it make further parts.",
  },
  {
    name: "cut",
    text: "Cut",
    key: "x",
    hint: "Draw a line across an object: it is cut through all planes of this view.",
  },
  { name: "delete", text: "Delete", key: "d", hint: "Click what is not an object: it is deleted." },
  {
    name: "add",
    text: "Outline",
    key: "a",
    hint: "Draw around a missing object in some planes of one view; planes between them are filled. N begins the next object.",
  },
  {
    name: "paint",
    text: "Brush",
    key: "b",
    hint: "Begin on an object to enlarge it. On empty ground a new object begins, or the chosen one grows, as set below.",
  },
  { name: "erase", text: "Eraser", key: "e", hint: "Begin on an object to take from it; others stay as they are." },
];

const DRAGGED = new Set(["cut", "add", "paint", "erase"]);
const CLICK_PIXELS = 4;
const POINT_PIXELS = 2;
const INK = "#ffd166";

/** What `EditTools` tells: `changed` after a correction, `say` a hint or what was wrong. */
/** @typedef {{changed: (edit: import("../volumes/label_edit.js").Edit) => void, say: (text: string) => void}} Told */

export class EditTools extends EventTarget {
  /** @param {Viewer} viewer @param {LabelEditor} editor @param {Told} told @param {AbortSignal} signal ends the tools */
  constructor(viewer, editor, told, signal) {
    super();
    this.viewer = viewer;
    this.editor = editor;
    this.told = told;
    /** @type {ToolName} */
    this.tool = "look";
    /** Of the brush, in micrometres. */
    this.radius = 4 * editor.voxel[2];
    this.ball = true;
    this.over = false;
    /** What a stroke of the brush adds to that begins on empty ground. @type {"new" | "chosen"} */
    this.ground = "new";
    /** The object that a merge began with. */
    this.first = 0;
    /** Where a split began. @type {{id: number, at: Triple} | null} */
    this.seed = null;
    /** What is drawn: a line or an outline in a view. @type {{view: View, points: Point[]} | null} */
    this.line = null;
    /** A stroke of the brush under way, and whether its object is new. @type {{view: View, id: number, at: Triple, fresh: boolean} | null} */
    this.stroke = null;
    /** Where the button was pressed, and whether the pointer has moved since: an outline ends where it began. */
    this.began = [0, 0];
    this.dragged = false;
    /** Where the pointer is. @type {{view: View, x: number, y: number} | null} */
    this.pointer = null;
    /** The newest correction, where nothing goes on from it. @type {unknown} */
    this.closed = editor.done.at(-1);
    this.sketches = viewer.views.map((view) => {
      const canvas = element("canvas", { class: "sketch", "aria-hidden": "true" });
      view.stage.append(canvas);
      this.#listen(view, signal);
      return canvas;
    });
    viewer.addEventListener("pick", (event) => this.#onPick(/** @type {CustomEvent<number>} */ (event).detail), {
      signal,
    });
    viewer.addEventListener("draw", () => this.#draw(), { signal });
    signal.addEventListener("abort", () => {
      for (const canvas of this.sketches) canvas.remove();
    });
  }

  /** @param {ToolName} name */
  use(name) {
    this.tool = name;
    this.cancel();
    for (const { stage } of this.viewer.views) stage.classList.toggle("drawing", DRAGGED.has(name));
    this.told.say(TOOLS.find((tool) => tool.name === name)?.hint ?? "");
    this.dispatchEvent(new Event("tool"));
  }

  /** Give up what was begun; the next click begins anew. */
  cancel() {
    if (this.stroke) this.#endStroke();
    this.first = 0;
    this.seed = null;
    this.line = null;
    this.closed = this.editor.done.at(-1);
    this.viewer.draw();
  }

  /** @param {number} factor */
  resize(factor) {
    const least = Math.min(...this.editor.voxel) / 2;
    this.radius = Math.max(least, Math.min(200 * least, this.radius * factor));
    this.dispatchEvent(new Event("tool"));
    this.viewer.draw();
  }

  /** Have the editor do something, and tell what came of it. @param {() => import("../volumes/label_edit.js").Edit | null} work @param {string} [said] */
  do(work, said = "") {
    const began = performance.now();
    try {
      const edit = work();
      if (edit === null) this.told.say("Nothing changed: other objects keep their voxels.");
      else {
        this.told.say(said);
        this.told.changed(edit);
      }
    } catch (error) {
      if (!(error instanceof CannotEdit)) throw error;
      this.told.say(error.message);
    }
    this.viewer.draw();
    performance.measure("edit", { start: began });
  }

  /** Delete the chosen object. */
  deleteSelected() {
    const { selected } = this.viewer.scene;
    if (!selected) this.told.say("Choose an object first.");
    else this.#delete(selected);
  }

  /** @param {number} id */
  #delete(id) {
    this.viewer.scene.selected = 0;
    this.do(() => this.editor.remove(id), `Object ${id} is deleted.`);
  }

  /** Begin a new object with the next outline or stroke. */
  startNew() {
    this.cancel();
    this.viewer.select(0);
    this.ground = "new";
    this.dispatchEvent(new Event("tool"));
    this.told.say("The next outline or stroke begins a new object.");
  }

  /** Take back the newest correction, or what was begun. */
  undo() {
    const begun = this.first || this.seed || this.line;
    this.cancel();
    if (begun) return null;
    const edit = this.editor.undo();
    this.#afterHistory();
    return edit;
  }

  redo() {
    this.cancel();
    const edit = this.editor.redo();
    this.#afterHistory();
    return edit;
  }

  /** What was drawn or clicked goes on from where the history is. */
  #afterHistory() {
    this.closed = undefined;
    const { scene } = this.viewer;
    if (!this.editor.objects.has(scene.selected)) scene.selected = 0;
    this.viewer.draw();
  }

  /** What further clicks go on with. */
  get sketch() {
    return this.closed !== undefined && this.editor.done.at(-1) === this.closed ? null : this.editor.sketch;
  }

  /** @param {number} id that was clicked, 0: none */
  #onPick(id) {
    if (this.tool === "merge") this.#merge(id);
    else if (this.tool === "split") this.#split(id);
    else if (this.tool === "delete" && id) this.#delete(id);
  }

  /** @param {number} id */
  #merge(id) {
    const { first } = this;
    this.first = 0;
    if (id === 0) return this.told.say("Click an object.");
    if (first === 0 || !this.editor.objects.has(first)) {
      this.first = id;
      return this.told.say(`Click the object that belongs to object ${id}.`);
    }
    this.do(() => this.editor.merge(first, id), `Objects ${first} and ${id} are one.`);
    return this.viewer.select(this.editor.objects.has(id) ? 0 : first);
  }

  /** @param {number} id */
  #split(id) {
    const { editor, seed, sketch } = this;
    const at = /** @type {Triple} */ ([...this.viewer.scene.at]);
    this.seed = null;
    if (id === 0) return this.told.say("Click into an object.");
    if (sketch?.kind === "split" && sketch.ids.includes(id))
      return this.do(() => editor.split(sketch.ids, [...sketch.seeds, at]), "One part more.");
    if (seed?.id === id) return this.do(() => editor.split([id], [seed.at, at]), "Split. Further clicks add parts.");
    this.seed = { id, at };
    return this.told.say("Click into the other part of the same object.");
  }

  /** @param {View} view @param {AbortSignal} signal */
  #listen(view, signal) {
    const { stage } = view;
    const options = { signal, capture: true };
    stage.addEventListener("pointerdown", (event) => this.#begin(view, event), options);
    stage.addEventListener("pointermove", (event) => this.#move(view, event), options);
    stage.addEventListener("pointerup", (event) => this.#end(view, event), options);
    stage.addEventListener("pointercancel", () => this.cancel(), options);
    stage.addEventListener(
      "pointerleave",
      () => {
        this.pointer = null;
        this.#draw();
      },
      options,
    );
    stage.addEventListener("dblclick", (event) => DRAGGED.has(this.tool) && event.stopImmediatePropagation(), options);
    // A browser that drags what is selected would end the stroke.
    stage.addEventListener("dragstart", (event) => event.preventDefault(), options);
    stage.addEventListener("keydown", (event) => this.#onKey(view, event), options);
  }

  /** @param {View} view @param {MouseEvent} event @returns {Point} voxels down and to the right */
  #pointAt(view, event) {
    const bounds = view.stage.getBoundingClientRect();
    return this.#toPoint(view, event.clientX - bounds.left, event.clientY - bounds.top);
  }

  /** @param {View} view @param {number} x @param {number} y of its stage @returns {Point} voxels down and to the right */
  #toPoint(view, x, y) {
    const place = view.placement();
    return [(y - place.top) / place.scaleY, (x - place.left) / place.scaleX];
  }

  /** @param {View} view @param {Point} point @returns {Triple} the voxel there, in the plane that is shown */
  #voxelAt(view, point) {
    const [down, right] = ACROSS[view.axis];
    const { shape } = this.editor.labels;
    const at = /** @type {Triple} */ ([...this.viewer.scene.at]);
    at[down] = clamp(Math.floor(point[0]), shape[down]);
    at[right] = clamp(Math.floor(point[1]), shape[right]);
    return at;
  }

  /** @param {View} view @param {PointerEvent} event */
  #begin(view, event) {
    if (!DRAGGED.has(this.tool) || event.button !== 0) return;
    event.stopImmediatePropagation();
    if (this.stroke !== null) return;
    view.stage.setPointerCapture(event.pointerId);
    const point = this.#pointAt(view, event);
    if (this.tool === "cut") this.line = { view, points: [point, point] };
    else if (this.tool === "add") {
      if (this.line?.view !== view) this.line = { view, points: [] };
      this.line.points.push(point);
    } else this.#startStroke(view, this.#voxelAt(view, point));
    this.began = [event.clientX, event.clientY];
    this.dragged = false;
  }

  /** @param {View} view @param {PointerEvent} event */
  #move(view, event) {
    const bounds = view.stage.getBoundingClientRect();
    this.pointer = { view, x: event.clientX - bounds.left, y: event.clientY - bounds.top };
    if (!DRAGGED.has(this.tool)) return;
    const held = view.stage.hasPointerCapture(event.pointerId);
    if (held) {
      event.stopImmediatePropagation();
      this.dragged ||= this.#hasMoved(event, CLICK_PIXELS);
      const point = this.#pointAt(view, event);
      if (this.stroke) this.#goOn(this.#voxelAt(view, point));
      else if (this.tool === "cut" && this.line) this.line.points[1] = point;
      else if (this.tool === "add" && this.#hasMoved(event, POINT_PIXELS)) this.line?.points.push(point);
    }
    this.#draw();
  }

  /** @param {MouseEvent} event @param {number} pixels */
  #hasMoved(event, pixels) {
    const [x, y] = this.began;
    return Math.hypot(event.clientX - x, event.clientY - y) > pixels;
  }

  /** @param {View} view @param {PointerEvent} event */
  #end(view, event) {
    if (!DRAGGED.has(this.tool) || !view.stage.hasPointerCapture(event.pointerId)) return;
    event.stopImmediatePropagation();
    view.stage.releasePointerCapture(event.pointerId);
    if (this.stroke) this.#endStroke();
    else if (this.tool === "cut" && this.dragged) this.#cut();
    else if (this.tool === "add" && this.dragged) this.closeOutline();
    else this.told.say("Drag, or click corner after corner and press C to close the outline.");
    this.viewer.draw();
  }

  #cut() {
    const { line, editor, viewer } = this;
    this.line = null;
    if (line === null) return;
    const { axis } = line.view;
    const [from, to] = line.points;
    const id = editor.crossed(axis, viewer.scene.at[axis], from, to);
    if (id === 0) this.told.say("The line crosses no object.");
    else this.do(() => editor.cut(id, axis, from, to), `Object ${id} is cut.`);
  }

  /** Make an object of the outline that was drawn. */
  closeOutline() {
    const { line, sketch, editor, viewer } = this;
    this.line = null;
    if (this.tool !== "add" || line === null) return;
    const { axis } = line.view;
    const drawing = sketch?.kind === "add" ? sketch : null;
    this.do(
      () => editor.outline(axis, viewer.scene.at[axis], line.points, drawing),
      "Go to another plane of this view and draw again, or press N for the next object.",
    );
    const drawn = this.sketch;
    if (drawn?.kind === "add") viewer.select(drawn.id);
  }

  /** @param {View} view @param {Triple} at */
  #startStroke(view, at) {
    const { editor, viewer } = this;
    const target = this.#targetAt(at);
    if (target === null) {
      const erasing = this.tool === "erase";
      return this.told.say(
        erasing ? "Begin on the object to take from." : "Choose the object that is to grow: begin the stroke on it.",
      );
    }
    const id = target || editor.startObject();
    viewer.scene.selected = id;
    this.stroke = { view, id, at, fresh: target === 0 };
    return this.#goOn(at);
  }

  /** The object that a stroke adds to, or takes from, if it begins there. @param {Triple} at @returns {number | null} 0: a new one, null: there is none */
  #targetAt(at) {
    const { editor, viewer, tool, ground } = this;
    const here = editor.idAt(at);
    if (here) return here;
    if (tool === "paint" && ground === "new") return 0;
    const { selected } = viewer.scene;
    return editor.objects.has(selected) ? selected : null;
  }

  /** Paint from where the stroke is to another voxel. @param {Triple} to */
  #goOn(to) {
    const { stroke, editor, radius } = this;
    if (stroke === null) return;
    const brush = {
      id: stroke.id,
      erase: this.tool === "erase",
      axis: this.ball ? null : stroke.view.axis,
      over: this.over,
    };
    const way = to.map((place, axis) => place - stroke.at[axis]);
    const length = Math.hypot(...way.map((part, axis) => part * editor.voxel[axis]));
    const stamps = Math.max(1, Math.ceil(length / Math.max(radius / 6, Math.min(...editor.voxel))));
    for (let stamp = 1; stamp <= stamps; stamp += 1) {
      const centre = stroke.at.map((place, axis) => place + (way[axis] * stamp) / stamps);
      editor.stamp(/** @type {Triple} */ (centre), radius, brush);
    }
    stroke.at = to;
    this.viewer.draw();
  }

  #endStroke() {
    const { id, fresh } = this.stroke ?? { id: 0, fresh: false };
    this.stroke = null;
    const kind = this.tool === "erase" ? "erase" : "paint";
    const grown = fresh ? "new. Begin on it to go on with it" : "larger";
    this.do(() => this.editor.commit(kind), `Object ${id} is ${kind === "erase" ? "smaller" : grown}.`);
    if (!this.editor.objects.has(this.viewer.scene.selected)) this.viewer.select(0);
  }

  /** Let keys do what the pointer does. @param {View} view @param {KeyboardEvent} event */
  #onKey(view, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [down, right] = ACROSS[view.axis];
    const steps = /** @type {Record<string, [0 | 1 | 2, number]>} */ ({
      ArrowUp: [down, -1],
      ArrowDown: [down, 1],
      ArrowLeft: [right, -1],
      ArrowRight: [right, 1],
    });
    const step = event.shiftKey ? steps[event.key] : undefined;
    if (step) {
      this.viewer.move(...step);
      this.viewer.draw();
    } else if (event.key === "Enter") this.#act(view);
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  /** Do at the crosshair what a click does there, or a press of the button. @param {View} view */
  #act(view) {
    const { viewer, editor } = this;
    const [down, right] = ACROSS[view.axis];
    const { at } = viewer.scene;
    /** @type {Point} */
    const point = [at[down] + 0.5, at[right] + 0.5];
    if (!DRAGGED.has(this.tool)) {
      const id = editor.idAt(at);
      viewer.select(id);
      viewer.dispatchEvent(new CustomEvent("pick", { detail: id }));
    } else if (this.tool === "add") {
      if (this.line?.view !== view) this.line = { view, points: [] };
      this.line.points.push(point);
      this.told.say("Corner set. C closes the outline.");
    } else if (this.tool === "cut") {
      const from = this.line?.view === view ? this.line.points[0] : null;
      this.line = { view, points: [from ?? point, point] };
      if (from) this.#cut();
      else this.told.say("Enter sets the other end of the line.");
    } else {
      this.#startStroke(view, /** @type {Triple} */ ([...at]));
      this.#endStroke();
    }
    viewer.draw();
  }

  #draw() {
    for (const [number, view] of this.viewer.views.entries()) {
      const canvas = this.sketches[number];
      canvas.width = view.over.width;
      canvas.height = view.over.height;
      const context = canvas.getContext("2d");
      if (context === null) continue;
      const ratio = view.ratio ?? 1;
      context.scale(ratio, ratio);
      context.strokeStyle = context.fillStyle = INK;
      context.lineWidth = 1.5;
      this.#drawSeeds(view, context);
      this.#drawLines(view, context);
      this.#drawBrush(view, context);
    }
  }

  /** @param {View} view @param {CanvasRenderingContext2D} context */
  #drawSeeds(view, context) {
    const { sketch, seed } = this;
    const seeds = [
      ...(seed ? [seed.at] : []),
      ...(sketch?.kind === "split" && this.tool === "split" ? sketch.seeds : []),
    ];
    const place = view.placement();
    const [down, right] = ACROSS[view.axis];
    for (const at of seeds) {
      const near = Math.abs(at[view.axis] - this.viewer.scene.at[view.axis]) < 1;
      context.globalAlpha = near ? 1 : 0.35;
      context.beginPath();
      context.arc(
        place.left + (at[right] + 0.5) * place.scaleX,
        place.top + (at[down] + 0.5) * place.scaleY,
        4,
        0,
        2 * Math.PI,
      );
      context.fill();
    }
    context.globalAlpha = 1;
  }

  /** @param {View} view @param {CanvasRenderingContext2D} context */
  #drawLines(view, context) {
    const { line, sketch } = this;
    const here = this.viewer.scene.at[view.axis];
    const earlier = sketch?.kind === "add" && this.tool === "add" && sketch.axis === view.axis ? sketch.outlines : [];
    const closed = earlier.filter(({ at }) => at === here).map(({ points }) => ({ points, whole: true }));
    const open = line?.view === view ? [{ points: line.points, whole: false }] : [];
    const place = view.placement();
    for (const { points, whole } of [...closed, ...open]) {
      context.beginPath();
      for (const [v, u] of points) context.lineTo(place.left + u * place.scaleX, place.top + v * place.scaleY);
      if (whole) context.closePath();
      context.stroke();
    }
  }

  /** @param {View} view @param {CanvasRenderingContext2D} context */
  #drawBrush(view, context) {
    const { pointer } = this;
    if (pointer?.view !== view || (this.tool !== "paint" && this.tool !== "erase")) return;
    const at = this.#voxelAt(view, this.#toPoint(view, pointer.x, pointer.y));
    const target = this.stroke ? this.stroke.id : this.#targetAt(at);
    const radius = Math.max(2, this.radius * this.viewer.scene.scale);
    context.strokeStyle = target ? cssColour(target) : INK;
    context.setLineDash(this.tool === "erase" ? [4, 3] : []);
    context.beginPath();
    context.arc(pointer.x, pointer.y, radius, 0, 2 * Math.PI);
    context.stroke();
    context.setLineDash([]);
    const words = target === null ? "no object chosen" : target === 0 ? "new object" : `object ${target}`;
    context.font = "12px system-ui, sans-serif";
    context.strokeStyle = "#000c";
    context.lineWidth = 3;
    context.strokeText(words, pointer.x + radius + 5, pointer.y + 4);
    context.fillText(words, pointer.x + radius + 5, pointer.y + 4);
  }
}
