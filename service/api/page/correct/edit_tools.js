/** Tools that correct labels in the views: what clicks, drags and keys do. */

import { CannotEdit } from "../volumes/label_edit.js";
import { ACROSS } from "../volumes/slices.js";
import { Brush } from "./brush.js";
import { EditSketches } from "./edit_sketches.js";
import { DRAGGED, stepOfArrow, TOOLS } from "./tool_list.js";

/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/label_shapes.js").Point} Point */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {import("./tool_list.js").ToolName} ToolName */

const CLICK_PIXELS = 4;
const POINT_PIXELS = 2;

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
    this.brush = new Brush(viewer.scene, editor);
    /** The object that a merge began with. */
    this.first = 0;
    /** Where a split began. @type {{id: number, at: Triple} | null} */
    this.seed = null;
    /** What is drawn: a line or an outline in a view. @type {{view: SliceView, points: Point[]} | null} */
    this.line = null;
    /** Where the button was pressed, and whether the pointer has moved since: an outline ends where it began. */
    this.began = [0, 0];
    this.dragged = false;
    /** Where the pointer is. @type {{view: SliceView, x: number, y: number} | null} */
    this.pointer = null;
    /** The newest correction, where nothing goes on from it. @type {unknown} */
    this.closed = editor.done.at(-1);
    this.sketches = new EditSketches(this, signal);
    for (const view of viewer.views) this.#listen(view, signal);
    viewer.addEventListener("pick", (event) => this.#onPick(/** @type {CustomEvent<number>} */ (event).detail), {
      signal,
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
    if (this.brush.stroke) this.#endStroke();
    this.first = 0;
    this.seed = null;
    this.line = null;
    this.closed = this.editor.done.at(-1);
    this.viewer.draw();
  }

  /** @param {number} factor */
  resize(factor) {
    this.brush.resize(factor);
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
    const { selected } = this.viewer.scene.state;
    if (!selected) this.told.say("Choose an object first.");
    else this.#delete(selected);
  }

  /** @param {number} id */
  #delete(id) {
    this.viewer.scene.set({ selected: 0 });
    this.do(() => this.editor.remove(id), `Object ${id} is deleted.`);
  }

  /** Begin a new object with the next outline or stroke. */
  startNew() {
    this.cancel();
    this.viewer.select(0);
    this.brush.ground = "new";
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
    if (!this.editor.objects.has(scene.state.selected)) scene.set({ selected: 0 });
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
    const at = /** @type {Triple} */ ([...this.viewer.scene.state.at]);
    this.seed = null;
    if (id === 0) return this.told.say("Click into an object.");
    if (sketch?.kind === "split" && sketch.ids.includes(id))
      return this.do(() => editor.split(sketch.ids, [...sketch.seeds, at]), "One part more.");
    if (seed?.id === id) return this.do(() => editor.split([id], [seed.at, at]), "Split. Further clicks add parts.");
    this.seed = { id, at };
    return this.told.say("Click into the other part of the same object.");
  }

  /** @param {SliceView} view @param {AbortSignal} signal */
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
        this.sketches.draw();
      },
      options,
    );
    stage.addEventListener("dblclick", (event) => DRAGGED.has(this.tool) && event.stopImmediatePropagation(), options);
    // A browser that drags what is selected would end the stroke.
    stage.addEventListener("dragstart", (event) => event.preventDefault(), options);
    stage.addEventListener("keydown", (event) => this.#onKey(view, event), options);
  }

  /** @param {SliceView} view @param {PointerEvent} event */
  #begin(view, event) {
    if (!DRAGGED.has(this.tool) || event.button !== 0) return;
    event.stopImmediatePropagation();
    if (this.brush.stroke !== null) return;
    view.stage.setPointerCapture(event.pointerId);
    const [x, y] = placeOf(view, event);
    const point = view.pointAt(x, y);
    if (this.tool === "cut") this.line = { view, points: [point, point] };
    else if (this.tool === "add") {
      if (this.line?.view !== view) this.line = { view, points: [] };
      this.line.points.push(point);
    } else this.#startStroke(view, view.voxelAt(x, y));
    this.began = [event.clientX, event.clientY];
    this.dragged = false;
  }

  /** @param {SliceView} view @param {PointerEvent} event */
  #move(view, event) {
    const [x, y] = placeOf(view, event);
    this.pointer = { view, x, y };
    if (!DRAGGED.has(this.tool)) return;
    const held = view.stage.hasPointerCapture(event.pointerId);
    if (held) {
      event.stopImmediatePropagation();
      this.dragged ||= this.#hasMoved(event, CLICK_PIXELS);
      if (this.brush.stroke) this.#goOn(view.voxelAt(x, y));
      else if (this.tool === "cut" && this.line) this.line.points[1] = view.pointAt(x, y);
      else if (this.tool === "add" && this.#hasMoved(event, POINT_PIXELS)) this.line?.points.push(view.pointAt(x, y));
    }
    this.sketches.draw();
  }

  /** @param {MouseEvent} event @param {number} pixels */
  #hasMoved(event, pixels) {
    const [x, y] = this.began;
    return Math.hypot(event.clientX - x, event.clientY - y) > pixels;
  }

  /** @param {SliceView} view @param {PointerEvent} event */
  #end(view, event) {
    if (!DRAGGED.has(this.tool) || !view.stage.hasPointerCapture(event.pointerId)) return;
    event.stopImmediatePropagation();
    view.stage.releasePointerCapture(event.pointerId);
    if (this.brush.stroke) this.#endStroke();
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
    const id = editor.crossed(axis, viewer.scene.state.at[axis], from, to);
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
      () => editor.outline(axis, viewer.scene.state.at[axis], line.points, drawing),
      "Go to another plane of this view and draw again, or press N for the next object.",
    );
    const drawn = this.sketch;
    if (drawn?.kind === "add") viewer.select(drawn.id);
  }

  /** @param {SliceView} view @param {Triple} at */
  #startStroke(view, at) {
    const erase = this.tool === "erase";
    if (this.brush.start(view, at, erase)) this.viewer.draw();
    else
      this.told.say(
        erase ? "Begin on the object to take from." : "Choose the object that is to grow: begin the stroke on it.",
      );
  }

  /** @param {Triple} to */
  #goOn(to) {
    this.brush.paintTo(to);
    this.viewer.draw();
  }

  #endStroke() {
    const { editor, brush, viewer } = this;
    const { id, fresh } = brush.stroke ?? { id: 0, fresh: false };
    brush.stroke = null;
    const kind = this.tool === "erase" ? "erase" : "paint";
    const grown = fresh ? "new. Begin on it to go on with it" : "larger";
    this.do(() => editor.commit(kind), `Object ${id} is ${kind === "erase" ? "smaller" : grown}.`);
    if (!editor.objects.has(viewer.scene.state.selected)) viewer.select(0);
  }

  /** Let keys do what the pointer does. @param {SliceView} view @param {KeyboardEvent} event */
  #onKey(view, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? stepOfArrow(event.key, view.axis) : undefined;
    if (step) {
      this.viewer.move(...step);
      this.viewer.draw();
    } else if (event.key === "Enter") this.#act(view);
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  /** Do at the crosshair what a click does there, or a press of the button. @param {SliceView} view */
  #act(view) {
    const { viewer, editor } = this;
    const [down, right] = ACROSS[view.axis];
    const { at } = viewer.scene.state;
    /** @type {Point} */
    const point = [at[down] + 0.5, at[right] + 0.5];
    if (!DRAGGED.has(this.tool)) {
      viewer.choose(editor.idAt(at));
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
}

/** @param {SliceView} view @param {MouseEvent} event @returns {[number, number]} x and y of its stage */
function placeOf({ stage }, event) {
  const { left, top } = stage.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
}
