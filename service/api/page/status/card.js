/** Cards and tables for the status view. */

import { element, redraw } from "../core/elements.js";
import { formatDuration, formatNumber } from "../core/format.js";

/** @typedef {import("../core/elements.js").Child} Child */

/**
 * Card that is redrawn only if its data has changed, so that text selections, expanded <details> elements and the focus
 * are preserved.
 */
export class Card {
  /** @param {string} title @param {Child[]} tools controls shown next to the title */
  constructor(title, ...tools) {
    this.body = element("div", { class: "card-body" });
    this.root = element(
      "section",
      { class: "card", "aria-label": title },
      element("div", { class: "row between" }, element("h2", {}, title), ...tools),
      this.body,
    );
    /** The displayed data, as JSON. */
    this.displayedJson = "";
  }

  /** Display data, unless the same data is already displayed. @template Data @param {Data} data @param {(data: Data) => Child[]} createChildren */
  show(data, createChildren) {
    const json = JSON.stringify(data);
    if (json === this.displayedJson) return;
    this.displayedJson = json;
    redraw(this.body, () => createChildren(data));
  }
}

/** @param {string} caption @param {string[]} columnNames @param {Child[][]} rows @param {string} [className] */
export function createTable(caption, columnNames, rows, className = "") {
  return element(
    "table",
    { class: `status-table ${className}` },
    element("caption", { class: "visually-hidden" }, caption),
    element("thead", {}, element("tr", {}, ...columnNames.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))))),
  );
}

/** @param {number} seconds */
export function formatSeconds(seconds) {
  return seconds < 100 ? `${formatNumber(seconds, 2)} s` : formatDuration(seconds);
}
