/** Result of a job: summary, notes, and the Objects, Export and Correct tabs. The result is linked to the views of the stack. */

import { element, redraw } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";
import { formatLengths } from "../core/terminology.js";
import { CorrectView } from "../correct/correct_view.js";
import { ResultLabels } from "../correct/label_sources.js";
import { rememberJob } from "../stack/recent_jobs.js";
import { describeResult, listResults } from "./compare_view.js";
import { createExportView } from "./export_view.js";
import { createNotes } from "./notes.js";
import { ObjectsView } from "./objects_view.js";
import { drawScreenshot } from "./screenshots.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {{getTimePoint: () => number, goToTimePoint: (time: number) => Promise<void>, events: EventTarget}} TimeNavigation reads and changes the displayed time point; `events` dispatches `leaving` before and `time` after each change */

const CONFIDENCE_EXPLANATION =
  "Estimated from the model's scores and the sizes of the objects. If the table has a column “Conf.”, this is the expected F1 score, the mean of that column. Otherwise it is the probability that the result as a whole is good.";
const WITHOUT_CORRECTIONS_NOTE =
  "These files do not include your corrections. You can export the corrected labels on the Correct tab.";

/**
 * Show the result of a finished job.
 * @param {HTMLElement} root
 * @param {{job: Job, stack: string, name: string}} result stack: id of the stack, "" if it is no longer stored; name: file name
 * @param {import("../volumes/object_table.js").Table | null} table
 * @param {{viewer: Viewer, capabilities: import("openapi").CallerLimits, signal: AbortSignal, results: Job[],
 *   segmentWith: (changes: Record<string, string>) => Promise<void>, compareModels: () => void, timeNavigation: TimeNavigation}} context
 *   `signal` ends the link to the views; `results` are all results of the stack; `segmentWith` segments the stack again with changed parameters
 */
export function showResult(root, result, table, context) {
  const { viewer, capabilities, signal, results, segmentWith, compareModels, timeNavigation } = context;
  const { job, stack, name } = result;
  const objectsView = table && new ObjectsView(table);
  const countText =
    job.objects === null ? "The labels are classes, not objects." : `${formatCount(job.objects, "object")}.`;
  const exportRoot = createExportView(job, name, objectsView !== null, capabilities.temporary_jobs, () =>
    drawScreenshot(viewer),
  );
  const correctView =
    job.objects === null
      ? null
      : new CorrectView(
          new ResultLabels(result, table),
          name,
          viewer,
          timeNavigation.getTimePoint(),
          capabilities,
          signal,
        );
  const summary = element("p", { class: "big", id: "summary" }, objectsView ? objectsView.summarize() : countText);
  const tables = new ObjectTables(objectsView, summary, viewer, timeNavigation, signal);
  const tabElements = createTabs([
    { text: "Objects", page: tables.root },
    { text: "Export", page: exportRoot },
    ...(correctView
      ? [
          {
            text: "Correct",
            page: correctView.root,
            ontoggle: (/** @type {boolean} */ isVisible) => switchMode(isVisible),
          },
        ]
      : []),
  ]);
  let isCorrecting = false;
  /** @param {boolean} isVisible whether the Correct tab is visible */
  async function switchMode(isVisible) {
    isCorrecting = isVisible;
    if (isVisible) await correctView?.enter();
    else {
      correctView?.leave();
      viewer.scene.set({ hiddenFlags: tables.displayedView?.hiddenFlags ?? null });
    }
  }
  const resultSwitcher = createResultSwitcher(job, stack);
  if (correctView) {
    const badge = element("span", { class: "badge", title: "Saved in this browser" });
    tabElements[0].lastElementChild?.append(badge);
    const note = element("p", { class: "muted small", hidden: true }, WITHOUT_CORRECTIONS_NOTE);
    exportRoot.prepend(note);
    correctView.root.addEventListener("count", (event) => {
      const { editCount, objectCount } = /** @type {CustomEvent<{editCount: number, objectCount: number | null}>} */ (
        event
      ).detail;
      if (objectCount !== null && !job.time_points) tables.showCount(editCount > 0 ? objectCount : null);
      if (!job.time_points) resultSwitcher.updateCount(editCount, objectCount);
      badge.textContent = editCount > 0 ? formatCount(editCount, "correction") : "";
      note.hidden = editCount === 0;
    });
    correctView.root.addEventListener("corrected", (event) =>
      tables.showCorrectedObjects(/** @type {CustomEvent} */ (event).detail),
    );
    timeNavigation.events.addEventListener("leaving", () => correctView.leave(false), { signal });
    timeNavigation.events.addEventListener(
      "time",
      () => correctView.goToTimePoint(timeNavigation.getTimePoint(), isCorrecting),
      { signal },
    );
  }
  root.replaceChildren(
    element(
      "div",
      { class: "result" },
      resultSwitcher.root,
      summary,
      createJobDescription(job),
      createNotes(job, results, stack ? segmentWith : null, compareModels),
      ...tabElements,
    ),
  );
}

/** Table of objects that switches between the original and the corrected labels. */
class ObjectTables {
  /**
   * @param {ObjectsView | null} originalView view of the objects without corrections, null if the result has no table @param {HTMLElement} summary
   * @param {Viewer} viewer @param {TimeNavigation} timeNavigation @param {AbortSignal} signal
   */
  constructor(originalView, summary, viewer, timeNavigation, signal) {
    this.originalView = originalView;
    this.summary = summary;
    this.viewer = viewer;
    this.timeNavigation = timeNavigation;
    this.signal = signal;
    /** @type {ObjectsView | null} */
    this.displayedView = null;
    this.linkAbort = new AbortController();
    this.originalSummary = summary.textContent ?? "";
    this.root = element("div", { class: "tables" });
    this.#show(originalView);
  }

  /** @param {import("../volumes/object_table.js").Table | null} table of the corrected objects, null to show the objects without corrections */
  showCorrectedObjects(table) {
    const correctedView = table && new ObjectsView(table);
    if (correctedView === null && this.displayedView === this.originalView) return;
    this.#show(correctedView ?? this.originalView);
    this.summary.textContent = correctedView
      ? `${correctedView.summarize()} Includes corrections.`
      : this.originalSummary;
  }

  /** Show the number of objects while labels are being corrected. @param {number | null} objectCount null if there are no corrections */
  showCount(objectCount) {
    this.summary.textContent =
      objectCount === null ? this.originalSummary : `${formatCount(objectCount, "object")}. Includes corrections.`;
  }

  /** @param {ObjectsView | null} objectsView */
  #show(objectsView) {
    this.linkAbort.abort();
    this.linkAbort = new AbortController();
    this.displayedView = objectsView;
    const emptyText = element("p", { class: "muted" }, "There is no table of objects for this result.");
    this.root.replaceChildren(objectsView?.root ?? emptyText);
    if (objectsView)
      linkTableAndViews(
        this.viewer,
        objectsView,
        this.timeNavigation,
        AbortSignal.any([this.linkAbort.signal, this.signal]),
      );
  }
}

/**
 * Synchronize the selection and the filters between the table and the views.
 * @param {Viewer} viewer @param {ObjectsView} objectsView @param {TimeNavigation} timeNavigation @param {AbortSignal} signal
 */
function linkTableAndViews(viewer, objectsView, timeNavigation, signal) {
  const isSeries = objectsView.table.columns.has("time");
  if (isSeries) objectsView.time = timeNavigation.getTimePoint();
  objectsView.addEventListener("select", async (event) => {
    const label = /** @type {CustomEvent<number>} */ (event).detail;
    if (isSeries && objectsView.time !== timeNavigation.getTimePoint())
      await timeNavigation.goToTimePoint(objectsView.time);
    const center = objectsView.getCenter(label);
    if (center) viewer.select(label, center);
  });
  objectsView.addEventListener("filter", () => viewer.scene.set({ hiddenFlags: objectsView.hiddenFlags }));
  timeNavigation.events.addEventListener(
    "time",
    () => {
      if (!isSeries) return;
      objectsView.time = timeNavigation.getTimePoint();
      viewer.scene.set({ hiddenFlags: objectsView.hiddenFlags });
      objectsView.select(viewer.scene.state.selectedId);
    },
    { signal },
  );
  viewer.addEventListener("pick", (event) => objectsView.select(/** @type {CustomEvent<number>} */ (event).detail), {
    signal,
  });
}

/** Describe the model, the diameter, the confidence and the duration of a job. @param {Job} job */
function createJobDescription(job) {
  const seconds = Object.values(job.seconds).reduce((sum, stageSeconds) => sum + stageSeconds, 0);
  const parts = [
    job.model,
    job.diameter && formatLengths(job.diameter).replace("; ", ", "),
    typeof job.confidence === "number" &&
      element(
        "abbr",
        { title: CONFIDENCE_EXPLANATION, tabIndex: 0 },
        `confidence ${Math.round(job.confidence * 100)}%`,
      ),
    `${formatNumber(seconds, 2)}\u00a0s`,
  ].filter((part) => part !== null && part !== undefined && part !== false && part !== "");
  const children = parts.flatMap((part, index) => (index === 0 ? [part] : [" · ", part]));
  return element("p", { class: "muted small" }, ...children);
}

/**
 * Create the buttons that switch between the results for the stack.
 * @param {Job} job @param {string} stack
 */
function createResultSwitcher(job, stack) {
  const root = element("div", { class: "result-switcher", role: "group", "aria-label": "Results of this stack" });
  const createButtons = () => {
    const results = listResults(stack);
    const otherJob = results.find((entry) => entry.job !== job.id)?.job;
    root.hidden = otherJob === undefined;
    if (otherJob === undefined) return [];
    const buttons = results.map((entry) => {
      const onclick = () => {
        location.hash = `job=${entry.job}`;
      };
      const ariaCurrent = entry.job === job.id ? "true" : undefined;
      return element("button", { type: "button", "aria-current": ariaCurrent, onclick }, describeResult(entry));
    });
    return [...buttons, element("a", { href: `#compare=${job.id},${otherJob}`, class: "compare" }, "Side by side")];
  };
  /** @param {number} editCount @param {number | null} objectCount number of objects after the corrections, null if the objects have not been counted yet */
  const updateCount = (editCount, objectCount) => {
    if (editCount > 0 && objectCount === null) return;
    rememberJob({ job: job.id, corrected: editCount > 0 ? objectCount : null });
    redraw(root, createButtons);
  };
  redraw(root, createButtons);
  return { root, updateCount };
}

/**
 * Create a tab list.
 * @param {{text: string, page: HTMLElement, ontoggle?: (isVisible: boolean) => void}[]} pages ontoggle: called when a page is shown or hidden
 * @returns {[HTMLElement, HTMLElement]} the tabs and the pages
 */
function createTabs(pages) {
  let currentIndex = 0;
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
  /** @param {number} selectedIndex */
  function select(selectedIndex) {
    items.forEach(({ tab, panel }, index) => {
      tab.setAttribute("aria-selected", String(index === selectedIndex));
      tab.tabIndex = index === selectedIndex ? 0 : -1;
      panel.hidden = index !== selectedIndex;
    });
    if (selectedIndex !== currentIndex) {
      pages[currentIndex].ontoggle?.(false);
      pages[selectedIndex].ontoggle?.(true);
    }
    currentIndex = selectedIndex;
    return items[selectedIndex].tab;
  }
  select(0);
  return [
    element("div", { class: "tabs", role: "tablist", "aria-label": "Result" }, ...items.map(({ tab }) => tab)),
    element("div", { class: "pages" }, ...items.map(({ panel }) => panel)),
  ];
}
