/** The service at work, for its operators: devices, queue, models, and where the last requests spent their time. */

import { button, element, redraw } from "../core/elements.js";
import { Problem, requestOnce } from "../core/requests.js";
import { counted, duration, number, size } from "../core/words.js";
import { describeStage } from "../training/training.js";

/** @typedef {import("openapi").DeviceReport} Device */
/** @typedef {import("openapi").EngineReport} Engine */
/** @typedef {Omit<import("openapi").ModelInfo, "devices"> & {devices: Omit<import("openapi").Loaded, "used">[]}} Model */
/** @typedef {import("openapi").Trial} Trial */
/** @typedef {import("openapi").Health} Health */
/** @typedef {import("openapi").LearningReport} Learned */
/** @typedef {import("openapi").GpuStatus} Gpu */
/** @typedef {import("openapi").CpuStatus} Cpu */
/** @typedef {import("openapi").RequestReport} Running */
/** @typedef {import("openapi").SegmentedReport} Segmented */
/** @typedef {import("openapi").DiskReport} Disk */
/** @typedef {import("openapi").Status} Status */
/** @typedef {import("../core/elements.js").Child} Child */

const REFRESH_MILLISECONDS = 1500;

const STATES = /** @type {Record<string, string>} */ ({
  ok: "Ready",
  degraded: "Ready, but not all is well",
  unavailable: "Not ready",
});
const PLANNED = /** @type {Record<string, string>} */ ({
  fixed: "As the configuration says.",
  "known-order": "First of the fastest known for this hardware whose labels agree with the plain FP32 network.",
  tuned: "Fastest of all that were tried here and whose labels agree with the plain FP32 network.",
});
/** Stages that have one colour. @type {[string, string[]][]} */
const GROUPS = [
  ["Receive, read", ["receive", "read"]],
  ["Wait", ["queue"]],
  ["Prepare", ["prepare", "size", "skip"]],
  ["Windows", ["windows"]],
  ["Decode", ["decode"]],
  ["Measure, write", ["measure", "write", "save"]],
];

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

/** A card whose content is drawn anew only when it has changed, so that what is read, open or focused stays. */
class Card {
  /** @param {string} title @param {Child[]} tools beside the title */
  constructor(title, ...tools) {
    this.body = element("div", { class: "card-body" });
    this.root = element(
      "section",
      { class: "card", "aria-label": title },
      element("div", { class: "row between" }, element("h2", {}, title), ...tools),
      this.body,
    );
    this.drawn = "";
  }

  /** @template Facts @param {Facts} facts @param {(facts: Facts) => Child[]} draw */
  show(facts, draw) {
    const text = JSON.stringify(facts);
    if (text === this.drawn) return;
    this.drawn = text;
    redraw(this.body, () => draw(facts));
  }
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

/** @param {{gpus: Gpu[], cpu: Cpu, devices: Device[], load: number | null}} hardware */
function drawHardware({ gpus, cpu, devices, load }) {
  const states = devices.map(describeDevice);
  const several = states.some((state) => state !== "");
  const free = cpu.memory_available;
  const used = cpu.memory_total === null || free === null ? null : cpu.memory_total - free;
  return [
    element("h3", {}, cpu.name),
    meter("Load", load, cpu.cores, load === null ? "" : `${load.toFixed(1)} of ${counted(cpu.cores, "core")}`),
    memoryMeter(used, cpu.memory_total),
    ...gpus.flatMap(drawGpu),
    table(
      "Devices in use",
      ["Device", ...(several ? ["State"] : []), "Runs", "Waits", "Loaded models", "Memory"],
      devices.map(({ name, running, waiting, models, loaded_bytes }, place) => [
        name,
        ...(several ? [states[place]] : []),
        number(running),
        number(waiting),
        models.join(", ") || "none",
        size(loaded_bytes),
      ]),
    ),
    ...devices.map(({ problem }) => problem !== null && element("p", { class: "warning-text" }, problem)),
  ];
}

/** The state of a device of a cluster; "" of one of this host that can be used. @param {Device} device */
function describeDevice({ host, given_back: given, starting, problem }) {
  if (given) return "given back, until there is work";
  if (starting) return "starting";
  if (problem !== null) return "cannot be used";
  return host === null ? "" : `on ${host}`;
}

/** @param {Gpu} gpu */
function drawGpu(gpu) {
  const { utilisation_percent: load, temperature_celsius: warmth, power_watts: power } = gpu;
  const facts = [warmth !== null && `${warmth} °C`, power !== null && `${Math.round(power)} W`].filter(Boolean);
  return [
    element("h3", {}, [`GPU ${gpu.index}: ${gpu.name}`, ...facts].join(", ")),
    meter("Load", load, 100, `${load} %`),
    memoryMeter(gpu.memory_used, gpu.memory_total),
  ];
}

/** @param {number | null} used @param {number | null} total bytes */
function memoryMeter(used, total) {
  return meter("Memory", used, total ?? 1, `${size(used ?? 0)} of ${size(total ?? 0)}`);
}

/** @param {string} name @param {number | null} value null: not known @param {number} most @param {string} words */
function meter(name, value, most, words) {
  const known = value !== null;
  const bar = element("progress", { max: 1, value: known ? Math.min(value / most, 1) : 0, "aria-label": name });
  return element(
    "div",
    { class: "meter" },
    element("span", { class: "muted" }, name),
    bar,
    element("span", {}, known ? words : "–"),
  );
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

/** @param {number} seconds */
function secondsOf(seconds) {
  return seconds < 100 ? `${number(seconds, 2)} s` : duration(seconds);
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

/** @param {Model} model @param {boolean} isDefault @param {Set<string>} opened @param {(name: string) => void} remove */
function drawModel({ name, version, state, engine, problem, devices, removable }, isDefault, opened, remove) {
  const where = devices.map(({ device, bytes }) => `${size(bytes)} on ${device}`).join(", ");
  const idle = state === "unloaded" ? "Loaded when a request asks for it." : "";
  return element(
    "article",
    { class: "model" },
    element(
      "div",
      { class: "row" },
      element("h3", {}, name),
      element("span", { class: `state state-${state}` }, state),
      element(
        "span",
        { class: "muted" },
        [version && `version ${version}`, isDefault && "default", where].filter(Boolean).join(" · "),
      ),
      removable && button("Delete", () => remove(name), "link"),
    ),
    problem !== null && element("p", { class: "warning-text" }, problem),
    engine === null ? idle !== "" && element("p", { class: "muted" }, idle) : drawEngine(name, engine, opened),
  );
}

/** @param {string} name of the model @param {Engine} engine @param {Set<string>} opened */
function drawEngine(name, engine, opened) {
  const { roi_size, sw_batch_size, streams, planned, cached, trials, warnings } = engine;
  const how = [engine.engine, engine.precision.toUpperCase(), engine.compile_mode].filter(Boolean).join(", ");
  const batch = `${counted(sw_batch_size, "window")} of ${roi_size.join(" × ")} at a time, ${counted(streams, "stream")}`;
  const tried = element(
    "details",
    {
      open: opened.has(name),
      ontoggle: () => (tried.open ? opened.add(name) : opened.delete(name)),
    },
    element("summary", {}, `What was tried (${trials.length})`),
    drawTrials(name, trials),
  );
  return element(
    "div",
    { class: "card-body" },
    element("p", {}, element("strong", {}, how), `; ${batch}; ready after ${secondsOf(engine.warm_up_seconds)}`),
    element("p", { class: "muted" }, PLANNED[planned] ?? planned, cached && " Known from an earlier start."),
    warnings.length > 0 &&
      element("ul", { class: "notes" }, ...warnings.map((text) => element("li", { class: "warning" }, text))),
    trials.length > 0 && tried,
  );
}

/** @param {string} name @param {Trial[]} trials */
function drawTrials(name, trials) {
  return table(
    `What was tried for ${name}`,
    ["Engine", "Precision", "Windows/s", "Labels that differ", "Verdict"],
    trials.map(({ choice, verdict, windows_per_second, difference }) => [
      [choice.engine, choice.compile_mode].filter(Boolean).join(", "),
      choice.precision,
      windows_per_second === null ? "–" : number(windows_per_second),
      difference === null ? "–" : `${number(100 * difference, 2)} %`,
      verdict,
    ]),
  );
}

function legend() {
  const entries = GROUPS.map(([name], group) =>
    element("li", {}, element("span", { class: "key", "data-group": group }), name),
  );
  return element("ul", { class: "legend muted" }, ...entries);
}

/** @param {Segmented[]} recent */
function drawRecent(recent) {
  if (recent.length === 0)
    return [element("p", { class: "muted" }, "Nothing was segmented since the service was started.")];
  return [
    table(
      "The last requests, newest first",
      ["Ended", "Model", "Voxels", "Objects", "Seconds", "Shares of the time"],
      recent.map(({ ended, model, voxels, objects, seconds }) => [
        new Date(ended).toLocaleTimeString("en-GB"),
        model,
        number(voxels),
        objects === null ? "–" : number(objects),
        number(
          Object.values(seconds).reduce((sum, value) => sum + value, 0),
          3,
        ),
        stageBar(seconds),
      ]),
      "recent-requests",
    ),
  ];
}

/** @param {Record<string, number>} seconds by stage */
function stageBar(seconds) {
  const stages = Object.entries(seconds);
  const words = stages.map(([stage, value]) => `${stage} ${number(value, 2)} s`);
  const parts = stages.map(([stage, value], place) => {
    const group = GROUPS.findIndex(([, names]) => names.includes(stage));
    const part = element("span", { class: "key", "data-group": group, title: words[place] });
    part.style.flexGrow = String(value);
    return part;
  });
  return element("div", { class: "stage-bar", role: "img", "aria-label": words.join(", ") }, ...parts);
}

/** @param {string} caption @param {string[]} names @param {Child[][]} rows @param {string} [kind] */
function table(caption, names, rows, kind = "") {
  return element(
    "table",
    { class: `facts-table ${kind}` },
    element("caption", { class: "visually-hidden" }, caption),
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))))),
  );
}
