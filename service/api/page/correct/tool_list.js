/** The tools that correct labels: their names, keys and hints. */

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
