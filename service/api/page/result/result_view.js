/** Result of a job: summary, notes, and the Objects, Export and Correct tabs. The result is linked to the views of the stack. */

import { element, redraw } from "../core/elements.js";
import { formatCount, formatNumber, formatPart } from "../core/format.js";
import { describeUsedDiameter } from "../core/terminology.js";
import { CorrectView } from "../correct/correct_view.js";
import { ResultLabels } from "../correct/label_sources.js";
import { rememberJob } from "../stack/recent_jobs.js";
import { encodeCsv } from "../volumes/label_measure.js";
import { completeCorrectedTable } from "../volumes/object_table.js";
import { ClassLegend } from "./class_legend.js";
import { describeResult, listResults } from "./compare_view.js";
import { createExportView } from "./export_view.js";
import { createNotes } from "./notes.js";
import { ObjectsView } from "./objects_view.js";
import { drawScreenshot } from "./screenshots.js";
import { createFilterQuery, loadLimits, saveLimits } from "./stored_limits.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {import("../volumes/object_table.js").Table} Table */
/** @typedef {{getTimePoint: () => number, goToTimePoint: (time: number) => Promise<void>, events: EventTarget}} TimeNavigation reads and changes the displayed time point; `events` dispatches `leaving` before and `time` after each change */

const CONFIDENCE_EXPLANATION =
  "The expected match with the true objects (F1 score): 100% if all objects are right and none is missing. If the table has a column “Conf.”, this is its mean: of ten objects with 90%, nine are right. Otherwise it is the probability that the result as a whole is good.";
/** Parameters that make a model keep all objects that it finds, by the decoding of the model. @type {Record<string, Record<string, string>>} */
const KEEP_ALL_PARAMETERS = {
  boundaries: { minimum_size: "1", border: "keep" },
  flows: { minimum_size: "1", min_confidence: "0", border: "keep" },
  instances: { minimum_size: "1", min_confidence: "0", border: "keep" },
  "star-convex": { minimum_size: "1", min_confidence: "0", border: "keep" },
};

/**
 * Show the result of a finished job.
 * @param {HTMLElement} root
 * @param {{job: Job, stack: string, name: string}} result stack: id of the stack, "" if it is no longer stored; name: file name
 * @param {Table | null} table
 * @param {{viewer: Viewer, capabilities: import("openapi").CallerLimits, signal: AbortSignal, results: Job[],
 *   segmentWith: (changes: Record<string, string>) => Promise<void>, compareModels: () => void, timeNavigation: TimeNavigation,
 *   channel: number, channelNames: string[], decoding: string, classNames: string[]}} context
 *   `signal` ends the link to the views; `results` are all results of the stack; `segmentWith` segments the stack again with changed parameters;
 *   `channel` is the index of the segmented channel, -1 if unknown; `decoding` is that of the model, "" if unknown; `classNames` are empty if unknown
 */
export function showResult(root, result, table, context) {
  const { viewer, capabilities, signal, results, segmentWith, compareModels, timeNavigation } = context;
  const { channel, channelNames } = context;
  const { job, stack, name } = result;
  const keepAllParameters = stack ? KEEP_ALL_PARAMETERS[context.decoding] : undefined;
  const keepsAll = Object.entries(keepAllParameters ?? {}).every(
    ([parameter, value]) => String(job.parameters[parameter]) === value,
  );
  const viewOptions = {
    limits: loadLimits(job.id),
    channel,
    channelNames,
    segmentWithoutFilters: keepAllParameters && !keepsAll ? () => segmentWith(keepAllParameters) : null,
  };
  const hasClasses = job.objects === null;
  const correctView = hasClasses
    ? null
    : new CorrectView(
        new ResultLabels(result, table),
        name,
        viewer,
        timeNavigation.getTimePoint(),
        capabilities,
        signal,
      );
  const summary = element("p", { class: "big", id: "summary" });
  const tables = new ObjectTables(job, table, viewOptions, summary, viewer, timeNavigation, signal);
  const exportView = createExportView(job, name, capabilities.temporary_jobs, () => drawScreenshot(viewer));
  let editCount = 0;
  const updateExport = () => exportView.show(describeExport(job, tables, correctView, editCount));
  tables.addEventListener("change", updateExport);
  updateExport();
  const tabElements = createTabs([
    { text: hasClasses ? "Classes" : "Objects", page: hasClasses ? createClassLegend(context) : tables.root },
    { text: "Export", page: exportView.root },
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
    correctView.root.addEventListener("count", (event) => {
      const { objectCount, ...counts } = /** @type {CustomEvent<{editCount: number, objectCount: number | null}>} */ (
        event
      ).detail;
      editCount = counts.editCount;
      if (objectCount !== null && !job.time_points && isCorrecting)
        tables.showCount(editCount > 0 ? objectCount : null);
      if (!job.time_points) resultSwitcher.updateCount(editCount, objectCount);
      badge.textContent = editCount > 0 ? formatCount(editCount, "correction") : "";
      updateExport();
    });
    correctView.root.addEventListener("corrected", (event) => {
      const correctedTable = /** @type {CustomEvent<Table | null>} */ (event).detail;
      const editedIds = correctView.editor?.listEditedIds() ?? new Set();
      tables.showCorrectedObjects(
        correctedTable && table ? completeCorrectedTable(correctedTable, table, editedIds, channel) : correctedTable,
      );
    });
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

/** Create a legend of the classes that the views show. @param {{viewer: Viewer, timeNavigation: TimeNavigation, signal: AbortSignal, classNames: string[]}} context */
function createClassLegend({ viewer, timeNavigation, signal, classNames }) {
  const legend = new ClassLegend(classNames);
  const show = () => legend.show(viewer.scene.state);
  timeNavigation.events.addEventListener("time", show, { signal });
  show();
  return legend.root;
}

/**
 * Describe the objects that exported files contain: the objects that the views show.
 * @param {Job} job @param {ObjectTables} tables @param {CorrectView | null} correctView @param {number} editCount number of corrections
 * @returns {import("./export_view.js").ExportContent}
 */
function describeExport(job, tables, correctView, editCount) {
  const view = tables.displayedView;
  if (job.objects === null) return { description: "The labels are classes.", filterQuery: "", corrected: null };
  const countText = view
    ? formatPart(view.rows.length, view.table.length, "object")
    : formatCount(job.objects, "object");
  const filterText = view && view.limits.size > 0 ? "within the filters of the Objects tab, " : "";
  const corrections = formatCount(editCount, "correction");
  const correctionsText = tables.showsCorrections
    ? `with ${corrections}`
    : editCount > 0
      ? `without your ${corrections}, which you can export on the Correct tab`
      : "without corrections";
  const corrected = tables.showsCorrections &&
    view &&
    correctView && {
      labels: (/** @type {import("../correct/correct_view.js").LabelsKind} */ kind) =>
        correctView.encodeLabels(kind, view.hiddenFlags),
      table: () => new Blob([encodeCsv(view.table, view.rows.toSorted())], { type: "text/csv" }),
    };
  return {
    description: `The files contain ${countText}, ${filterText}${correctionsText}.`,
    filterQuery: view ? createFilterQuery(view.limits) : "",
    corrected: corrected || null,
  };
}

/** Table of objects that switches between the original and the corrected labels. It dispatches `change` when other objects are displayed. */
class ObjectTables extends EventTarget {
  /**
   * @param {Job} job @param {Table | null} table of the objects without corrections, null if the result has no table
   * @param {import("./objects_view.js").ViewOptions} viewOptions @param {HTMLElement} summary
   * @param {Viewer} viewer @param {TimeNavigation} timeNavigation @param {AbortSignal} signal
   */
  constructor(job, table, viewOptions, summary, viewer, timeNavigation, signal) {
    super();
    this.job = job;
    this.viewOptions = viewOptions;
    this.originalView = table && new ObjectsView(table, viewOptions);
    this.summary = summary;
    this.viewer = viewer;
    this.timeNavigation = timeNavigation;
    this.signal = signal;
    /** @type {ObjectsView | null} */
    this.displayedView = null;
    this.linkAbort = new AbortController();
    this.root = element("div", { class: "tables" });
    this.#show(this.originalView);
  }

  get showsCorrections() {
    return this.displayedView !== this.originalView;
  }

  /** @param {Table | null} table of the corrected objects, null to show the objects without corrections */
  showCorrectedObjects(table) {
    const correctedView = table && new ObjectsView(table, this.viewOptions);
    this.#show(correctedView ?? this.originalView);
  }

  /** Show the number of objects while labels are being corrected. @param {number | null} objectCount null if there are no corrections */
  showCount(objectCount) {
    this.summary.textContent =
      objectCount === null ? this.#summarize(false) : `${formatCount(objectCount, "object")}. Includes corrections.`;
  }

  /** Describe the displayed objects. @param {boolean} includesCorrections */
  #summarize(includesCorrections) {
    const { job, originalView, displayedView } = this;
    const view = includesCorrections ? displayedView : originalView;
    if (view) return includesCorrections ? `${view.summarize()} Includes corrections.` : view.summarize();
    return job.objects === null ? "The labels are classes, not objects." : `${formatCount(job.objects, "object")}.`;
  }

  /** @param {ObjectsView | null} objectsView */
  #show(objectsView) {
    this.linkAbort.abort();
    this.linkAbort = new AbortController();
    this.displayedView = objectsView;
    const emptyText = element("p", { class: "muted" }, "There is no table of objects for this result.");
    this.root.replaceChildren(objectsView?.root ?? emptyText);
    if (objectsView) {
      const signal = AbortSignal.any([this.linkAbort.signal, this.signal]);
      linkTableAndViews(this.viewer, objectsView, this.timeNavigation, signal);
      objectsView.addEventListener("filter", () => this.#onFilter(objectsView), { signal });
      // The limits may have been changed in the other view.
      objectsView.showLimits();
    }
    this.#showSummary();
  }

  /** Save the changed limits. @param {ObjectsView} objectsView */
  #onFilter(objectsView) {
    saveLimits(this.job.id, objectsView.limits, objectsView.rows.length);
    this.#showSummary();
  }

  #showSummary() {
    this.summary.textContent = this.#summarize(this.showsCorrections);
    this.dispatchEvent(new Event("change"));
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
  objectsView.addEventListener("filter", () => viewer.scene.set({ hiddenFlags: objectsView.hiddenFlags }), { signal });
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
    describeUsedDiameter(job.diameter),
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
