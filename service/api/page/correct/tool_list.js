/** The tools that correct labels: their names, hints and keys. */

import { ACROSS } from "../volumes/slices.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */
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

/** Tools that drags are for, and not clicks. @type {Set<ToolName>} */
export const DRAGGED = new Set(["cut", "add", "paint", "erase"]);

/**
 * @param {KeyboardEvent} event @param {EditTools} tools @param {(direction: "undo" | "redo") => void} travel
 * @returns {(() => void) | undefined} what the key does; undefined: nothing here
 */
export function actionOfKey(event, tools, travel) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (target instanceof HTMLInputElement && target.type !== "range" && target.type !== "checkbox") return undefined;
  if (event.ctrlKey || event.metaKey) return historyAction(event, travel);
  return event.altKey ? undefined : toolAction(event.key, tools);
}

/** @param {KeyboardEvent} event @param {(direction: "undo" | "redo") => void} travel */
function historyAction(event, travel) {
  const key = event.key.toLowerCase();
  if (key === "z") return () => travel(event.shiftKey ? "redo" : "undo");
  return key === "y" ? () => travel("redo") : undefined;
}

/** @param {string} key @param {EditTools} tools @returns {(() => void) | undefined} */
function toolAction(key, tools) {
  const tool = TOOLS.find((one) => one.key === key);
  if (tool) return () => tools.use(tool.name);
  return {
    "[": () => tools.resize(1 / 1.2),
    "]": () => tools.resize(1.2),
    n: () => tools.startNew(),
    c: () => tools.closeOutline(),
    Delete: () => tools.deleteSelected(),
    Backspace: () => tools.deleteSelected(),
    Escape: () => tools.cancel(),
  }[key];
}

/** @param {string} key @param {import("../viewer/scene.js").Axis} axis of the view that has the focus @returns {[import("../viewer/scene.js").Axis, number] | undefined} where an arrow takes the crosshair: planes along an axis */
export function stepOfArrow(key, axis) {
  const [down, right] = ACROSS[axis];
  const steps = /** @type {Record<string, [typeof down | typeof right, number]>} */ ({
    ArrowUp: [down, -1],
    ArrowDown: [down, 1],
    ArrowLeft: [right, -1],
    ArrowRight: [right, 1],
  });
  return steps[key];
}
