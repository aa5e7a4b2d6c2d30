/** Keys of the tools, while the views or the panel have the focus. */

import { TOOLS } from "./tool_list.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */

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
