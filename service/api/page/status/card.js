/** Cards and tables of the status page. */

import { element, redraw } from "../core/elements.js";
import { formatDuration, formatNumber } from "../core/format.js";

/** @typedef {import("../core/elements.js").Child} Child */

/** A card that redraws its content only when it has changed, so that selections, open details and the focus are kept. */
export class Card {
  /** @param {string} title @param {Child[]} tools shown next to the title */
  constructor(title, ...tools) {
    this.body = element("div", { class: "card-body" });
    this.root = element(
      "section",
      { class: "card", "aria-label": title },
      element("div", { class: "row between" }, element("h2", {}, title), ...tools),
      this.body,
    );
    /** The displayed facts as JSON. */
    this.drawnFacts = "";
  }

  /** @template Facts @param {Facts} facts @param {(facts: Facts) => Child[]} draw */
  show(facts, draw) {
    const text = JSON.stringify(facts);
    if (text === this.drawnFacts) return;
    this.drawnFacts = text;
    redraw(this.body, () => draw(facts));
  }
}

/** @param {string} caption @param {string[]} names @param {Child[][]} rows @param {string} [kind] */
export function table(caption, names, rows, kind = "") {
  return element(
    "table",
    { class: `facts-table ${kind}` },
    element("caption", { class: "visually-hidden" }, caption),
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))))),
  );
}

/** @param {number} seconds */
export function formatSeconds(seconds) {
  return seconds < 100 ? `${formatNumber(seconds, 2)} s` : formatDuration(seconds);
}
