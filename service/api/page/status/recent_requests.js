/** The last requests, and the time spent in each stage. */

import { element } from "../core/elements.js";
import { formatNumber } from "../core/format.js";
import { table } from "./card.js";

/** @typedef {import("openapi").SegmentationReport} Segmented */

/** Groups of stages with the same color. @type {[string, string[]][]} */
const GROUPS = [
  ["Receive, read", ["receive", "read"]],
  ["Wait", ["queue"]],
  ["Prepare", ["prepare", "size", "skip"]],
  ["Windows", ["windows"]],
  ["Decode", ["decode"]],
  ["Measure, write", ["measure", "write", "save"]],
];

/** Create the legend of the stage colors. */
export function legend() {
  const entries = GROUPS.map(([name], group) =>
    element("li", {}, element("span", { class: "key", "data-group": group }), name),
  );
  return element("ul", { class: "legend muted" }, ...entries);
}

/** @param {Segmented[]} recent */
export function drawRecent(recent) {
  if (recent.length === 0) return [element("p", { class: "muted" }, "No requests since the service started.")];
  return [
    table(
      "Recent requests, newest first",
      ["Ended", "Model", "Voxels", "Objects", "Seconds", "Time by stage"],
      recent.map(({ ended, model, voxels, objects, seconds }) => [
        new Date(ended).toLocaleTimeString("en-GB"),
        model,
        formatNumber(voxels),
        objects === null ? "–" : formatNumber(objects),
        formatNumber(
          Object.values(seconds).reduce((sum, value) => sum + value, 0),
          3,
        ),
        stageBar(seconds),
      ]),
      "recent-requests",
    ),
  ];
}

/** @param {Record<string, number>} seconds by stage */
function stageBar(seconds) {
  const stages = Object.entries(seconds);
  const texts = stages.map(([stage, value]) => `${stage} ${formatNumber(value, 2)} s`);
  const parts = stages.map(([stage, value], index) => {
    const group = GROUPS.findIndex(([, names]) => names.includes(stage));
    const part = element("span", { class: "key", "data-group": group, title: texts[index] });
    part.style.flexGrow = String(value);
    return part;
  });
  return element("div", { class: "stage-bar", role: "img", "aria-label": texts.join(", ") }, ...parts);
}
