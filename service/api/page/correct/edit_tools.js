/** Tools that correct labels. They handle clicks, drags and keys in the views. */

import { formatCount } from "../core/format.js";
import { BoxDrag } from "../volumes/annotated_region.js";
import { EditError } from "../volumes/label_edit.js";
import { IN_PLANE_AXES } from "../volumes/slices.js";
import { Brush } from "./brush.js";
import { EditSketches } from "./edit_sketches.js";
import { ACCEPT_TOOL, BOX_TOOL, DRAG_TOOLS, getArrowStep, TOOLS } from "./tool_list.js";

/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/label_shapes.js").Point} Point */
/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {import("./tool_list.js").ToolName} ToolName */

/** Largest movement of the pointer that still counts as a click. */
const MAX_CLICK_MOVEMENT_PIXELS = 4;
/** Largest distance between the pointer and an edge of the box that a drag moves. */
const MAX_EDGE_DISTANCE_PIXELS = 7;
/** Minimum movement of the pointer after which a point is added to an outline. */
const MIN_OUTLINE_MOVEMENT_PIXELS = 2;

/** @typedef {{onedit: (edit: import("../volumes/label_edit.js").Edit) => void, showHint: (text: string) => void}} Callbacks onedit: called after each correction */

/** The correction tools. They dispatch `tool` when the active tool or its options have changed, and `view` when the user has moved to another view. */
export class EditTools extends EventTarget {
  /**
   * @param {Viewer} viewer @param {LabelEditor} editor @param {import("../core/store.js").Store<import("../volumes/annotated_region.js").Region>} region in which every object is labeled
   * @param {Callbacks} callbacks @param {AbortSignal} signal removes the tools
   */
  constructor(viewer, editor, region, callbacks, signal) {
    super();
    this.viewer = viewer;
    this.editor = editor;
    this.region = region;
    /** The view that was used last. @type {SliceView} */
    this.currentView = viewer.views[0];
    /** Objects that a model suggests. @type {import("./suggestions.js").Suggestions | null} */
    this.suggestions = null;
    /** @type {BoxDrag | null} */
    this.boxDrag = null;
    this.callbacks = callbacks;
    /** @type {ToolName} */
    this.tool = "select";
    this.brush = new Brush(viewer.scene, editor);
    /** Id of the first object of a merge, 0 for none. */
    this.mergeId = 0;
    /** The first seed of a split. @type {{id: number, position: Triple} | null} */
    this.seed = null;
    /** The line or outline that is being drawn. @type {{view: SliceView, points: Point[]} | null} */
    this.line = null;
    /** Screen position at which the pointer button was pressed. */
    this.pressPosition = [0, 0];
    /** Whether the pointer has moved since the button was pressed. This stays true if the pointer returns to the start, as in an outline. */
    this.hasDragged = false;
    /** @type {{view: SliceView, x: number, y: number} | null} */
    this.pointer = null;
    /** The correction that was the newest when a tool was activated or an unfinished correction was canceled. The next click must not continue this correction. @type {unknown} */
    this.finishedEdit = editor.edits.at(-1);
    this.sketches = new EditSketches(this, signal);
    for (const view of viewer.views) this.#addEventListeners(view, signal);
    region.subscribe(() => this.sketches.draw(), signal);
    viewer.addEventListener("pick", (event) => this.#onPick(/** @type {CustomEvent<number>} */ (event).detail), {
      signal,
    });
  }

  /** Activate a tool. @param {ToolName} name */
  activate(name) {
    this.tool = name;
    this.cancel();
    for (const { stage } of this.viewer.views) stage.classList.toggle("drawing", DRAG_TOOLS.has(name));
    this.callbacks.showHint([...TOOLS, BOX_TOOL, ACCEPT_TOOL].find((tool) => tool.name === name)?.hint ?? "");
    this.dispatchEvent(new Event("tool"));
  }

  /** The plane that is displayed in the view that was used last. @returns {import("../volumes/annotated_region.js").MarkedPlane} */
  get currentPlane() {
    const { axis } = this.currentView;
    return { axis, at: this.viewer.scene.state.position[axis] };
  }

  /** Cancel an unfinished merge, split or outline. */
  cancel() {
    if (this.brush.stroke) this.#endStroke();
    this.mergeId = 0;
    this.seed = null;
    this.line = null;
    this.boxDrag = null;
    this.finishedEdit = this.editor.edits.at(-1);
    this.viewer.draw();
  }

  /** @param {number} factor */
  resizeBrush(factor) {
    this.brush.resize(factor);
    this.dispatchEvent(new Event("tool"));
    this.viewer.draw();
  }

  /** Make a correction, and show a hint. @param {() => import("../volumes/label_edit.js").Edit | null} makeEdit @param {string} [hint] shown after success */
  applyEdit(makeEdit, hint = "") {
    const start = performance.now();
    try {
      const edit = makeEdit();
      if (edit === null) this.callbacks.showHint("Nothing changed, because other objects are not overwritten.");
      else {
        this.callbacks.showHint(hint);
        this.callbacks.onedit(edit);
      }
    } catch (error) {
      if (!(error instanceof EditError)) throw error;
      this.callbacks.showHint(error.message);
    }
    this.viewer.draw();
    performance.measure("edit", { start });
  }

  /** Delete the selected object. */
  deleteSelectedObject() {
    const { selectedId } = this.viewer.scene.state;
    if (!selectedId) this.callbacks.showHint("Select an object first.");
    else this.deleteObjects([selectedId]);
  }

  /** Fill the planes between the labeled planes of the selected object. */
  fillSelectedObject() {
    const { selectedId } = this.viewer.scene.state;
    if (selectedId) this.fillBetweenPlanes([selectedId]);
    else this.callbacks.showHint("Select an object first.");
  }

  /** Fill the planes between the labeled planes of objects. @param {number[]} ids */
  fillBetweenPlanes(ids) {
    this.cancel();
    const { axis } = this.currentView;
    this.applyEdit(() => this.editor.fillBetweenPlanes(ids, axis), "Filled the planes between the labeled planes.");
  }

  /** Delete objects. @param {number[]} ids */
  deleteObjects(ids) {
    this.cancel();
    this.viewer.scene.set({ selectedId: 0 });
    const text = ids.length === 1 ? `Deleted object ${ids[0]}.` : `Deleted ${formatCount(ids.length, "object")}.`;
    this.applyEdit(() => this.editor.delete(...ids), text);
  }

  /** Start a new object with the next outline or stroke. */
  startNewObject() {
    this.cancel();
    this.viewer.select(0);
    this.brush.backgroundTarget = "new";
    this.dispatchEvent(new Event("tool"));
    this.callbacks.showHint("The next outline or stroke creates a new object.");
  }

  /** Cancel an unfinished correction. If there is none, undo the newest correction. */
  undo() {
    const isUnfinished = this.mergeId || this.seed || this.line;
    this.cancel();
    if (isUnfinished) return null;
    const edit = this.editor.undo();
    this.#finishHistoryStep();
    return edit;
  }

  redo() {
    this.cancel();
    const edit = this.editor.redo();
    this.#finishHistoryStep();
    return edit;
  }

  /** Update the views after an undo or redo. The next click may continue the correction that is now the newest. */
  #finishHistoryStep() {
    this.finishedEdit = undefined;
    const { scene } = this.viewer;
    if (!this.editor.objects.has(scene.state.selectedId)) scene.set({ selectedId: 0 });
    this.viewer.draw();
  }

  /** The sketch that the next click or outline continues, or null if there is none. */
  get sketch() {
    const isFinished = this.finishedEdit !== undefined && this.editor.edits.at(-1) === this.finishedEdit;
    return isFinished ? null : this.editor.sketch;
  }

  /** Show objects that a model suggests. @param {import("./suggestions.js").Suggestions} suggestions */
  showSuggestions(suggestions) {
    this.suggestions = suggestions;
    this.activate("accept");
  }

  /** Accept suggested objects. @param {number[]} ids of suggestions */
  accept(ids) {
    const { suggestions, editor } = this;
    if (suggestions === null || ids.length === 0) return;
    this.applyEdit(() => suggestions.accept(ids, editor), `Accepted ${formatCount(ids.length, "object")}.`);
  }

  /** Accept the suggested object at the crosshair. */
  #acceptAtCrosshair() {
    const id = this.suggestions?.idAt(this.viewer.scene.state.position, this.editor);
    if (id) this.accept([id]);
    else this.callbacks.showHint("There is no suggested object here. Click inside a gray outline.");
  }

  /** @param {number} id of the clicked object, 0 for the background */
  #onPick(id) {
    if (this.tool === "accept") this.#acceptAtCrosshair();
    else if (this.tool === "merge") this.#merge(id);
    else if (this.tool === "split") this.#split(id);
    else if (this.tool === "delete" && id) this.deleteObjects([id]);
  }

  /** @param {number} id */
  #merge(id) {
    const { mergeId } = this;
    this.mergeId = 0;
    if (id === 0) return this.callbacks.showHint("Click an object.");
    if (mergeId === 0 || !this.editor.objects.has(mergeId)) {
      this.mergeId = id;
      return this.callbacks.showHint(`Click the object to merge with object ${id}.`);
    }
    this.applyEdit(() => this.editor.merge(mergeId, id), `Merged objects ${mergeId} and ${id}.`);
    return this.viewer.select(this.editor.objects.has(id) ? 0 : mergeId);
  }

  /** @param {number} id */
  #split(id) {
    const { editor, seed, sketch } = this;
    const position = /** @type {Triple} */ ([...this.viewer.scene.state.position]);
    this.seed = null;
    if (id === 0) return this.callbacks.showHint("Click inside an object.");
    if (sketch?.kind === "split" && sketch.ids.includes(id))
      return this.applyEdit(() => editor.split(sketch.ids, [...sketch.seeds, position]), "Added a part.");
    if (seed?.id === id)
      return this.applyEdit(
        () => editor.split([id], [seed.position, position]),
        `Split object ${id}. Click again to add more parts.`,
      );
    this.seed = { id, position };
    return this.callbacks.showHint("Click another part of the same object.");
  }

  /** @param {SliceView} view @param {AbortSignal} signal */
  #addEventListeners(view, signal) {
    const { stage } = view;
    const options = { signal, capture: true };
    stage.addEventListener("pointerdown", (event) => this.#onPointerDown(view, event), options);
    stage.addEventListener("pointermove", (event) => this.#onPointerMove(view, event), options);
    stage.addEventListener("pointerup", (event) => this.#onPointerUp(view, event), options);
    stage.addEventListener("pointercancel", () => this.cancel(), options);
    stage.addEventListener("focus", () => this.#use(view), options);
    stage.addEventListener(
      "pointerleave",
      () => {
        this.pointer = null;
        this.sketches.draw();
      },
      options,
    );
    stage.addEventListener(
      "dblclick",
      (event) => DRAG_TOOLS.has(this.tool) && event.stopImmediatePropagation(),
      options,
    );
    // If the browser dragged selected content, the stroke would end.
    stage.addEventListener("dragstart", (event) => event.preventDefault(), options);
    stage.addEventListener("keydown", (event) => this.#onKey(view, event), options);
  }

  /** @param {SliceView} view */
  #use(view) {
    if (this.currentView === view) return;
    this.currentView = view;
    this.dispatchEvent(new Event("view"));
  }

  /** @param {SliceView} view @param {PointerEvent} event */
  #onPointerDown(view, event) {
    if (!DRAG_TOOLS.has(this.tool) || event.button !== 0) return;
    event.stopImmediatePropagation();
    if (this.brush.stroke !== null) return;
    view.stage.setPointerCapture(event.pointerId);
    this.#use(view);
    const [x, y] = getStagePosition(view, event);
    const point = view.pointAt(x, y);
    if (this.tool === "box") this.#startBox(view, point);
    else if (this.tool === "cut") this.line = { view, points: [point, point] };
    else if (this.tool === "add") {
      if (this.line?.view !== view) this.line = { view, points: [] };
      this.line.points.push(point);
    } else this.#startStroke(view, view.voxelAt(x, y));
    this.pressPosition = [event.clientX, event.clientY];
    this.hasDragged = false;
  }

  /** @param {SliceView} view @param {PointerEvent} event */
  #onPointerMove(view, event) {
    const [x, y] = getStagePosition(view, event);
    this.pointer = { view, x, y };
    this.#use(view);
    if (!DRAG_TOOLS.has(this.tool)) return;
    const isPressed = view.stage.hasPointerCapture(event.pointerId);
    if (isPressed) {
      event.stopImmediatePropagation();
      this.hasDragged ||= this.#hasMoved(event, MAX_CLICK_MOVEMENT_PIXELS);
      if (this.brush.stroke) this.#continueStroke(view.voxelAt(x, y));
      else if (this.boxDrag) this.#changeBox(this.boxDrag, view.pointAt(x, y));
      else if (this.tool === "cut" && this.line) this.line.points[1] = view.pointAt(x, y);
      else if (this.tool === "add" && this.#hasMoved(event, MIN_OUTLINE_MOVEMENT_PIXELS))
        this.line?.points.push(view.pointAt(x, y));
    }
    this.sketches.draw();
  }

  /** @param {MouseEvent} event @param {number} minPixels */
  #hasMoved(event, minPixels) {
    const [x, y] = this.pressPosition;
    return Math.hypot(event.clientX - x, event.clientY - y) > minPixels;
  }

  /** @param {SliceView} view @param {PointerEvent} event */
  #onPointerUp(view, event) {
    if (!DRAG_TOOLS.has(this.tool) || !view.stage.hasPointerCapture(event.pointerId)) return;
    event.stopImmediatePropagation();
    view.stage.releasePointerCapture(event.pointerId);
    if (this.brush.stroke) this.#endStroke();
    else if (this.boxDrag) this.boxDrag = null;
    else if (this.tool === "cut" && this.hasDragged) this.#cut();
    else if (this.tool === "add" && this.hasDragged) this.closeOutline();
    else this.callbacks.showHint("Drag to draw, or click the corners and press C to close the outline.");
    this.viewer.draw();
  }

  /** @param {SliceView} view @param {Point} point */
  #startBox(view, point) {
    const { scaleX, scaleY } = view.getPlacement();
    const tolerance = /** @type {Point} */ ([MAX_EDGE_DISTANCE_PIXELS / scaleY, MAX_EDGE_DISTANCE_PIXELS / scaleX]);
    const { shape } = this.editor.labels;
    this.boxDrag = new BoxDrag(this.region.state.box, shape, view.axis, point, tolerance);
  }

  /** @param {BoxDrag} boxDrag @param {Point} point */
  #changeBox(boxDrag, point) {
    const { kind } = this.region.state;
    this.region.set({ box: boxDrag.moveTo(point), kind: kind === "planes" ? kind : "box" });
  }

  #cut() {
    const { line, editor, viewer } = this;
    this.line = null;
    if (line === null) return;
    const { axis } = line.view;
    const [lineStart, lineEnd] = line.points;
    const id = editor.findObjectUnderLine(axis, viewer.scene.state.position[axis], lineStart, lineEnd);
    if (id === 0) this.callbacks.showHint("The line does not cross an object.");
    else this.applyEdit(() => editor.cut(id, axis, lineStart, lineEnd), `Cut object ${id}.`);
  }

  /** Close the outline, and create or extend an object. */
  closeOutline() {
    const { line, sketch, editor, viewer } = this;
    this.line = null;
    if (this.tool !== "add" || line === null) return;
    const { axis } = line.view;
    const previousSketch = sketch?.kind === "add" ? sketch : null;
    const { selectedId, position } = viewer.scene.state;
    if (this.brush.backgroundTarget === "selected" && editor.objects.has(selectedId)) {
      this.applyEdit(
        () => editor.extendWithOutline(selectedId, axis, position[axis], line.points),
        `Extended object ${selectedId}.`,
      );
      return;
    }
    this.applyEdit(
      () => editor.addOutline(axis, position[axis], line.points, previousSketch),
      "Go to another plane of this view and draw the next outline, or press N to start a new object.",
    );
    const newSketch = this.sketch;
    if (newSketch?.kind === "add") viewer.select(newSketch.id);
  }

  /** @param {SliceView} view @param {Triple} position */
  #startStroke(view, position) {
    const isErasing = this.tool === "erase";
    if (this.brush.startStroke(view, position, isErasing)) this.viewer.draw();
    else
      this.callbacks.showHint(
        isErasing
          ? "Start the stroke on the object to erase."
          : "Select the object to extend, or start the stroke on it.",
      );
  }

  /** @param {Triple} position */
  #continueStroke(position) {
    this.brush.paintTo(position);
    this.viewer.draw();
  }

  #endStroke() {
    const { editor, brush, viewer } = this;
    const { id, isNew } = brush.stroke ?? { id: 0, isNew: false };
    brush.stroke = null;
    const kind = this.tool === "erase" ? "erase" : "paint";
    const paintHint = isNew ? `Created object ${id}. To extend it, start a stroke on it` : `Extended object ${id}`;
    this.applyEdit(() => editor.commit(kind), `${kind === "erase" ? `Erased part of object ${id}` : paintHint}.`);
    if (!editor.objects.has(viewer.scene.state.selectedId)) viewer.select(0);
  }

  /** Handle the keys that move the crosshair, and the key that applies the tool at the crosshair. @param {SliceView} view @param {KeyboardEvent} event */
  #onKey(view, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? getArrowStep(event.key, view.axis) : undefined;
    if (step) {
      this.viewer.move(...step);
      this.viewer.draw();
    } else if (event.key === "Enter") this.#applyAtCrosshair(view);
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  /** Apply the tool as if the user clicked at the crosshair. @param {SliceView} view */
  #applyAtCrosshair(view) {
    const { viewer, editor } = this;
    const [downAxis, rightAxis] = IN_PLANE_AXES[view.axis];
    const { position } = viewer.scene.state;
    /** @type {Point} */
    const point = [position[downAxis] + 0.5, position[rightAxis] + 0.5];
    if (!DRAG_TOOLS.has(this.tool)) {
      viewer.selectAndNotify(editor.idAt(position));
    } else if (this.tool === "add") {
      if (this.line?.view !== view) this.line = { view, points: [] };
      this.line.points.push(point);
      this.callbacks.showHint("Corner added. Press C to close the outline.");
    } else if (this.tool === "box") {
      this.callbacks.showHint("Drag with the pointer, or enter the first and the last plane, row and column.");
    } else if (this.tool === "cut") {
      const lineStart = this.line?.view === view ? this.line.points[0] : null;
      this.line = { view, points: [lineStart ?? point, point] };
      if (lineStart) this.#cut();
      else this.callbacks.showHint("Press Enter at the other end of the line.");
    } else {
      this.#startStroke(view, /** @type {Triple} */ ([...position]));
      this.#endStroke();
    }
    viewer.draw();
  }
}

/** @param {SliceView} view @param {MouseEvent} event @returns {[number, number]} position (x, y) of the pointer relative to the stage */
function getStagePosition({ stage }, event) {
  const { left, top } = stage.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
}
