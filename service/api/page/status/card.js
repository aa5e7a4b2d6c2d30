/** A card of the status, and what cards are made of. */

import { element, redraw } from "../core/elements.js";
import { duration, number } from "../core/format.js";

/** @typedef {import("../core/elements.js").Child} Child */

/** A card whose content is drawn anew only when it has changed, so that what is read, open or focused stays. */
export class Card {
  /** @param {string} title @param {Child[]} tools beside the title */
  constructor(title, ...tools) {
    this.body = element("div", { class: "card-body" });
    this.root = element(
      "section",
      { class: "card", "aria-label": title },
      element("div", { class: "row between" }, element("h2", {}, title), ...tools),
      this.body,
    );
    this.drawn = "";
  }

  /** @template Facts @param {Facts} facts @param {(facts: Facts) => Child[]} draw */
  show(facts, draw) {
    const text = JSON.stringify(facts);
    if (text === this.drawn) return;
    this.drawn = text;
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
export function secondsOf(seconds) {
  return seconds < 100 ? `${number(seconds, 2)} s` : duration(seconds);
}
