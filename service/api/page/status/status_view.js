/** The service at work, for its operators: devices, queue, models, and where the last requests spent their time. */

import { button, element } from "../core/elements.js";
import { counted, duration, number, size } from "../core/format.js";
import { Problem, requestOnce } from "../core/requests.js";
import { describeStage } from "../training/training_view.js";
import { Card, secondsOf, table } from "./card.js";
import { drawHardware } from "./hardware_card.js";
import { drawModel } from "./model_card.js";
import { drawRecent, legend } from "./recent_requests.js";

/** @typedef {import("openapi").Health} Health */
/** @typedef {import("openapi").LearningReport} Learned */
/** @typedef {import("openapi").RequestReport} Running */
/** @typedef {import("openapi").DiskReport} Disk */
/** @typedef {import("openapi").Status} Status */

const REFRESH_MILLISECONDS = 1500;

const STATES = /** @type {Record<string, string>} */ ({
  ok: "Ready",
  degraded: "Ready, but not all is well",
  unavailable: "Not ready",
});
/**
 * Show the status, and refresh it while the page is visible, until the signal.
 * @param {HTMLElement} root @param {AbortSignal} signal @param {() => Promise<void>} onreload once models were reloaded
 */
export async function watchStatus(root, signal, onreload) {
  root.replaceChildren();
  /** @type {StatusView | null} */
  let view = null;
  while (!signal.aborted) {
    await untilVisible(signal);
    try {
      const status = await (await requestOnce("status", { signal })).json();
      view ??= new StatusView(root, onreload);
      view.show(status, performance.now() / 1000);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (error.status === 401) return refuse(root, error);
      if (view === null) refuse(root, error);
      else view.lose(error);
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
function refuse(root, problem) {
  const title = problem.status === 401 ? "For the operators of this service" : "The status cannot be shown";
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
    this.learning = new Card("Learning");
    this.disk = new Card("Disk");
    this.reload = button("Reload models", () => this.#reload(), "secondary");
    this.reloaded = element("p", { class: "muted", role: "status" });
    this.models = new Card("Models", this.reload);
    this.models.root.insertBefore(this.reloaded, this.models.body);
    this.recent = new Card("Last requests", legend());
    /** Models of which the reader has opened what was tried. @type {Set<string>} */
    this.opened = new Set();
    /** The service's seconds of the processor, and when. @type {{spent: number, at: number} | null} */
    this.before = null;
    const left = [this.health, this.hardware, this.queue, this.learning].map(({ root }) => root);
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

  /** @param {Status} status @param {number} at seconds of a steady clock */
  show(status, at) {
    const { health, hardware, models, requests, recent, learning, disk } = status;
    this.health.show(health, drawHealth);
    this.hardware.show({ ...hardware, load: this.#load(status.cpu_seconds, at) }, drawHardware);
    this.queue.show(requests, (running) => [drawQueue(running, hardware.devices.length > 1)]);
    this.learning.show(learning, drawLearning);
    this.disk.show(disk, drawDisk);
    // When a model was last used changes all the time, and is not shown.
    const lasting = models.models.map((model) => ({
      ...model,
      devices: model.devices.map(({ device, bytes }) => ({ device, bytes })),
    }));
    this.models.show({ default: models.default, lasting }, (shown) =>
      shown.lasting.map((model) =>
        drawModel(model, model.name === shown.default, this.opened, (name) => this.#delete(name)),
      ),
    );
    this.recent.show(recent, drawRecent);
  }

  /** @param {Problem} problem that keeps the status from being refreshed */
  lose(problem) {
    this.before = null;
    this.health.show(problem.message, (text) => [
      element("p", { class: "warning-text" }, text),
      element("p", { class: "muted" }, "The rest of this page is as it was before that."),
    ]);
  }

  /** Cores that the service has kept busy since the last answer. @param {number} spent @param {number} at */
  #load(spent, at) {
    const { before } = this;
    this.before = { spent, at };
    if (before === null || spent < before.spent) return null;
    return (spent - before.spent) / (at - before.at);
  }

  /** @param {string} name of a model that a training has made */
  async #delete(name) {
    if (!confirm(`Delete the model ${name} and its files?`)) return;
    try {
      await requestOnce(`models/${name}`, { method: "DELETE" });
      this.reloaded.textContent = `Deleted ${name}.`;
      await this.onreload();
    } catch (error) {
      this.reloaded.textContent = /** @type {Error} */ (error).message;
    }
  }

  async #reload() {
    this.reload.disabled = true;
    this.reloaded.textContent = "Reading the model folders";
    try {
      const answer = await (await requestOnce("models/reload", { method: "POST" })).json();
      this.reloaded.textContent = describeReload(answer);
      await this.onreload();
    } catch (error) {
      this.reloaded.textContent = /** @type {Error} */ (error).message;
    }
    this.reload.disabled = false;
  }
}

/** @param {import("openapi").ModelReload} answer */
function describeReload({ broken, ...names }) {
  const done = Object.entries(names).flatMap(([what, which]) => (which.length ? [`${what} ${which.join(", ")}`] : []));
  const faults = Object.entries(broken).map(([name, problem]) => ` ${name}: ${problem}`);
  const words = done.length ? done.join("; ") : "nothing has changed";
  return `${words[0].toUpperCase()}${words.slice(1)}.${faults.join("")}`;
}

/** @param {Health} health */
function drawHealth({ status, version, uptime_seconds, reasons, degraded }) {
  const notes = [...reasons, ...degraded].map((text) => element("li", { class: "warning" }, text));
  return [
    element(
      "p",
      { class: "row" },
      element("strong", { class: `state state-${status}` }, STATES[status] ?? status),
      element("span", { class: "muted" }, `version ${version}, up for ${duration(uptime_seconds)}`),
    ),
    notes.length > 0 && element("ul", { class: "notes" }, ...notes),
  ];
}

/** @param {Running[]} requests @param {boolean} several whether there are several devices */
function drawQueue(requests, several) {
  if (requests.length === 0) return element("p", { class: "muted" }, "Nothing runs, and nothing waits.");
  return table(
    "Requests that run and wait",
    [...(several ? ["Device"] : []), "Model", "State", "Done", "Since", "Left"],
    requests.map(({ device, model, state, progress: { done, total }, seconds, seconds_left }) => [
      ...(several ? [device] : []),
      model,
      state,
      state === "running" && total
        ? element("progress", { max: 1, value: Math.min(done / total, 1), "aria-label": "Share that is done" })
        : "",
      secondsOf(seconds),
      seconds_left === null ? "–" : secondsOf(seconds_left),
    ]),
  );
}

const FILES = /** @type {Record<string, string>} */ ({
  requests: "Requests, and stacks that are looked at",
  results: "Results, for who asks again",
  jobs: "Jobs",
  stacks: "Stacks",
  annotations: "Annotated stacks",
  "trained-models": "Trained models",
});

/** @param {Learned} learned */
function drawLearning({ problem, trainings, annotations, models, models_limit }) {
  const rows = trainings.map(({ name, base_model, state, stage, step, steps, seconds_left }) => [
    name,
    base_model,
    state === "running" ? describeStage(stage) : state,
    steps ? element("progress", { max: 1, value: Math.min(step / steps, 1), "aria-label": "Share that is done" }) : "",
    seconds_left === null ? "–" : secondsOf(seconds_left),
  ]);
  return [
    element(
      "p",
      {},
      `${counted(annotations, "annotated stack")}, ${number(models)} of at most ${counted(models_limit, "trained model")}.`,
    ),
    problem !== null && element("p", { class: "muted" }, `Nobody can train here: ${problem}`),
    rows.length > 0
      ? table("Trainings that run and wait", ["New model", "From", "State", "Done", "Left"], rows)
      : problem === null && element("p", { class: "muted" }, "No training runs or waits."),
  ];
}

/** @param {Disk[]} disks */
function drawDisk(disks) {
  return [
    table(
      "What is kept on disk",
      ["Files", "Used", "At most", "Free on the disk"],
      disks.map(({ files, used, limit, free, total }) => [
        FILES[files] ?? files,
        size(used),
        limit === null ? "–" : size(limit),
        `${size(free)} of ${size(total)}`,
      ]),
      "disks",
    ),
  ];
}
