/** View of a folder on the host of the service: the form that starts its segmentation, and the progress and results of the job. */

import { button, element, field } from "../core/elements.js";
import { formatCount, formatDuration, formatNumber } from "../core/format.js";
import { showError } from "../core/notices.js";
import { buildQuery, requestJson } from "../core/requests.js";
import { toPageTerms } from "../core/terminology.js";
import { isFinished } from "../result/run_view.js";
import { rememberJob } from "../stack/recent_jobs.js";
import { SettingsView } from "../stack/settings_view.js";
import { createEntry } from "./entries.js";
import { JobWatcher } from "./job_watcher.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../stack/session.js").Service} Service */
/** @typedef {{stack: string, labels: string | null, objects: number | null, seconds: number, warnings: string[], doubtful: boolean, problem: string | null}} StackOutcome */
/** @typedef {{output: string, report: string, table: string, objects: number | null, stacks: StackOutcome[]}} FolderResult */

/** @param {Job} job @returns {boolean} whether the job segments a folder on the host */
export function isFolderJob({ parameters }) {
  return String(parameters.input ?? "").endsWith("/");
}

/** Show the form for a new job. @param {HTMLElement} root @param {Service} service @param {(job: string) => void} onsubmit called with the id of the submitted job */
export function showFolderForm(root, service, onsubmit) {
  const { inputs, outputs } = service.capabilities;
  const settingsPanel = element("section", { class: "panel batch-settings", "aria-label": "Settings for all stacks" });
  const settings = new SettingsView(settingsPanel, service);
  settings.nameHeading.textContent = "Settings for all stacks";
  const input = createPathInputs("Folder with the stacks", inputs, "2026/embryos");
  const output = createPathInputs("Folder for the results", outputs, "2026/embryos-results");
  const globInput = element("input", { type: "text", placeholder: "**/*.tif", autocomplete: "off" });
  const channelInput = element("input", { type: "text", placeholder: "index or name", autocomplete: "off" });
  const timeInput = element("input", {
    type: "text",
    placeholder: "0, all, or a range such as 2:5",
    autocomplete: "off",
  });
  const overwriteCheckbox = element("input", { type: "checkbox" });
  settings.metadata.root.classList.add("controls");
  settings.metadata.root.append(
    field("Channel to segment", channelInput, createHint("For stacks with several channels")),
    field("Time points", timeInput, createHint("For time series")),
  );
  settings.runButton.textContent = "Segment the folder";
  const update = () => {
    settings.runButton.disabled = input.getPath() === "" || output.getPath() === "";
  };
  const form = element(
    "section",
    { class: "batch-content folder-form", "aria-label": "Folder on the server", oninput: update },
    element("h2", {}, "Segment a folder on the server"),
    element(
      "p",
      { class: "muted" },
      "The service reads the stacks and writes the results in folders that its operator has set up. Nothing is uploaded, and you can close this page.",
    ),
    input.root,
    field(
      "Which stacks",
      globInput,
      createHint("A pattern for file names. If it is empty, all stacks directly in the folder are segmented."),
    ),
    output.root,
    element(
      "label",
      { class: "inline-label" },
      overwriteCheckbox,
      "Write the results even if the folder contains other files",
    ),
  );
  settings.addEventListener("run", async () => {
    settings.runButton.disabled = true;
    const parameters = {
      ...settings.parameters,
      channel: channelInput.value.trim(),
      time: timeInput.value.trim(),
      input: input.getPath(),
      output_to: output.getPath(),
      glob: globInput.value.trim(),
      overwrite: overwriteCheckbox.checked || "",
    };
    try {
      /** @type {Job} */
      const job = await requestJson(`jobs?${buildQuery(parameters)}`, { method: "POST" });
      onsubmit(job.id);
    } catch (error) {
      showError(error);
    }
    update();
  });
  update();
  root.replaceChildren(settingsPanel, form);
}

/** Create controls for a path: one of the folders that the operator has set up, and the path below it. @param {string} title @param {string[]} roots @param {string} placeholder */
function createPathInputs(title, roots, placeholder) {
  const rootSelect = element(
    "select",
    { "aria-label": `${title}: location` },
    ...roots.map((name) => element("option", { value: name }, name)),
  );
  const pathInput = element("input", {
    type: "text",
    placeholder,
    autocomplete: "off",
    "aria-label": `${title}: path`,
  });
  return {
    root: element(
      "div",
      { class: "field", role: "group", "aria-label": title },
      element("span", { class: "field-name" }, title),
      element("div", { class: "row tight path-inputs" }, rootSelect, "/", pathInput),
    ),
    getPath: () => {
      const path = pathInput.value.trim().replaceAll(/^\/+|\/+$/g, "");
      return path && `${rootSelect.value}/${path}`;
    },
  };
}

/** @param {string} text */
function createHint(text) {
  return element("span", { class: "muted small" }, text);
}

/** Show the progress of a job until it has ended, and then its results. @param {HTMLElement} root @param {string} id @param {AbortSignal} signal stops following the job */
export function showFolderJob(root, id, signal) {
  const entry = { ...createEntry(0, { path: id, parts: [], skipReason: "" }), job: id };
  const batchAbort = new AbortController();
  signal.addEventListener("abort", () => batchAbort.abort());
  const connectionText = element("p", { class: "batch-connection", role: "alert" });
  const titleText = element("p", { class: "big", role: "status" });
  const progressBar = element("progress", { max: 1, "aria-label": "Finished stacks" });
  const detailText = element("p", { class: "muted" });
  const details = element("div", { class: "batch-content-part" });
  const cancel = () => {
    entry.isCancelling = true;
    cancelButton.disabled = true;
  };
  const cancelButton = button("Cancel", cancel, "secondary");
  root.replaceChildren(
    element(
      "section",
      { class: "batch-content folder-job", "aria-label": "Folder on the server" },
      connectionText,
      element("div", { class: "batch-head" }, element("div", { class: "row between" }, titleText, cancelButton)),
      progressBar,
      detailText,
      details,
    ),
  );
  connectionText.hidden = true;
  const watcher = new JobWatcher({ entries: [entry], batchAbort }, (error) => {
    const { report } = entry;
    connectionText.hidden = error === null;
    connectionText.textContent =
      error === null
        ? ""
        : "The service does not respond. This page keeps trying, and continues when the service responds.";
    detailText.hidden = error !== null;
    if (entry.isGone) {
      titleText.textContent = "The service no longer stores this job";
      detailText.textContent = "The results are still in the results folder.";
      progressBar.hidden = true;
      cancelButton.hidden = true;
    }
    if (report === null || signal.aborted) return;
    const hasEnded = isFinished(report.state);
    const { done, total } = report.stacks ?? { done: 0, total: 0 };
    setText(titleText, describeState(report, entry.isCancelling));
    progressBar.hidden = hasEnded;
    cancelButton.hidden = hasEnded;
    if (total) progressBar.value = done / total;
    setText(detailText, describeDetails(report));
    if (error === null && hasEnded) showResult(details, report, signal).catch(showError);
  });
  watcher.run();
}

/** Change the text of a live region only if it differs. @param {HTMLElement} node @param {string} text */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
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
  const warnings = report.warnings.map((warning) => element("li", { class: "warning" }, toPageTerms(warning)));
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
        element("p", { class: problem || (doubtful && index === 0) ? "warning-text" : "muted" }, toPageTerms(note)),
      ),
    ),
  );
}
