/** The result of a job: its words, notes, objects and what can be taken; linked with the views of the stack. */

import { button, element, redraw } from "../core/elements.js";
import { counted, number } from "../core/format.js";
import { pageWords, setting, widths } from "../core/words.js";
import { CorrectView } from "../correct/correct_view.js";
import { remember } from "../stack/recent_jobs.js";
import { describeResult, resultsOf } from "./compare_view.js";
import { ObjectsView } from "./objects_view.js";
import { takeView } from "./take_view.js";
import { drawPicture } from "./view_pictures.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {{at: () => number, go: (time: number) => Promise<void>, target: EventTarget}} Times the time point that is shown */

const PER_TIME_POINT =
  "Numbers and colours are of each time point: object 5 of one is not object 5 of the next. To follow objects, tick “Give objects one number through time”, and segment again.";
// More of them would push the table of objects off the screen of a laptop.
const SHOWN_NOTES = 2;
const AS_SEGMENTED = "These are the labels as they were segmented. Those with your corrections are under Correct.";

/**
 * @param {HTMLElement} root
 * @param {{job: Job, stack: string, name: string}} result of a job that is done; stack: its id, "" where it is not kept; name of the file
 * @param {import("../volumes/object_table.js").Table | null} table
 * @param {{viewer: Viewer, abilities: import("openapi").Abilities, signal: AbortSignal,
 *   segmentWith: (changed: Record<string, string>) => Promise<void>, times: Times}} around
 *   the signal ends the link with the views; `segmentWith` segments the stack anew with these parameters changed;
 *   `times` shows other time points
 */
export function showResult(root, result, table, { viewer, abilities, signal, segmentWith, times }) {
  const { job, stack, name } = result;
  const objects = table && new ObjectsView(table);
  const unnumbered = job.objects === null ? "The result has classes." : `${counted(job.objects, "object")}.`;
  const take = takeView(job, name, objects !== null, () => drawPicture(viewer));
  const correct = job.objects === null ? null : new CorrectView(result, viewer, times.at(), abilities, signal);
  const words = element("p", { class: "big", id: "words" }, objects ? objects.words() : unnumbered);
  const tables = new Tables(objects, words, viewer, times, signal);
  const pages = tabs([
    { text: "Objects", page: tables.root },
    { text: "Take", page: take },
    ...(correct
      ? [{ text: "Correct", page: correct.root, onshow: (/** @type {boolean} */ shown) => switchMode(shown) }]
      : []),
  ]);
  let correcting = false;
  /** @param {boolean} shown */
  async function switchMode(shown) {
    correcting = shown;
    if (shown) await correct?.enter();
    else {
      correct?.leave();
      viewer.scene.set({ hidden: tables.shown?.hidden ?? null });
    }
  }
  const results = versions(job, stack);
  if (correct) {
    const badge = element("span", { class: "badge", title: "Kept in this browser" });
    pages[0].lastElementChild?.append(badge);
    const note = element("p", { class: "muted small", hidden: true }, AS_SEGMENTED);
    take.prepend(note);
    correct.root.addEventListener("kept", (event) => {
      const { edits, objects } = /** @type {CustomEvent<{edits: number, objects: number | null}>} */ (event).detail;
      if (objects !== null && !job.time_points) tables.count(edits > 0 ? objects : null);
      if (!job.time_points) results.count(edits, objects);
      badge.textContent = edits > 0 ? counted(edits, "correction") : "";
      note.hidden = edits === 0;
    });
    correct.root.addEventListener("corrected", (event) => tables.correct(/** @type {CustomEvent} */ (event).detail));
    times.target.addEventListener("leaving", () => correct.leave(false), { signal });
    times.target.addEventListener("time", () => correct.goTo(times.at(), correcting), { signal });
  }
  root.replaceChildren(
    element(
      "div",
      { class: "result" },
      results.root,
      words,
      element("p", { class: "muted small" }, facts(job).join(" · ")),
      notes(job, stack ? segmentWith : null),
      ...pages,
    ),
  );
}

/** The table of objects, of the labels as segmented or as corrected. */
class Tables {
  /**
   * @param {ObjectsView | null} segmented null: the result has no table @param {HTMLElement} words count and size of what is shown
   * @param {Viewer} viewer @param {Times} times @param {AbortSignal} signal
   */
  constructor(segmented, words, viewer, times, signal) {
    this.segmented = segmented;
    this.words = words;
    this.viewer = viewer;
    this.times = times;
    this.signal = signal;
    /** @type {ObjectsView | null} */
    this.shown = null;
    this.linked = new AbortController();
    this.said = words.textContent ?? "";
    this.root = element("div", { class: "tables" });
    this.#show(segmented);
  }

  /** @param {import("../volumes/object_table.js").Table | null} table of the corrected objects, which the views show; null: they show the others */
  correct(table) {
    const corrected = table && new ObjectsView(table);
    if (corrected === null && this.shown === this.segmented) return;
    this.#show(corrected ?? this.segmented);
    this.words.textContent = corrected ? `${corrected.words()} As corrected.` : this.said;
  }

  /** Say how many objects there are while labels are corrected. @param {number | null} objects null: as segmented */
  count(objects) {
    this.words.textContent = objects === null ? this.said : `${counted(objects, "object")}. As corrected.`;
  }

  /** @param {ObjectsView | null} objects */
  #show(objects) {
    this.linked.abort();
    this.linked = new AbortController();
    this.shown = objects;
    const none = element("p", { class: "muted" }, "There is no table of objects for this result.");
    this.root.replaceChildren(objects?.root ?? none);
    if (objects) connect(this.viewer, objects, this.times, AbortSignal.any([this.linked.signal, this.signal]));
  }
}

/**
 * Link table and views in both directions.
 * @param {Viewer} viewer @param {ObjectsView} objects @param {Times} times @param {AbortSignal} signal
 */
function connect(viewer, objects, times, signal) {
  const several = objects.table.columns.has("time");
  if (several) objects.time = times.at();
  objects.addEventListener("choose", async (event) => {
    const label = /** @type {CustomEvent<number>} */ (event).detail;
    if (several && objects.time !== times.at()) await times.go(objects.time);
    const middle = objects.middle(label);
    if (middle) viewer.select(label, middle);
  });
  objects.addEventListener("filter", () => viewer.scene.set({ hidden: objects.hidden }));
  times.target.addEventListener(
    "time",
    () => {
      if (!several) return;
      objects.time = times.at();
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
  const confidence = typeof job.confidence === "number" ? [`confidence ${Math.round(job.confidence * 100)} %`] : [];
  const diameter = job.diameter ? [widths(job.diameter).replace("; ", ", ")] : [];
  return [job.model, ...diameter, ...confidence, `${number(seconds, 2)} s`];
}

/**
 * @param {Job} job
 * @param {((changed: Record<string, string>) => Promise<void>) | null} segmentWith null where the stack is not kept
 */
function notes(job, segmentWith) {
  const lowConfidence = /** @type {{detail: string, try: string} | null} */ (job.doubt);
  const doubt = lowConfidence ? pageWords(lowConfidence.detail) : "";
  const [parameter, value] = lowConfidence?.try.split("=") ?? [];
  const attempt = segmentWith !== null && value && { [parameter]: value };
  const own = job.time_points && !job.parameters.link && job.objects !== null ? [PER_TIME_POINT] : [];
  const texts = [...own, ...job.warnings.map(pageWords).filter((note) => note && note !== doubt)];
  return (
    (doubt || texts.length > 0) &&
    element(
      "ul",
      { class: "notes", "aria-label": "What to know about this result" },
      doubt &&
        element(
          "li",
          { class: "warning" },
          element("p", {}, doubt),
          attempt && button(`Try ${setting(parameter, value)}`, () => segmentWith(attempt)),
        ),
      ...(texts.length > SHOWN_NOTES
        ? [
            element(
              "li",
              {},
              element("details", {}, element("summary", {}, counted(texts.length, "note")), list(texts)),
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
 * The results of the same stack, to go from one to the other without moving.
 * @param {Job} job @param {string} stack
 */
function versions(job, stack) {
  const root = element("div", { class: "versions", role: "group", "aria-label": "Results of this stack" });
  const draw = () => {
    const all = resultsOf(stack);
    const other = all.find((entry) => entry.job !== job.id)?.job;
    root.hidden = other === undefined;
    if (other === undefined) return [];
    const tags = all.map((entry) => {
      const onclick = () => {
        location.hash = `job=${entry.job}`;
      };
      const current = entry.job === job.id ? "true" : undefined;
      return element("button", { type: "button", "aria-current": current, onclick }, describeResult(entry));
    });
    return [...tags, element("a", { href: `#compare=${job.id},${other}`, class: "beside" }, "Side by side")];
  };
  /** @param {number} edits @param {number | null} objects as corrected; null: not counted yet */
  const count = (edits, objects) => {
    if (edits > 0 && objects === null) return;
    remember({ job: job.id, corrected: edits > 0 ? objects : null });
    redraw(root, draw);
  };
  redraw(root, draw);
  return { root, count };
}

/**
 * @param {{text: string, page: HTMLElement, onshow?: (shown: boolean) => void}[]} pages
 * @returns {[HTMLElement, HTMLElement]} the list of tabs, and the pages
 */
function tabs(pages) {
  let current = 0;
  const made = pages.map(({ text, page }, place) => {
    const onkeydown = (/** @type {KeyboardEvent} */ event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) choose((place + step + pages.length) % pages.length).focus();
    };
    const id = `tab-${place}`;
    const onclick = () => choose(place);
    return {
      tab: element(
        "button",
        { type: "button", role: "tab", id, "aria-controls": `page-${place}`, onclick, onkeydown },
        text,
      ),
      panel: element("div", { role: "tabpanel", id: `page-${place}`, "aria-labelledby": id }, page),
    };
  });
  /** @param {number} chosen */
  function choose(chosen) {
    made.forEach(({ tab, panel }, place) => {
      tab.setAttribute("aria-selected", String(place === chosen));
      tab.tabIndex = place === chosen ? 0 : -1;
      panel.hidden = place !== chosen;
    });
    if (chosen !== current) {
      pages[current].onshow?.(false);
      pages[chosen].onshow?.(true);
    }
    current = chosen;
    return made[chosen].tab;
  }
  choose(0);
  return [
    element("div", { class: "tabs", role: "tablist", "aria-label": "Result" }, ...made.map(({ tab }) => tab)),
    element("div", { class: "pages" }, ...made.map(({ panel }) => panel)),
  ];
}
