/** Comparison of two results for one stack, in synchronized views side by side. */

import { element, formatMessage, setTitle } from "../core/elements.js";
import { formatCount, formatPart } from "../core/format.js";
import { buildQuery, requestJson } from "../core/requests.js";
import { describeObjectCount, loadRecentJobs } from "../stack/recent_jobs.js";
import { TimeSlider } from "../stack/time_slider.js";
import { Viewer } from "../viewer/viewer.js";
import { measureCorrectedObjects } from "../volumes/corrected_labels.js";
import * as correctionStore from "../volumes/correction_store.js";
import { compareObjects, countOverlaps } from "../volumes/label_agreement.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { createHiddenFlags, fetchTable, filterRows, findChannel, getIntensityColumn } from "../volumes/object_table.js";
import { fetchPlane, fetchVolume, findScene, makePlaneParameters } from "../volumes/planes.js";
import { formatTimePoint, getFirstTime } from "../volumes/time_points.js";
import { formatConfidence } from "./advice.js";
import { FilterPanel } from "./filter_panel.js";
import { loadLimits, saveLimits } from "./stored_limits.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../volumes/object_table.js").Table} Table */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/planes.js").Volume} Volume */

/** Delay after a change of the filters before the results are compared again. */
const COMPARE_DELAY_MILLISECONDS = 150;
const CLICK_HINT = "Click an object to select it in both results.";

/** @param {import("../stack/recent_jobs.js").RecentJob} entry @returns {string} description that distinguishes the result from other results for the same stack */
export function describeResult(entry) {
  return [entry.model, entry.parameters, describeObjectCount(entry)].filter(Boolean).join(" · ");
}

/** @param {string} stackId @returns {import("../stack/recent_jobs.js").RecentJob[]} results for a stack, newest first */
export function listResults(stackId) {
  return stackId ? loadRecentJobs().filter((entry) => entry.stack === stackId && entry.objects !== null) : [];
}

/** One of the two compared results, with its views. */
class ComparisonSide {
  /**
   * @param {string} title @param {Job} job @param {import("../stack/recent_jobs.js").RecentJob[]} results all results for the stack
   * @param {(job: string) => void} onselect called with the id of the selected job @param {() => void} onchange called when other objects are displayed
   */
  constructor(title, job, results, onselect, onchange) {
    this.job = job;
    /** Whether the result belongs to another scene than the displayed one, which is the scene of the left result. */
    this.isOtherScene = false;
    /** Labels without corrections. @type {Volume | null} */
    this.originalLabels = null;
    /** Editor of the labels with the corrections from this browser, null if there are no corrections. @type {LabelEditor | null} */
    this.editor = null;
    this.limits = loadLimits(job.id);
    /** Table of the objects without corrections, null if the objects were not measured. @type {Table | null} */
    this.originalTable = null;
    /** Index of the segmented channel, -1 if unknown. */
    this.channel = -1;
    /** The displayed time point, used if each time point has its own labels. */
    this.time = 0;
    this.onchange = onchange;
    const isListed = results.some((entry) => entry.job === job.id);
    const select = element(
      "select",
      { "aria-label": "Result", onchange: () => onselect(select.value) },
      ...(isListed ? [] : [element("option", { value: job.id }, job.model)]),
      ...results.map((entry) =>
        element("option", { value: entry.job, selected: entry.job === job.id }, describeResult(entry)),
      ),
    );
    const viewerRoot = element("div", {});
    this.filters = element("details", { class: "compare-filters", hidden: true });
    this.hint = element("p", { class: "muted small", "aria-live": "polite" }, CLICK_HINT);
    this.countText = element("p", { class: "big" });
    this.correctedCheckbox = element("input", {
      type: "checkbox",
      checked: true,
      onchange: () => {
        this.#showLabels();
        onchange();
      },
    });
    this.correctedText = element("span", {});
    this.correctedOption = element(
      "label",
      { class: "inline-label small", hidden: true },
      this.correctedCheckbox,
      this.correctedText,
    );
    const description = [job.model, job.diameter ?? ""].filter(Boolean).join(" · ");
    this.root = element(
      "section",
      { class: "side-by-side", "aria-label": `${title}: ${job.model}` },
      element(
        "header",
        { class: "panel" },
        select,
        element(
          "div",
          { class: "row between" },
          this.countText,
          element("a", { href: `#job=${job.id}`, class: "muted small", title: description }, "Open this result"),
        ),
        this.correctedOption,
        this.filters,
        this.hint,
      ),
      viewerRoot,
    );
    this.viewer = new Viewer(viewerRoot);
    this.#showLabels();
  }

  /**
   * Show labels.
   * @param {Volume | null} labels without corrections @param {import("../volumes/label_edit.js").Edit[]} edits stored corrections
   * @param {number} time displayed time point
   */
  setLabels(labels, edits, time) {
    const { voxelSize } = this.viewer.scene.state;
    const canApply = labels?.step.every((step) => step === 1) && edits.length > 0;
    const editor = labels && canApply ? new LabelEditor({ ...labels, data: labels.data.slice() }, voxelSize) : null;
    this.originalLabels = labels;
    this.editor = editor?.restore(edits) ? editor : null;
    this.time = time;
    this.correctedOption.hidden = edits.length === 0;
    this.correctedCheckbox.hidden = this.editor === null;
    const correctionsText = formatCount(edits.length, "correction");
    this.correctedText.textContent = this.editor
      ? `With ${correctionsText}`
      : `Not including ${correctionsText}. Open the result to see the corrected labels.`;
    this.#showLabels();
  }

  #showLabels() {
    const { job, originalLabels, viewer, originalTable } = this;
    const editor = this.correctedCheckbox.checked ? this.editor : null;
    viewer.setLabels(editor?.labels ?? originalLabels);
    // The filters of a time series apply to its table, which does not include corrections.
    const correctedTable = editor && (job.time_points ? null : this.#measureCorrectedObjects(editor));
    const table = editor ? correctedTable : originalTable;
    this.filters.hidden = table === null || table.length === 0;
    this.#showCount(editor && !job.time_points ? editor.objects.size : job.objects, null);
    if (table === null || this.filters.hidden) return;
    const panel = new FilterPanel(table, this.limits, getIntensityColumn(table, this.channel), null);
    const applyLimits = () => {
      const rows = filterRows(table, "label", false, this.limits);
      viewer.scene.set({ hiddenFlags: createHiddenFlags(table, rows, this.time) });
      panel.showCount(rows.length);
      this.#showCount(table.length, rows.length);
      return rows.length;
    };
    panel.addEventListener("change", () => {
      saveLimits(job.id, this.limits, applyLimits());
      this.onchange();
    });
    this.filters.replaceChildren(element("summary", { class: "small" }, "Filter the objects"), panel.root);
    applyLimits();
  }

  /** @param {LabelEditor} editor */
  #measureCorrectedObjects(editor) {
    const { image, isCalibrated } = this.viewer.scene.state;
    const [z, y, x] = editor.voxelSize;
    const labels = { editor, voxelSize: isCalibrated ? { z, y, x } : null };
    const hasImage = image !== null && image.data.length === editor.labels.data.length;
    return measureCorrectedObjects(labels, hasImage ? image : null, this.originalTable, this.channel);
  }

  /** @param {number | null} total number of objects, null for classes @param {number | null} shown number of objects within the filters, null if the objects are not filtered */
  #showCount(total, shown) {
    const { job } = this;
    const timeText = job.time_points ? ` at ${formatCount(job.time_points.total, "time point")}` : "";
    const countText = total === null ? "Classes" : formatPart(shown ?? total, total, "object") + timeText;
    const confidence = formatConfidence(job);
    this.countText.textContent = confidence ? `${countText}, confidence ${confidence}` : countText;
  }

  /** @param {number} id of the selected object, 0 for the background */
  showSelection(id) {
    this.hint.textContent = id === 0 ? "Selected: background." : `Selected: object ${id}.`;
  }
}

/**
 * Show the results of two jobs side by side.
 * @param {HTMLElement} root @param {string[]} ids of the jobs @param {AbortSignal} signal
 */
export async function showComparison(root, ids, signal) {
  /** @type {Job[]} */
  const jobs = await Promise.all(ids.map((id) => requestJson(`jobs/${id}`, { signal })));
  const stackId = String(jobs[0].parameters.stack ?? "");
  const results = listResults(stackId);
  let compareTimer = 0;
  const sides = jobs.map((job, index) => {
    const select = (/** @type {string} */ id) => {
      location.hash = `compare=${index === 0 ? [id, ids[1]] : [ids[0], id]}`;
    };
    return new ComparisonSide(index === 0 ? "Left" : "Right", job, results, select, () => {
      clearTimeout(compareTimer);
      compareTimer = window.setTimeout(() => comparison.update(), COMPARE_DELAY_MILLISECONDS);
    });
  });
  setTitle(`Compare two results of ${jobs[0].name}`);
  const agreementText = element("p", { class: "muted", role: "status" }, "Reading the stack");
  const comparison = new Comparison(sides, agreementText, signal);
  const timeSlider = new TimeSlider();
  root.replaceChildren(
    element("div", { class: "pair" }, ...sides.map((side) => side.root)),
    element("footer", { class: "panel" }, timeSlider.root, agreementText),
  );
  const { model: _model, measurements: _measurements, ...parameters } = jobs[0].parameters;
  const query = buildQuery({ ...parameters, model: jobs[0].model.split("/")[0] });
  /** @type {import("openapi").Inspection} */
  const { file } = await requestJson(`inspect?${query}`, { method: "POST", signal });
  const displayedScene = findScene(file.scenes, parameters.scene);
  for (const side of sides) {
    side.isOtherScene = findScene(file.scenes, side.job.parameters.scene) !== displayedScene;
    side.channel = findChannel(file.channels, side.job.parameters.channel);
    side.originalTable = await fetchTable(side.job, signal);
  }
  const ranges = jobs.map(getTimeRange);
  timeSlider.show(
    Math.min(...ranges.map(([first]) => first)),
    Math.max(...ranges.map(([, stop]) => stop)),
    getFirstTime(parameters.time),
  );
  let loadAbort = new AbortController();
  const showTimePoint = async () => {
    loadAbort.abort();
    loadAbort = new AbortController();
    const loadSignal = AbortSignal.any([signal, loadAbort.signal]);
    const planeParameters = makePlaneParameters(
      file,
      parameters,
      timeSlider.time,
      /** @type {string | undefined} */ (parameters.channel),
    );
    try {
      await loadTimePoint(sides, stackId, file, planeParameters, timeSlider.time, loadSignal);
      await comparison.update();
    } catch (error) {
      if (!loadSignal.aborted) agreementText.replaceChildren(formatMessage(error));
    }
  };
  timeSlider.addEventListener("change", showTimePoint);
  await showTimePoint();
  // Synchronize the views last. Otherwise, each view would follow the other view during setup.
  synchronizeSides(sides);
}

/** @param {Job} job @returns {[number, number]} the first time point of the job, and one past the last */
function getTimeRange({ parameters, time_points: timePoints }) {
  const first = getFirstTime(parameters.time);
  return [first, first + (timePoints?.total ?? 1)];
}

/**
 * Load a time point, and show it on both sides.
 * @param {ComparisonSide[]} sides @param {string} stackId @param {import("openapi").Description} file @param {Record<string, unknown>} planeParameters parameters that select the planes
 * @param {number} time @param {AbortSignal} signal
 */
async function loadTimePoint(sides, stackId, file, planeParameters, time, signal) {
  const fullShape = /** @type {Triple} */ (file.shape.slice(1));
  const source = { url: `stacks/${stackId}/planes`, parameters: planeParameters, fullShape };
  const image = await fetchVolume(source, signal, () => undefined);
  for (const side of sides) {
    const { viewer } = side;
    const isFirstImage = viewer.scene.state.image === null;
    const labelsSource = getLabelsSource(side, time, fullShape);
    viewer.planeLoader.fetchPlane = async (axis, position, planeSignal) => {
      const { plane, step } = await fetchPlane(source, axis, position, planeSignal);
      const labels = labelsSource && (await fetchPlane(labelsSource, axis, position, planeSignal));
      return { image: plane, labels: labels?.plane ?? null, step };
    };
    side.setLabels(null, [], time);
    viewer.open(image, file.voxel_size);
    // Keep the contrast when the time point changes.
    if (isFirstImage) viewer.adjustContrast();
    else viewer.refresh();
  }
  for (const side of sides) {
    const labelsSource = getLabelsSource(side, time, fullShape);
    side.hint.textContent = CLICK_HINT;
    if (side.isOtherScene) side.hint.textContent = "This result belongs to another scene of the file.";
    else if (!labelsSource) side.hint.textContent = `This result does not include time point ${formatTimePoint(time)}.`;
    if (!labelsSource) continue;
    const labels = await fetchVolume(labelsSource, signal, () => undefined);
    const edits = await correctionStore.loadCorrections(
      correctionStore.makeKey({ id: side.job.id, isSeries: Boolean(side.job.time_points) }, time),
    );
    signal.throwIfAborted();
    side.setLabels(labels, edits, time);
  }
}

/** @param {ComparisonSide} side @param {number} time @param {Triple} fullShape @returns {import("../volumes/planes.js").Source | null} the source of the labels at a time point, or null if the result does not include the displayed scene or the time point */
function getLabelsSource({ job, isOtherScene }, time, fullShape) {
  const [first, stop] = getTimeRange(job);
  if (isOtherScene || time < first || time >= stop) return null;
  const parameters = { time: job.time_points ? time - first : undefined };
  return { url: `jobs/${job.id}/planes`, parameters, fullShape };
}

/** Synchronize the position and the selection of both sides. @param {ComparisonSide[]} sides */
function synchronizeSides(sides) {
  for (const [index, { viewer }] of sides.entries()) {
    const otherSide = sides[1 - index];
    viewer.addEventListener("draw", () => otherSide.viewer.follow(viewer));
    viewer.addEventListener("pick", () => {
      otherSide.viewer.follow(viewer);
      otherSide.viewer.select(otherSide.viewer.getVisibleObject(otherSide.viewer.scene.state.position));
      for (const side of sides) side.showSelection(side.viewer.scene.state.selectedId);
    });
  }
}

/** Agreement of the displayed objects of two results. */
class Comparison {
  /** @param {ComparisonSide[]} sides @param {HTMLElement} text element that describes the agreement @param {AbortSignal} signal */
  constructor(sides, text, signal) {
    this.sides = sides;
    this.text = text;
    this.signal = signal;
    this.updateAbort = new AbortController();
    /** The compared labels and their overlaps, which do not depend on the filters. @type {{labels: Volume[], overlaps: import("../volumes/label_agreement.js").Overlap[]} | null} */
    this.counted = null;
  }

  /** Compare the results. Give corresponding objects the same color, and describe the agreement. */
  async update() {
    this.updateAbort.abort();
    this.updateAbort = new AbortController();
    const [left, right] = this.sides;
    const labels = this.sides.map(({ viewer }) => viewer.scene.state.labels).filter((volume) => volume !== null);
    this.text.textContent = "";
    if (right.isOtherScene) this.text.textContent = "The results belong to different scenes of the file.";
    else if (labels.length < 2) return;
    else if (labels[0].data.length !== labels[1].data.length)
      this.text.textContent = "The results cover different parts of the stack.";
    else if (left.job.objects !== null && right.job.objects !== null) {
      const overlaps = await this.#countOverlaps(labels, AbortSignal.any([this.signal, this.updateAbort.signal]));
      if (overlaps) this.#showAgreement(overlaps);
    }
  }

  /** @param {Volume[]} labels of both sides @param {AbortSignal} signal @returns {Promise<import("../volumes/label_agreement.js").Overlap[] | null>} null if aborted */
  async #countOverlaps(labels, signal) {
    if (this.counted?.labels.every((volume, index) => volume === labels[index])) return this.counted.overlaps;
    this.text.textContent = "Comparing the objects";
    const overlaps = await countOverlaps(labels[0], labels[1], signal);
    this.counted = overlaps && { labels, overlaps };
    return overlaps;
  }

  /** @param {import("../volumes/label_agreement.js").Overlap[]} overlaps of the objects of both sides */
  #showAgreement(overlaps) {
    const hiddenFlags = this.sides.map(({ viewer }) => viewer.scene.state.hiddenFlags);
    const { commonCount, objectCounts, colorIndices } = compareObjects(overlaps, hiddenFlags);
    this.sides.forEach(({ viewer }, index) => {
      viewer.scene.set({ colorIndices: colorIndices[index] });
    });
    const [leftCount, rightCount] = objectCounts.map((count) => count - commonCount);
    this.text.textContent = `${formatCount(commonCount, "object")} in both (overlap above 50%), ${leftCount} only in the first, ${rightCount} only in the second. Corresponding objects have the same color. Objects without a counterpart are gray.`;
  }
}
