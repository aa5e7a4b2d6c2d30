/** Row of a batch: thumbnail, metadata, state and buttons of one stack. */

import { connection } from "../core/connection.js";
import { button, element, formatMessage, redraw } from "../core/elements.js";
import { showError } from "../core/error_bar.js";
import { formatBytes, formatCount, formatDuration, formatNumber, formatPart } from "../core/format.js";
import { requestJson } from "../core/requests.js";
import { describeSetting, toPageTerms } from "../core/terminology.js";
import { describeSuggestion, getSuggestion } from "../result/advice.js";
import { describeObjectCount, loadRecentJobs } from "../stack/recent_jobs.js";
import { describeMissingResult, formatConfidence } from "./batch_results.js";
import { countObjects } from "./corrections.js";
import { getPhase } from "./entries.js";

/** @typedef {import("./batch.js").Batch} Batch */
/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {import("./entries.js").Phase} Phase */
/** @typedef {import("../core/elements.js").Child} Child */
/** @typedef {import("./corrections.js").CorrectionCounts} CorrectionCounts */
/** @typedef {{open: (entry: Entry) => void, edit: (entry: Entry) => void}} RowActions */

/** Short titles of phases. Phases without a title show their progress. @type {Partial<Record<Phase, string>>} */
const PHASE_TITLES = {
  checking: "Checking the job",
  gone: "Not stored anymore",
  waiting: "In the queue",
  loading: "Loading the model",
  running: "Segmenting",
  failed: "Failed",
  cancelled: "Canceled",
  expired: "Expired",
  cancelling: "Canceling",
  uploading: "Uploading",
  queued: "Waiting to be uploaded",
  missing: "Not uploaded",
  inspecting: "Reading the metadata",
  question: "Needs a setting",
  problem: "Cannot be segmented",
  ready: "Ready",
  requested: "Waiting for a place in the queue",
};
const CANCELLABLE_PHASES = [
  "checking",
  "waiting",
  "loading",
  "running",
  "uploading",
  "queued",
  "inspecting",
  "requested",
];
/** Phases that the service reports, and that can change without a request from this page. */
const SERVICE_PHASES = ["waiting", "loading", "running"];
/** Phases of stacks without a result and without a job that could still have one. */
const REMOVABLE_PHASES = ["ready", "question", "problem", "missing", "failed", "cancelled", "expired", "gone"];
const RETRYABLE_PHASES = ["problem", "failed", "cancelled", "expired", "gone"];
const WARNING_PHASES = ["problem", "failed", "gone", "expired", "missing", "question"];

const CORRECTED_TITLE = "Saved in this browser. The table and the archive contain the corrected objects.";
/** Progress while the service does not respond. */
const DISCONNECTED_PROGRESS = { text: "", fraction: null };

/** A list item whose parts are redrawn only if they have changed, so that open details and the focus are kept. */
export class EntryRow {
  /** @param {Batch} batch @param {Entry} entry @param {RowActions} actions @param {CorrectionCounts} correctionCounts */
  constructor(batch, entry, actions, correctionCounts) {
    this.batch = batch;
    this.entry = entry;
    this.actions = actions;
    this.pictureCell = element("div", { class: "batch-picture" });
    this.textCell = element("div", { class: "batch-text" });
    this.progressBar = element("progress", { max: 1, "aria-label": `Progress of ${entry.path}` });
    this.progressText = element("span", { class: "muted small" });
    this.stateCell = element("div", { class: "batch-state" });
    this.buttonCell = element("div", { class: "batch-buttons" });
    this.root = element("li", {}, this.pictureCell, this.textCell, this.stateCell, this.buttonCell);
    /** What each part depends on. @type {Map<HTMLElement, unknown[]>} */
    this.shownContents = new Map();
    /** A newer job for the stack, submitted while the stack was open in the viewer. */
    this.newerJob = findNewerJob(entry);
    this.update(correctionCounts);
  }

  /** @param {CorrectionCounts} correctionCounts */
  update(correctionCounts) {
    const { entry, batch } = this;
    const phase = getPhase(entry);
    const { thumbnail, inspection, inspectedKey, parameters, problem, job, report } = entry;
    const isStale = batch.isStale(entry);
    // The state is the last known one.
    const isUnknown = connection.state.lostAt !== null && SERVICE_PHASES.includes(phase);
    this.root.dataset.phase = phase;
    this.#redraw(this.pictureCell, [thumbnail], () => [this.#createPicture()]);
    this.#redraw(this.textCell, [inspection !== null, inspectedKey, JSON.stringify(parameters)], () =>
      this.#createTexts(),
    );
    const reason = problem?.message ?? inspection?.problem;
    this.#redraw(
      this.stateCell,
      [phase, job, report?.objects, isStale, isUnknown, reason, correctionCounts.get(job)],
      () => this.#createState(phase, isStale, isUnknown, correctionCounts),
    );
    this.#redraw(this.buttonCell, [phase, entry.stack, entry.parts.length], () => this.#createButtons(phase));
    this.#updateProgress(phase);
  }

  /** @param {HTMLElement} cell @param {unknown[]} content that the cell depends on @param {() => Child[]} create */
  #redraw(cell, content, create) {
    const shownContent = this.shownContents.get(cell);
    if (shownContent && content.every((value, index) => value === shownContent[index])) return;
    this.shownContents.set(cell, content);
    redraw(cell, create);
  }

  #createPicture() {
    const { thumbnail } = this.entry;
    return thumbnail
      ? element("img", { src: thumbnail, alt: "", width: 96, height: 72 })
      : element("span", { class: "no-thumbnail", "aria-hidden": "true" });
  }

  #createTexts() {
    const { path, bytes, inspection, parameters } = this.entry;
    const folder = path.includes("/") ? path.slice(0, path.lastIndexOf("/") + 1) : "";
    const notes = (inspection?.file.notes ?? []).map(toPageTerms);
    return [
      element("span", { class: "muted small batch-folder" }, folder),
      element("strong", { class: "batch-name", title: path }, path.slice(folder.length)),
      inspection
        ? element("p", { class: "muted small" }, ...describeFile(inspection.file))
        : element("p", { class: "muted small" }, formatBytes(bytes)),
      Object.keys(parameters).length > 0 && element("p", { class: "small" }, describeOwnSettings(parameters)),
      notes.length > 0 &&
        element(
          "details",
          {},
          element("summary", { class: "small" }, formatCount(notes.length, "note")),
          element("ul", { class: "notes" }, ...notes.map((note) => element("li", {}, formatMessage(note)))),
        ),
    ];
  }

  /** @param {Phase} phase @param {boolean} isStale @param {boolean} isUnknown whether the state is the last known one @param {CorrectionCounts} correctionCounts @returns {Child[]} */
  #createState(phase, isStale, isUnknown, correctionCounts) {
    const newerText = phase === "done" && this.#hasNewerJob && this.#createNewerText();
    const staleText = isStale && element("p", { class: "small stale-text" }, "Made with other settings");
    if (phase === "done") return [...this.#createResult(correctionCounts), staleText, newerText];
    const isWarning = WARNING_PHASES.includes(phase);
    return [
      element("strong", { class: isWarning ? "warning-text" : "" }, PHASE_TITLES[phase]),
      isUnknown && element("p", { class: "muted small" }, "before the connection was lost"),
      isWarning && element("p", { class: "small" }, formatMessage(describeMissingResult(this.entry))),
      this.progressBar,
      this.progressText,
      staleText,
    ];
  }

  get #hasNewerJob() {
    return this.newerJob !== null && this.newerJob.job !== this.entry.job;
  }

  #createNewerText() {
    const { batch, entry, newerJob } = this;
    const adoptNewerJob = async () => {
      try {
        batch.adopt(entry, await requestJson(`jobs/${newerJob?.job}`));
      } catch (error) {
        showError(error);
      }
    };
    const node = button("Use it here", adoptNewerJob, "link");
    node.ariaLabel = `Use the newer result: ${entry.path}`;
    return element(
      "p",
      { class: "small" },
      newerJob && `A newer result of ${newerJob.model.split("/")[0]} has ${describeObjectCount(newerJob)}. `,
      node,
    );
  }

  /** @param {CorrectionCounts} correctionCounts @returns {Child[]} */
  #createResult(correctionCounts) {
    const { job, report } = this.entry;
    if (report === null) return [];
    const confidence = formatConfidence(report.confidence ?? null);
    const warnings = report.warnings.map(toPageTerms);
    const { shown, total, isOutdated } = countObjects(this.entry, correctionCounts);
    const countText = total === null ? "Done" : formatPart(shown, total, "object");
    const corrections = correctionCounts.get(job)?.corrections;
    return [
      element("strong", {}, isOutdated ? `${countText} before` : countText),
      corrections !== undefined &&
        element("span", { class: "badge", title: CORRECTED_TITLE }, formatCount(corrections, "correction")),
      element(
        "p",
        { class: report.doubt ? "warning-text small" : "muted small" },
        report.doubt ? `Low confidence${confidence && `, ${confidence}`}` : confidence && `Confidence ${confidence}`,
      ),
      this.#createSuggestion(report),
      warnings.length > 0 &&
        element(
          "details",
          {},
          element("summary", { class: "small" }, formatCount(warnings.length, "note")),
          element("ul", { class: "notes" }, ...warnings.map((warning) => element("li", {}, formatMessage(warning)))),
        ),
    ];
  }

  /** Create a button that follows the advice of the service, unless the user has followed it here or in the viewer. @param {import("openapi").JobReport} report @returns {Child} */
  #createSuggestion(report) {
    const { batch, entry } = this;
    const suggestion = getSuggestion(report);
    if (suggestion === null || suggestion.parameter in entry.parameters || entry.stack === "") return false;
    if (this.#hasNewerJob) return false;
    const { parameter, value } = suggestion;
    const node = button(describeSuggestion(suggestion), () => batch.runWith(entry, { [parameter]: value }), "link");
    node.ariaLabel = `${node.textContent}: ${entry.path}`;
    return node;
  }

  /** @param {Phase} phase @returns {Child[]} */
  #createButtons(phase) {
    const { entry, batch, actions } = this;
    const canOpen = entry.stack !== "" && !["uploading", "inspecting", "problem"].includes(phase);
    const canRetry = RETRYABLE_PHASES.includes(phase) && (entry.stack !== "" || entry.parts.length > 0);
    /** @param {string} text @param {() => unknown} action @param {string} [className] */
    const create = (text, action, className = "secondary") => {
      const node = button(text, action, className);
      node.ariaLabel = `${text}: ${entry.path}`;
      return node;
    };
    return [
      (canOpen || phase === "done") && create("Open", () => actions.open(entry)),
      ["question", "ready", "done"].includes(phase) &&
        entry.stack !== "" &&
        create("Settings", () => actions.edit(entry), phase === "question" ? "primary" : "secondary"),
      CANCELLABLE_PHASES.includes(phase) && create("Cancel", () => batch.cancel(entry)),
      canRetry && create("Try again", () => batch.retry(entry)),
      REMOVABLE_PHASES.includes(phase) && this.#createRemoveButton(),
    ];
  }

  #createRemoveButton() {
    const node = button("×", () => this.batch.remove(this.entry), "quiet icon");
    node.ariaLabel = `Remove: ${this.entry.path}`;
    node.title = "Remove from the list";
    return node;
  }

  /** @param {Phase} phase */
  #updateProgress(phase) {
    const { entry, progressBar, progressText } = this;
    const { text, fraction } =
      connection.state.lostAt === null ? describeProgress(entry, phase) : DISCONNECTED_PROGRESS;
    progressBar.hidden = fraction === null;
    if (fraction === null) progressBar.removeAttribute("value");
    else progressBar.value = fraction;
    progressText.textContent = text;
  }
}

/** @param {Entry} entry @returns {import("../stack/recent_jobs.js").RecentJob | null} the newest job for the stack, if it is newer than the job of the entry */
function findNewerJob({ stack, job, report }) {
  if (stack === "" || report === null) return null;
  const newerJobs = loadRecentJobs().filter(
    (recentJob) => recentJob.stack === stack && recentJob.job !== job && recentJob.objects !== null,
  );
  return newerJobs.find(({ created }) => Date.parse(created) > Date.parse(report.created)) ?? null;
}

/** Describe the size, voxel size, axes and data type of a stack. @param {import("openapi").Description} file @returns {Child[]} */
function describeFile(file) {
  const [, z, y, x] = file.shape;
  const voxelSize = file.voxel_size;
  const sizeText = voxelSize
    ? [voxelSize.x, voxelSize.y, voxelSize.z].map((length) => formatNumber(length)).join(" × ")
    : "";
  const texts = [
    `${x} × ${y} × ${z} voxels`,
    voxelSize ? `${sizeText} µm` : element("span", { class: "uncertain-text" }, "voxel size unknown"),
    `axes ${file.axes}`,
    file.channels.length > 1 && formatCount(file.channels.length, "channel"),
    file.times > 1 && formatCount(file.times, "time point"),
    file.scenes.length > 1 && formatCount(file.scenes.length, "image"),
    file.dtype,
  ].filter((text) => text !== false);
  return texts.flatMap((text, index) => (index > 0 ? [" · ", text] : [text]));
}

/** @param {import("./entries.js").Parameters} parameters @returns {string} */
function describeOwnSettings(parameters) {
  const texts = Object.entries(parameters).map(([name, value]) =>
    value ? describeSetting(name, value) : `${describeSetting(name, "")}: default`,
  );
  return `Own settings: ${texts.join(", ")}`;
}

/** Describe the progress that the service or the browser reports. @param {Entry} entry @param {Phase} phase @returns {{text: string, fraction: number | null}} */
function describeProgress({ upload, report, bytes }, phase) {
  if (phase === "uploading" && upload)
    return { text: `${formatBytes(bytes * upload.fraction)} of ${formatBytes(bytes)}`, fraction: upload.fraction };
  if (report === null || !["waiting", "loading", "running"].includes(phase)) return { text: "", fraction: null };
  const { done, total } = report.progress;
  const leftText = report.seconds_left === null ? "" : `${formatDuration(report.seconds_left)} left`;
  if (phase !== "running" || total === 0) {
    const aheadText = report.position && report.position > 1 ? `${formatCount(report.position - 1, "job")} ahead` : "";
    return { text: [aheadText, leftText].filter(Boolean).join(", "), fraction: null };
  }
  const percentText = `${Math.floor((100 * done) / total)}%`;
  return { text: [percentText, leftText].filter(Boolean).join(", "), fraction: Math.min(done / total, 1) };
}
