/** Names, hints and keys of the correction tools. */

import { IN_PLANE_AXES } from "../volumes/slices.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */
/** @typedef {"select" | "merge" | "split" | "cut" | "delete" | "add" | "paint" | "erase" | "box" | "accept"} ToolName */

/** @type {{name: ToolName, text: string, key: string, hint: string}[]} */
export const TOOLS = [
  { name: "select", text: "Select", key: "v", hint: "Click an object to select it. Drag to move the view." },
  { name: "merge", text: "Merge", key: "m", hint: "Click two objects to merge them." },
  {
    name: "split",
    text: "Split",
    key: "s",
    hint: "Click each part of an object once. Click again to add more parts.",
  },
  {
    name: "cut",
    text: "Cut",
    key: "x",
    hint: "Draw a line across an object to cut it through all planes of this view.",
  },
  { name: "delete", text: "Delete", key: "d", hint: "Click an object to delete it." },
  {
    name: "add",
    text: "Outline",
    key: "a",
    hint: "Outline an object in several planes of one view. The planes between them are filled. Press N to start a new object.",
  },
  {
    name: "paint",
    text: "Brush",
    key: "b",
    hint: "Start a stroke on an object to extend it. Strokes on the background create a new object or extend the selected one, as set below.",
  },
  {
    name: "erase",
    text: "Eraser",
    key: "e",
    hint: "Start a stroke on an object to erase parts of it. Other objects do not change.",
  },
];

/** Tool that draws the box in which every object is labeled. It has a separate button. */
export const BOX_TOOL = {
  name: /** @type {const} */ ("box"),
  hint: "Drag a rectangle in any view. To change the box, drag one of its edges in any view.",
};

/** Tool that accepts suggested objects. It has a separate button. */
export const ACCEPT_TOOL = {
  name: /** @type {const} */ ("accept"),
  hint: "Click a gray outline to accept the suggested object. To reject an accepted object, undo or delete it.",
};

/** Tools that the user applies by dragging. @type {Set<ToolName>} */
export const DRAG_TOOLS = new Set(["cut", "add", "paint", "erase", "box"]);

/** @typedef {{undoOrRedo: (direction: "undo" | "redo") => void, markPlane: () => void}} KeyActions markPlane: marks the displayed plane as complete, or removes the mark */

/**
 * Return the action for a key.
 * @param {KeyboardEvent} event @param {EditTools} tools @param {KeyActions} actions
 * @returns {(() => void) | undefined} undefined if the key has no action
 */
export function getKeyAction(event, tools, { undoOrRedo, markPlane }) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (target instanceof HTMLInputElement && !["range", "checkbox", "radio"].includes(target.type)) return undefined;
  if (event.ctrlKey || event.metaKey) return getHistoryAction(event, undoOrRedo);
  if (event.altKey) return undefined;
  return event.key === "p" ? markPlane : getToolAction(event.key, tools);
}

/** @param {KeyboardEvent} event @param {(direction: "undo" | "redo") => void} undoOrRedo */
function getHistoryAction(event, undoOrRedo) {
  const key = event.key.toLowerCase();
  if (key === "z") return () => undoOrRedo(event.shiftKey ? "redo" : "undo");
  return key === "y" ? () => undoOrRedo("redo") : undefined;
}

/** @param {string} key @param {EditTools} tools @returns {(() => void) | undefined} */
function getToolAction(key, tools) {
  const tool = TOOLS.find((candidate) => candidate.key === key);
  if (tool) return () => tools.activate(tool.name);
  return {
    "[": () => tools.resizeBrush(1 / 1.2),
    "]": () => tools.resizeBrush(1.2),
    n: () => tools.startNewObject(),
    c: () => tools.closeOutline(),
    i: () => tools.fillSelectedObject(),
    Delete: () => tools.deleteSelectedObject(),
    Backspace: () => tools.deleteSelectedObject(),
    Escape: () => tools.cancel(),
  }[key];
}

/** @param {string} key @param {import("../viewer/scene.js").Axis} axis of the focused view @returns {[import("../viewer/scene.js").Axis, number] | undefined} the axis along which an arrow key moves the crosshair, and the number of voxels; undefined for other keys */
export function getArrowStep(key, axis) {
  const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
  const steps = /** @type {Record<string, [typeof downAxis | typeof rightAxis, number]>} */ ({
    ArrowUp: [downAxis, -1],
    ArrowDown: [downAxis, 1],
    ArrowLeft: [rightAxis, -1],
    ArrowRight: [rightAxis, 1],
  });
  return steps[key];
}
