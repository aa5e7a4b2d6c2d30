/** The result of a job: summary, notes, objects, export and corrections, linked with the views of the stack. */

import { button, element, redraw } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";
import { describeSetting, formatLengths, toPageTerms } from "../core/terminology.js";
import { CorrectView } from "../correct/correct_view.js";
import { rememberJob } from "../stack/recent_jobs.js";
import { describeResult, resultsOf } from "./compare_view.js";
import { exportView } from "./export_view.js";
import { ObjectsView } from "./objects_view.js";
import { drawScreenshot } from "./screenshots.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {{current: () => number, goTo: (time: number) => Promise<void>, target: EventTarget}} Times the displayed time point, and events when it changes */

const NOT_TRACKED =
  "Objects are numbered and colored separately at each time point: object 5 of one time point is not object 5 of the next. To track objects, select “Track objects over time” and segment again.";
/** More notes would push the table of objects off the screen of a laptop. */
const MAX_EXPANDED_NOTES = 2;
const WITHOUT_CORRECTIONS =
  "These files do not include your corrections. You can export the corrected labels on the Correct tab.";

/**
 * Show the result of a finished job.
 * @param {HTMLElement} root
 * @param {{job: Job, stack: string, name: string}} result stack: its id, "" if it is no longer stored; name: of the file
 * @param {import("../volumes/object_table.js").Table | null} table
 * @param {{viewer: Viewer, abilities: import("openapi").Abilities, signal: AbortSignal,
 *   segmentWith: (changes: Record<string, string>) => Promise<void>, times: Times}} context
 *   `signal` ends the link with the views; `segmentWith` segments the stack again with changed parameters
 */
export function showResult(root, result, table, { viewer, abilities, signal, segmentWith, times }) {
  const { job, stack, name } = result;
  const objects = table && new ObjectsView(table);
  const withoutTable =
    job.objects === null ? "The labels are classes, not objects." : `${formatCount(job.objects, "object")}.`;
  const exports = exportView(job, name, objects !== null, () => drawScreenshot(viewer));
  const correct = job.objects === null ? null : new CorrectView(result, viewer, times.current(), abilities, signal);
  const summary = element("p", { class: "big", id: "summary" }, objects ? objects.summarize() : withoutTable);
  const tables = new ObjectTables(objects, summary, viewer, times, signal);
  const pages = tabs([
    { text: "Objects", page: tables.root },
    { text: "Export", page: exports },
    ...(correct
      ? [{ text: "Correct", page: correct.root, onshow: (/** @type {boolean} */ visible) => switchMode(visible) }]
      : []),
  ]);
  let correcting = false;
  /** @param {boolean} visible whether the Correct tab is visible */
  async function switchMode(visible) {
    correcting = visible;
    if (visible) await correct?.enter();
    else {
      correct?.leave();
      viewer.scene.set({ hidden: tables.displayed?.hidden ?? null });
    }
  }
  const results = resultSwitcher(job, stack);
  if (correct) {
    const badge = element("span", { class: "badge", title: "Saved in this browser" });
    pages[0].lastElementChild?.append(badge);
    const note = element("p", { class: "muted small", hidden: true }, WITHOUT_CORRECTIONS);
    exports.prepend(note);
    correct.root.addEventListener("count", (event) => {
      const { edits, objects } = /** @type {CustomEvent<{edits: number, objects: number | null}>} */ (event).detail;
      if (objects !== null && !job.time_points) tables.showCount(edits > 0 ? objects : null);
      if (!job.time_points) results.updateCount(edits, objects);
      badge.textContent = edits > 0 ? formatCount(edits, "correction") : "";
      note.hidden = edits === 0;
    });
    correct.root.addEventListener("corrected", (event) =>
      tables.showCorrected(/** @type {CustomEvent} */ (event).detail),
    );
    times.target.addEventListener("leaving", () => correct.leave(false), { signal });
    times.target.addEventListener("time", () => correct.goTo(times.current(), correcting), { signal });
  }
  root.replaceChildren(
    element(
      "div",
      { class: "result" },
      results.root,
      summary,
      element("p", { class: "muted small" }, facts(job).join(" · ")),
      notes(job, stack ? segmentWith : null),
      ...pages,
    ),
  );
}

/** The table of objects, which switches between the original and the corrected labels. */
class ObjectTables {
  /**
   * @param {ObjectsView | null} segmented objects without corrections, null if the result has no table @param {HTMLElement} summary
   * @param {Viewer} viewer @param {Times} times @param {AbortSignal} signal
   */
  constructor(segmented, summary, viewer, times, signal) {
    this.segmented = segmented;
    this.summary = summary;
    this.viewer = viewer;
    this.times = times;
    this.signal = signal;
    /** @type {ObjectsView | null} */
    this.displayed = null;
    this.linking = new AbortController();
    this.segmentedSummary = summary.textContent ?? "";
    this.root = element("div", { class: "tables" });
    this.#show(segmented);
  }

  /** @param {import("../volumes/object_table.js").Table | null} table of the corrected objects, null to show the objects without corrections */
  showCorrected(table) {
    const corrected = table && new ObjectsView(table);
    if (corrected === null && this.displayed === this.segmented) return;
    this.#show(corrected ?? this.segmented);
    this.summary.textContent = corrected ? `${corrected.summarize()} Includes corrections.` : this.segmentedSummary;
  }

  /** Show the number of objects while labels are being corrected. @param {number | null} objects null without corrections */
  showCount(objects) {
    this.summary.textContent =
      objects === null ? this.segmentedSummary : `${formatCount(objects, "object")}. Includes corrections.`;
  }

  /** @param {ObjectsView | null} objects */
  #show(objects) {
    this.linking.abort();
    this.linking = new AbortController();
    this.displayed = objects;
    const none = element("p", { class: "muted" }, "There is no table of objects for this result.");
    this.root.replaceChildren(objects?.root ?? none);
    if (objects) connect(this.viewer, objects, this.times, AbortSignal.any([this.linking.signal, this.signal]));
  }
}

/**
 * Link table and views in both directions.
 * @param {Viewer} viewer @param {ObjectsView} objects @param {Times} times @param {AbortSignal} signal
 */
function connect(viewer, objects, times, signal) {
  const isSeries = objects.table.columns.has("time");
  if (isSeries) objects.time = times.current();
  objects.addEventListener("select", async (event) => {
    const label = /** @type {CustomEvent<number>} */ (event).detail;
    if (isSeries && objects.time !== times.current()) await times.goTo(objects.time);
    const center = objects.center(label);
    if (center) viewer.select(label, center);
  });
  objects.addEventListener("filter", () => viewer.scene.set({ hidden: objects.hidden }));
  times.target.addEventListener(
    "time",
    () => {
      if (!isSeries) return;
      objects.time = times.current();
      viewer.scene.set({ hidden: objects.hidden });
      objects.select(viewer.scene.state.selected);
    },
    { signal },
  );
  viewer.addEventListener("pick", (event) => objects.select(/** @type {CustomEvent<number>} */ (event).detail), {
    signal,
  });
}

/** @param {Job} job @returns {string[]} */
function facts(job) {
  const seconds = Object.values(job.seconds).reduce((sum, part) => sum + part, 0);
  const confidence = typeof job.confidence === "number" ? [`confidence ${Math.round(job.confidence * 100)}%`] : [];
  const diameter = job.diameter ? [formatLengths(job.diameter).replace("; ", ", ")] : [];
  return [job.model, ...diameter, ...confidence, `${formatNumber(seconds, 2)} s`];
}

/**
 * Create the list of warnings and notes.
 * @param {Job} job
 * @param {((changes: Record<string, string>) => Promise<void>) | null} segmentWith null if the stack is no longer stored
 */
function notes(job, segmentWith) {
  const lowConfidence = /** @type {{detail: string, try: string} | null} */ (job.doubt);
  const warning = lowConfidence ? toPageTerms(lowConfidence.detail) : "";
  const [parameter, value] = lowConfidence?.try.split("=") ?? [];
  const suggestion = segmentWith !== null && value && { [parameter]: value };
  const trackingNote = job.time_points && !job.parameters.link && job.objects !== null ? [NOT_TRACKED] : [];
  const texts = [...trackingNote, ...job.warnings.map(toPageTerms).filter((note) => note && note !== warning)];
  return (
    (warning || texts.length > 0) &&
    element(
      "ul",
      { class: "notes", "aria-label": "Notes about this result" },
      warning &&
        element(
          "li",
          { class: "warning" },
          element("p", {}, warning),
          suggestion && button(`Try ${describeSetting(parameter, value)}`, () => segmentWith(suggestion)),
        ),
      ...(texts.length > MAX_EXPANDED_NOTES
        ? [
            element(
              "li",
              {},
              element("details", {}, element("summary", {}, formatCount(texts.length, "note")), list(texts)),
            ),
          ]
        : texts.map((note) => element("li", {}, note))),
    )
  );
}

/** @param {string[]} texts */
function list(texts) {
  return element("ul", { class: "notes" }, ...texts.map((text) => element("li", {}, text)));
}

/**
 * Create the buttons that switch between the results of the stack.
 * @param {Job} job @param {string} stack
 */
function resultSwitcher(job, stack) {
  const root = element("div", { class: "versions", role: "group", "aria-label": "Results of this stack" });
  const draw = () => {
    const all = resultsOf(stack);
    const other = all.find((entry) => entry.job !== job.id)?.job;
    root.hidden = other === undefined;
    if (other === undefined) return [];
    const buttons = all.map((entry) => {
      const onclick = () => {
        location.hash = `job=${entry.job}`;
      };
      const current = entry.job === job.id ? "true" : undefined;
      return element("button", { type: "button", "aria-current": current, onclick }, describeResult(entry));
    });
    return [...buttons, element("a", { href: `#compare=${job.id},${other}`, class: "compare" }, "Side by side")];
  };
  /** @param {number} edits @param {number | null} objects number of corrected objects, null if not counted yet */
  const updateCount = (edits, objects) => {
    if (edits > 0 && objects === null) return;
    rememberJob({ job: job.id, corrected: edits > 0 ? objects : null });
    redraw(root, draw);
  };
  redraw(root, draw);
  return { root, updateCount };
}

/**
 * Create a tab list.
 * @param {{text: string, page: HTMLElement, onshow?: (visible: boolean) => void}[]} pages onshow: called when a page appears or disappears
 * @returns {[HTMLElement, HTMLElement]} the tabs and the pages
 */
function tabs(pages) {
  let current = 0;
  const items = pages.map(({ text, page }, index) => {
    const onkeydown = (/** @type {KeyboardEvent} */ event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select((index + step + pages.length) % pages.length).focus();
    };
    const id = `tab-${index}`;
    const onclick = () => select(index);
    return {
      tab: element(
        "button",
        { type: "button", role: "tab", id, "aria-controls": `page-${index}`, onclick, onkeydown },
        text,
      ),
      panel: element("div", { role: "tabpanel", id: `page-${index}`, "aria-labelledby": id }, page),
    };
  });
  /** @param {number} selected */
  function select(selected) {
    items.forEach(({ tab, panel }, index) => {
      tab.setAttribute("aria-selected", String(index === selected));
      tab.tabIndex = index === selected ? 0 : -1;
      panel.hidden = index !== selected;
    });
    if (selected !== current) {
      pages[current].onshow?.(false);
      pages[selected].onshow?.(true);
    }
    current = selected;
    return items[selected].tab;
  }
  select(0);
  return [
    element("div", { class: "tabs", role: "tablist", "aria-label": "Result" }, ...items.map(({ tab }) => tab)),
    element("div", { class: "pages" }, ...items.map(({ panel }) => panel)),
  ];
}
