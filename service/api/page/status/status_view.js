/** Status view for operators: devices, queue, models, training runs, disk usage and recent requests. */

import { button, element, formatMessage } from "../core/elements.js";
import { formatBytes, formatCount, formatDuration, formatNumber } from "../core/format.js";
import { Problem, requestWithoutPrompt } from "../core/requests.js";
import { describeStage } from "../training/training_view.js";
import { Card, createTable, formatSeconds } from "./card.js";
import { createHardwareElements } from "./hardware_card.js";
import { createModelElement } from "./model_card.js";
import { createLegend, createRecentRequests } from "./recent_requests.js";

/** @typedef {import("openapi").Health} Health */
/** @typedef {import("openapi").LearningReport} LearningReport */
/** @typedef {import("openapi").RequestReport} RequestReport */
/** @typedef {import("openapi").DiskReport} Disk */
/** @typedef {import("openapi").Status} Status */

const REFRESH_INTERVAL_MILLISECONDS = 1500;

const STATE_TITLES = /** @type {Record<string, string>} */ ({
  ok: "Ready",
  degraded: "Ready, with problems",
  unavailable: "Not ready",
});

/**
 * Show the status, and refresh it while the page is visible.
 * @param {HTMLElement} root @param {AbortSignal} signal stops refreshing @param {() => Promise<void>} onreload called after models have been reloaded or deleted
 */
export async function watchStatus(root, signal, onreload) {
  root.replaceChildren();
  /** @type {StatusView | null} */
  let view = null;
  while (!signal.aborted) {
    await waitUntilVisible(signal);
    try {
      const status = await (await requestWithoutPrompt("status", { signal })).json();
      view ??= new StatusView(root, onreload);
      view.show(status, performance.now() / 1000);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (error.status === 401) return showProblem(root, error);
      if (view === null) showProblem(root, error);
      else view.showRefreshProblem(error);
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_INTERVAL_MILLISECONDS));
  }
}

/** @param {AbortSignal} signal */
async function waitUntilVisible(signal) {
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true, signal }));
  }
}

/** @param {HTMLElement} root @param {Problem} problem */
function showProblem(root, problem) {
  const title = problem.status === 401 ? "The status is available only to operators" : "The status is not available";
  root.replaceChildren(
    element("section", { class: "card" }, element("h2", {}, title), element("p", {}, formatMessage(problem))),
  );
}

/** The cards of the status view. */
class StatusView {
  /** @param {HTMLElement} root @param {() => Promise<void>} onreload */
  constructor(root, onreload) {
    this.onreload = onreload;
    this.healthCard = new Card("Service");
    this.hardwareCard = new Card("Devices");
    this.queueCard = new Card("Queue");
    this.trainingCard = new Card("Training");
    this.diskCard = new Card("Disk");
    this.reloadButton = button("Reload models", () => this.#reloadModels(), "secondary");
    this.reloadStatus = element("p", { class: "muted", role: "status" });
    this.modelsCard = new Card("Models", this.reloadButton);
    this.modelsCard.root.insertBefore(this.reloadStatus, this.modelsCard.body);
    this.recentRequestsCard = new Card("Recent requests", createLegend());
    /** Names of the models whose details are expanded. @type {Set<string>} */
    this.expandedNames = new Set();
    /** CPU time of the service, and the clock reading when the CPU time was measured. @type {{cpuSeconds: number, clockSeconds: number} | null} */
    this.previousCpuReading = null;
    const leftCards = [this.healthCard, this.hardwareCard, this.queueCard, this.trainingCard].map(({ root }) => root);
    root.replaceChildren(
      element(
        "div",
        { class: "status-columns" },
        element("div", { class: "cards" }, ...leftCards),
        element("div", { class: "cards" }, this.modelsCard.root, this.diskCard.root),
      ),
      this.recentRequestsCard.root,
    );
  }

  /** @param {Status} status @param {number} clockSeconds reading of a monotonic clock */
  show(status, clockSeconds) {
    const { health, hardware, models, requests, recent, learning, disk } = status;
    this.healthCard.show(health, createHealthElements);
    this.hardwareCard.show(
      { ...hardware, load: this.#measureLoad(status.cpu_seconds, clockSeconds) },
      createHardwareElements,
    );
    this.queueCard.show(requests, (reports) => [createQueueElement(reports, hardware.devices.length > 1)]);
    this.trainingCard.show(learning, createTrainingElements);
    this.diskCard.show(disk, createDiskElements);
    // Omit the time when each model was last used, because it changes often and is not displayed.
    const displayedModels = models.models.map((model) => ({
      ...model,
      devices: model.devices.map(({ device, bytes }) => ({ device, bytes })),
    }));
    this.modelsCard.show({ default: models.default, models: displayedModels }, (data) =>
      data.models.map((model) =>
        createModelElement(model, model.name === data.default, this.expandedNames, (name) => this.#deleteModel(name)),
      ),
    );
    this.recentRequestsCard.show(recent, createRecentRequests);
  }

  /** Show that the status could not be refreshed. @param {Problem} problem */
  showRefreshProblem(problem) {
    this.previousCpuReading = null;
    this.healthCard.show(problem.message, (text) => [
      element("p", { class: "warning-text" }, formatMessage(text)),
      element("p", { class: "muted" }, "The rest of this page shows the last known status."),
    ]);
  }

  /** Return the average number of busy cores since the last call, or null on the first call and after a restart of the service. @param {number} cpuSeconds @param {number} clockSeconds */
  #measureLoad(cpuSeconds, clockSeconds) {
    const previousCpuReading = this.previousCpuReading;
    this.previousCpuReading = { cpuSeconds, clockSeconds };
    if (previousCpuReading === null || cpuSeconds < previousCpuReading.cpuSeconds) return null;
    return (cpuSeconds - previousCpuReading.cpuSeconds) / (clockSeconds - previousCpuReading.clockSeconds);
  }

  /** @param {string} name of a trained model */
  async #deleteModel(name) {
    if (!confirm(`Delete the model ${name} and its files?`)) return;
    try {
      await requestWithoutPrompt(`models/${name}`, { method: "DELETE" });
      this.reloadStatus.textContent = `Deleted ${name}.`;
      await this.onreload();
    } catch (error) {
      this.reloadStatus.replaceChildren(formatMessage(error));
    }
  }

  async #reloadModels() {
    this.reloadButton.disabled = true;
    this.reloadStatus.textContent = "Reading the model folders";
    try {
      const report = await (await requestWithoutPrompt("models/reload", { method: "POST" })).json();
      this.reloadStatus.replaceChildren(formatMessage(describeReload(report)));
      await this.onreload();
    } catch (error) {
      this.reloadStatus.replaceChildren(formatMessage(error));
    }
    this.reloadButton.disabled = false;
  }
}

/** @param {import("openapi").ModelReload} report */
function describeReload({ broken, ...changes }) {
  const descriptions = Object.entries(changes).flatMap(([change, names]) =>
    names.length ? [`${change} ${names.join(", ")}`] : [],
  );
  const problems = Object.entries(broken).map(([name, problem]) => ` ${name}: ${problem}`);
  const text = descriptions.length ? descriptions.join("; ") : "no changes";
  return `${text[0].toUpperCase()}${text.slice(1)}.${problems.join("")}`;
}

/** @param {Health} health */
function createHealthElements({ status, version, uptime_seconds, reasons, degraded }) {
  const notes = [...reasons, ...degraded].map((text) => element("li", { class: "warning" }, formatMessage(text)));
  return [
    element(
      "p",
      { class: "row" },
      element("strong", { class: `state state-${status}` }, STATE_TITLES[status] ?? status),
      element("span", { class: "muted" }, `version ${version}, up for ${formatDuration(uptime_seconds)}`),
    ),
    notes.length > 0 && element("ul", { class: "notes" }, ...notes),
  ];
}

/** @param {RequestReport[]} requests @param {boolean} hasDeviceColumn whether to show the device of each request */
function createQueueElement(requests, hasDeviceColumn) {
  if (requests.length === 0) return element("p", { class: "muted" }, "No running or waiting requests.");
  return createTable(
    "Running and waiting requests",
    [...(hasDeviceColumn ? ["Device"] : []), "Model", "State", "Progress", "Elapsed", "Remaining"],
    requests.map(({ device, model, state, progress: { done, total }, seconds, seconds_left }) => [
      ...(hasDeviceColumn ? [device] : []),
      model,
      state,
      state === "running" && total
        ? element("progress", { max: 1, value: Math.min(done / total, 1), "aria-label": "Progress" })
        : "",
      formatSeconds(seconds),
      seconds_left === null ? "–" : formatSeconds(seconds_left),
    ]),
  );
}

const FILE_KIND_TITLES = /** @type {Record<string, string>} */ ({
  requests: "Requests and open stacks",
  results: "Cached results",
  jobs: "Jobs",
  stacks: "Stacks",
  annotations: "Annotated stacks",
  "trained-models": "Trained models",
});

/** @param {LearningReport} report */
function createTrainingElements({ problem, trainings, annotations, models, models_limit }) {
  const rows = trainings.map(({ name, base_model, state, stage, step, steps, seconds_left }) => [
    name,
    base_model,
    state === "running" ? describeStage(stage) : state,
    steps ? element("progress", { max: 1, value: Math.min(step / steps, 1), "aria-label": "Progress" }) : "",
    seconds_left === null ? "–" : formatSeconds(seconds_left),
  ]);
  return [
    element(
      "p",
      {},
      `${formatCount(annotations, "annotated stack")}, ${formatNumber(models)} of at most ${formatCount(models_limit, "trained model")}.`,
    ),
    problem !== null && element("p", { class: "muted" }, formatMessage(`Training is not available: ${problem}`)),
    rows.length > 0
      ? createTable(
          "Running and waiting training runs",
          ["New model", "Base model", "State", "Progress", "Remaining"],
          rows,
        )
      : problem === null && element("p", { class: "muted" }, "No running or waiting training runs."),
  ];
}

/** @param {Disk[]} disks */
function createDiskElements(disks) {
  return [
    createTable(
      "Files on disk",
      ["Files", "Used", "Limit", "Free on disk"],
      disks.map(({ files, used, limit, free, total }) => [
        FILE_KIND_TITLES[files] ?? files,
        formatBytes(used),
        limit === null ? "–" : formatBytes(limit),
        `${formatBytes(free)} of ${formatBytes(total)}`,
      ]),
      "disks",
    ),
  ];
}
