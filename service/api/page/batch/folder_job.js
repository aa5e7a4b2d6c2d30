/** Progress and results of a job on a folder on the host of the service. */

import { connection } from "../core/connection.js";
import { button, element, formatMessage } from "../core/elements.js";
import { showError } from "../core/error_bar.js";
import { formatCount, formatDuration, formatNumber } from "../core/format.js";
import { isFinished } from "../core/job_requests.js";
import { requestJson } from "../core/requests.js";
import { toPageTerms } from "../core/terminology.js";
import { rememberJob } from "../stack/recent_jobs.js";
import { createEntry } from "./entries.js";
import { JobWatcher } from "./job_watcher.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {{stack: string, labels: string | null, objects: number | null, seconds: number, warnings: string[], doubtful: boolean, problem: string | null}} StackOutcome */
/** @typedef {{output: string, report: string, table: string, objects: number | null, stacks: StackOutcome[]}} FolderResult */

/** @param {Job} job @returns {boolean} whether the job segments a folder on the host */
export function isFolderJob({ parameters }) {
  return String(parameters.input ?? "").endsWith("/");
}

/** Connects a view of the job with its reports. */
class FolderJobView {
  /** @param {HTMLElement} root @param {() => void} oncancel */
  constructor(root, oncancel) {
    this.titleText = element("p", { class: "big", role: "status" });
    this.progressBar = element("progress", { max: 1, "aria-label": "Finished stacks" });
    this.detailText = element("p", { class: "muted" });
    this.details = element("div", { class: "batch-content-part" });
    this.cancelButton = button("Cancel", oncancel, "secondary");
    root.replaceChildren(
      element(
        "section",
        { class: "batch-content folder-job", "aria-label": "Folder on the server" },
        element(
          "div",
          { class: "batch-head" },
          element("div", { class: "row between" }, this.titleText, this.cancelButton),
          this.progressBar,
        ),
        this.detailText,
        this.details,
      ),
    );
  }

  /** @param {Job} report @param {boolean} isCancelling */
  showReport(report, isCancelling) {
    const hasEnded = isFinished(report.state);
    const { done, total } = report.stacks ?? { done: 0, total: 0 };
    setText(this.titleText, describeState(report, isCancelling));
    setText(this.detailText, describeDetails(report));
    this.progressBar.hidden = hasEnded;
    this.cancelButton.hidden = hasEnded;
    this.cancelButton.disabled = isCancelling;
    if (total) this.progressBar.value = done / total;
  }

  showGone() {
    setText(this.titleText, "The service no longer stores this job");
    setText(this.detailText, "The files in the results folder are not affected.");
    this.progressBar.hidden = true;
    this.cancelButton.hidden = true;
  }
}

/** Show the progress of a job until it has ended, and then its results. @param {HTMLElement} root @param {string} id @param {AbortSignal} signal stops following the job */
export function showFolderJob(root, id, signal) {
  const entry = { ...createEntry(0, { path: id, parts: [], skipReason: "" }), job: id };
  const batchAbort = new AbortController();
  signal.addEventListener("abort", () => batchAbort.abort());
  const view = new FolderJobView(root, () => {
    entry.isCancelling = true;
    if (entry.report) view.showReport(entry.report, true);
  });
  const watcher = new JobWatcher({ entries: [entry], batchAbort }, (error) => {
    const { report, isGone, isCancelling } = entry;
    if (signal.aborted) return;
    if (isGone) return view.showGone();
    if (report === null) return;
    view.showReport(report, isCancelling);
    if (error === null && isFinished(report.state)) showResult(view.details, report, signal).catch(showError);
  });
  // Without a response, the time left is not known.
  connection.subscribe(() => {
    view.detailText.hidden = connection.state.lostAt !== null;
  }, signal);
  watcher.run();
}

/** Change the text of a live region only if it differs. @param {HTMLElement} node @param {string} text */
function setText(node, text) {
  const content = formatMessage(text);
  if (node.textContent !== content.textContent) node.replaceChildren(content);
}

/** @param {Job} report @param {boolean} isCancelling */
function describeState({ state, stacks, parameters }, isCancelling) {
  const folder = String(parameters.input);
  const countText = stacks ? `${stacks.done} of ${formatCount(stacks.total, "stack")} segmented` : "";
  if (isFinished(state)) {
    const titles = { done: "Done", failed: "Failed", cancelled: "Canceled", expired: "Expired" };
    return [titles[/** @type {keyof typeof titles} */ (state)], folder, countText].filter(Boolean).join(" · ");
  }
  if (isCancelling) return `Canceling · ${folder}`;
  return [state === "running" ? "Segmenting" : "In the queue", folder, countText].filter(Boolean).join(" · ");
}

/** @param {Job} report */
function describeDetails({ state, seconds_left: secondsLeft, parameters, problem }) {
  if (problem) return toPageTerms(problem.detail);
  const leftText = secondsLeft === null || isFinished(state) ? "" : `About ${formatDuration(secondsLeft)} left. `;
  return `${leftText}Results folder: ${parameters.output_to}`;
}

/** Show the outcome of each stack. @param {HTMLElement} root @param {Job} report @param {AbortSignal} signal */
async function showResult(root, report, signal) {
  rememberJob({ job: report.id, objects: report.objects, model: report.model, created: report.created });
  const warnings = report.warnings.map((warning) =>
    element("li", { class: "warning" }, formatMessage(toPageTerms(warning))),
  );
  if (report.result === null) {
    root.replaceChildren(element("ul", { class: "notes" }, ...warnings));
    return;
  }
  /** @type {FolderResult} */
  const result = await requestJson(`jobs/${report.id}/result`, { signal });
  const headers = ["Stack", "Objects", "Labels", "Notes"].map((text) => element("th", { scope: "col" }, text));
  root.replaceChildren(
    element("p", {}, `Table: ${result.table}`),
    element("p", {}, `Report: ${result.report}`),
    element(
      "div",
      { class: "folder-table", tabIndex: 0, role: "region", "aria-label": "Results" },
      element(
        "table",
        { class: "status-table" },
        element("thead", {}, element("tr", {}, ...headers)),
        element("tbody", {}, ...result.stacks.map(createOutcomeRow)),
      ),
    ),
  );
}

/** @param {StackOutcome} outcome */
function createOutcomeRow({ stack, objects, labels, problem, warnings, doubtful }) {
  const notes = problem ? [problem] : warnings;
  return element(
    "tr",
    {},
    element("td", {}, stack),
    element("td", {}, objects === null ? "" : formatNumber(objects)),
    element("td", {}, labels ?? ""),
    element(
      "td",
      {},
      ...notes.map((note, index) =>
        element(
          "p",
          { class: problem || (doubtful && index === 0) ? "warning-text" : "muted" },
          formatMessage(toPageTerms(note)),
        ),
      ),
    ),
  );
}
