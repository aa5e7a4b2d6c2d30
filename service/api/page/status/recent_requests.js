/** The last requests, and where they spent their time. */

import { element } from "../core/elements.js";
import { number } from "../core/format.js";
import { table } from "./card.js";

/** @typedef {import("openapi").SegmentedReport} Segmented */

/** Stages that have one colour. @type {[string, string[]][]} */
const GROUPS = [
  ["Receive, read", ["receive", "read"]],
  ["Wait", ["queue"]],
  ["Prepare", ["prepare", "size", "skip"]],
  ["Windows", ["windows"]],
  ["Decode", ["decode"]],
  ["Measure, write", ["measure", "write", "save"]],
];

/** The colours of the stages. */
export function legend() {
  const entries = GROUPS.map(([name], group) =>
    element("li", {}, element("span", { class: "key", "data-group": group }), name),
  );
  return element("ul", { class: "legend muted" }, ...entries);
}

/** @param {Segmented[]} recent */
export function drawRecent(recent) {
  if (recent.length === 0)
    return [element("p", { class: "muted" }, "Nothing was segmented since the service was started.")];
  return [
    table(
      "The last requests, newest first",
      ["Ended", "Model", "Voxels", "Objects", "Seconds", "Shares of the time"],
      recent.map(({ ended, model, voxels, objects, seconds }) => [
        new Date(ended).toLocaleTimeString("en-GB"),
        model,
        number(voxels),
        objects === null ? "–" : number(objects),
        number(
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
  const words = stages.map(([stage, value]) => `${stage} ${number(value, 2)} s`);
  const parts = stages.map(([stage, value], place) => {
    const group = GROUPS.findIndex(([, names]) => names.includes(stage));
    const part = element("span", { class: "key", "data-group": group, title: words[place] });
    part.style.flexGrow = String(value);
    return part;
  });
  return element("div", { class: "stage-bar", role: "img", "aria-label": words.join(", ") }, ...parts);
}
