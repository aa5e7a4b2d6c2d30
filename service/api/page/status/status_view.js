/** The status page for operators: devices, queue, models, trainings, disk usage and recent requests. */

import { button, element } from "../core/elements.js";
import { formatBytes, formatCount, formatDuration, formatNumber } from "../core/format.js";
import { Problem, requestWithoutPrompt } from "../core/requests.js";
import { describeStage } from "../training/training_view.js";
import { Card, formatSeconds, table } from "./card.js";
import { drawHardware } from "./hardware_card.js";
import { drawModel } from "./model_card.js";
import { drawRecent, legend } from "./recent_requests.js";

/** @typedef {import("openapi").Health} Health */
/** @typedef {import("openapi").LearningReport} LearningReport */
/** @typedef {import("openapi").RequestReport} RequestReport */
/** @typedef {import("openapi").DiskReport} Disk */
/** @typedef {import("openapi").Status} Status */

const REFRESH_MILLISECONDS = 1500;

const STATES = /** @type {Record<string, string>} */ ({
  ok: "Ready",
  degraded: "Ready, with problems",
  unavailable: "Not ready",
});
/**
 * Show the status, and refresh it while the page is visible.
 * @param {HTMLElement} root @param {AbortSignal} signal ends the refreshing @param {() => Promise<void>} onreload called after models were reloaded or deleted
 */
export async function watchStatus(root, signal, onreload) {
  root.replaceChildren();
  /** @type {StatusView | null} */
  let view = null;
  while (!signal.aborted) {
    await untilVisible(signal);
    try {
      const status = await (await requestWithoutPrompt("status", { signal })).json();
      view ??= new StatusView(root, onreload);
      view.show(status, performance.now() / 1000);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (error.status === 401) return showProblem(root, error);
      if (view === null) showProblem(root, error);
      else view.showOutdated(error);
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MILLISECONDS));
  }
}

/** @param {AbortSignal} signal */
async function untilVisible(signal) {
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true, signal }));
  }
}

/** @param {HTMLElement} root @param {Problem} problem */
function showProblem(root, problem) {
  const title = problem.status === 401 ? "The status is available only to operators" : "The status is not available";
  root.replaceChildren(
    element("section", { class: "card" }, element("h2", {}, title), element("p", {}, problem.message)),
  );
}

class StatusView {
  /** @param {HTMLElement} root @param {() => Promise<void>} onreload */
  constructor(root, onreload) {
    this.onreload = onreload;
    this.health = new Card("Service");
    this.hardware = new Card("Devices");
    this.queue = new Card("Queue");
    this.training = new Card("Training");
    this.disk = new Card("Disk");
    this.reload = button("Reload models", () => this.#reload(), "secondary");
    this.reloadStatus = element("p", { class: "muted", role: "status" });
    this.models = new Card("Models", this.reload);
    this.models.root.insertBefore(this.reloadStatus, this.models.body);
    this.recent = new Card("Recent requests", legend());
    /** Names of models with expanded details. @type {Set<string>} */
    this.expanded = new Set();
    /** CPU seconds of the service, and the time of the last measurement. @type {{cpuSeconds: number, time: number} | null} */
    this.previous = null;
    const left = [this.health, this.hardware, this.queue, this.training].map(({ root }) => root);
    root.replaceChildren(
      element(
        "div",
        { class: "status-columns" },
        element("div", { class: "cards" }, ...left),
        element("div", { class: "cards" }, this.models.root, this.disk.root),
      ),
      this.recent.root,
    );
  }

  /** @param {Status} status @param {number} time in seconds of a monotonic clock */
  show(status, time) {
    const { health, hardware, models, requests, recent, learning, disk } = status;
    this.health.show(health, drawHealth);
    this.hardware.show({ ...hardware, load: this.#load(status.cpu_seconds, time) }, drawHardware);
    this.queue.show(requests, (reports) => [drawQueue(reports, hardware.devices.length > 1)]);
    this.training.show(learning, drawTraining);
    this.disk.show(disk, drawDisk);
    // Omit the time of the last use, which changes often and is not displayed.
    const stableModels = models.models.map((model) => ({
      ...model,
      devices: model.devices.map(({ device, bytes }) => ({ device, bytes })),
    }));
    this.models.show({ default: models.default, models: stableModels }, (facts) =>
      facts.models.map((model) =>
        drawModel(model, model.name === facts.default, this.expanded, (name) => this.#delete(name)),
      ),
    );
    this.recent.show(recent, drawRecent);
  }

  /** Show that the status could not be refreshed. @param {Problem} problem */
  showOutdated(problem) {
    this.previous = null;
    this.health.show(problem.message, (text) => [
      element("p", { class: "warning-text" }, text),
      element("p", { class: "muted" }, "The rest of this page shows the last known status."),
    ]);
  }

  /** Return the average number of busy cores since the last call. @param {number} cpuSeconds @param {number} time */
  #load(cpuSeconds, time) {
    const { previous } = this;
    this.previous = { cpuSeconds, time };
    if (previous === null || cpuSeconds < previous.cpuSeconds) return null;
    return (cpuSeconds - previous.cpuSeconds) / (time - previous.time);
  }

  /** @param {string} name of a trained model */
  async #delete(name) {
    if (!confirm(`Delete the model ${name} and its files?`)) return;
    try {
      await requestWithoutPrompt(`models/${name}`, { method: "DELETE" });
      this.reloadStatus.textContent = `Deleted ${name}.`;
      await this.onreload();
    } catch (error) {
      this.reloadStatus.textContent = /** @type {Error} */ (error).message;
    }
  }

  async #reload() {
    this.reload.disabled = true;
    this.reloadStatus.textContent = "Reading the model folders";
    try {
      const report = await (await requestWithoutPrompt("models/reload", { method: "POST" })).json();
      this.reloadStatus.textContent = describeReload(report);
      await this.onreload();
    } catch (error) {
      this.reloadStatus.textContent = /** @type {Error} */ (error).message;
    }
    this.reload.disabled = false;
  }
}

/** @param {import("openapi").ModelReload} report */
function describeReload({ broken, ...changes }) {
  const parts = Object.entries(changes).flatMap(([change, names]) =>
    names.length ? [`${change} ${names.join(", ")}`] : [],
  );
  const problems = Object.entries(broken).map(([name, problem]) => ` ${name}: ${problem}`);
  const text = parts.length ? parts.join("; ") : "no changes";
  return `${text[0].toUpperCase()}${text.slice(1)}.${problems.join("")}`;
}

/** @param {Health} health */
function drawHealth({ status, version, uptime_seconds, reasons, degraded }) {
  const notes = [...reasons, ...degraded].map((text) => element("li", { class: "warning" }, text));
  return [
    element(
      "p",
      { class: "row" },
      element("strong", { class: `state state-${status}` }, STATES[status] ?? status),
      element("span", { class: "muted" }, `version ${version}, up for ${formatDuration(uptime_seconds)}`),
    ),
    notes.length > 0 && element("ul", { class: "notes" }, ...notes),
  ];
}

/** @param {RequestReport[]} requests @param {boolean} showDevice whether there are several devices */
function drawQueue(requests, showDevice) {
  if (requests.length === 0) return element("p", { class: "muted" }, "No running or waiting requests.");
  return table(
    "Running and waiting requests",
    [...(showDevice ? ["Device"] : []), "Model", "State", "Progress", "Elapsed", "Remaining"],
    requests.map(({ device, model, state, progress: { done, total }, seconds, seconds_left }) => [
      ...(showDevice ? [device] : []),
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

const FILE_KINDS = /** @type {Record<string, string>} */ ({
  requests: "Requests and open stacks",
  results: "Cached results",
  jobs: "Jobs",
  stacks: "Stacks",
  annotations: "Annotated stacks",
  "trained-models": "Trained models",
});

/** @param {LearningReport} report */
function drawTraining({ problem, trainings, annotations, models, models_limit }) {
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
    problem !== null && element("p", { class: "muted" }, `Training is not available: ${problem}`),
    rows.length > 0
      ? table("Running and waiting training runs", ["New model", "Base model", "State", "Progress", "Remaining"], rows)
      : problem === null && element("p", { class: "muted" }, "No running or waiting training runs."),
  ];
}

/** @param {Disk[]} disks */
function drawDisk(disks) {
  return [
    table(
      "Files on disk",
      ["Files", "Used", "Limit", "Free on disk"],
      disks.map(({ files, used, limit, free, total }) => [
        FILE_KINDS[files] ?? files,
        formatBytes(used),
        limit === null ? "–" : formatBytes(limit),
        `${formatBytes(free)} of ${formatBytes(total)}`,
      ]),
      "disks",
    ),
  ];
}
