/** Explanations that are shown next to the views before a stack is segmented. */

import { createShortcutList, element, formatMessage } from "../core/elements.js";

/** Create an explanation of why a stack cannot be shown. @param {import("../core/requests.js").Problem} problem */
export function createUnreadableStackExplanation(problem) {
  const title = problem.slug === "ambiguous-axes" ? "Select the axes" : "This stack cannot be segmented";
  const text =
    problem.slug === "ambiguous-axes"
      ? "The file does not specify its axes. Select them on the left, then check the slices."
      : problem.message;
  return element(
    "div",
    { class: "run" },
    element("h2", {}, title),
    element("p", { class: "muted" }, formatMessage(text)),
    problem.slug !== "ambiguous-axes" && element("a", { href: "#" }, "Open another file"),
  );
}

/** Create a list of what to check before segmenting a stack, with the shortcuts of the views. */
export function createChecklist() {
  return element(
    "div",
    { class: "run" },
    element("h2", {}, "Check your stack"),
    element(
      "p",
      { class: "muted" },
      "If the slices, the channel and the proportions look right, press Segment to outline, count and measure the objects.",
    ),
    element("h3", {}, "Navigation"),
    createShortcutList([
      ["Wheel, J and K, arrow keys", "next or previous plane"],
      ["Drag", "move the view"],
      ["Ctrl + wheel, + and −", "zoom"],
      ["Click", "move the crosshair, select an object"],
      ["O", "show or hide objects"],
      ["F", "fill objects"],
      ["0", "fit to view"],
    ]),
  );
}
