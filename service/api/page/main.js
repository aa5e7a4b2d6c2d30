/** The page: which view is shown, and what happens between them. The address after # names the stack or the job. */

import { button, byId, element } from "./core/elements.js";
import { entries, forget, remember } from "./core/recent_jobs.js";
import { json, Problem, queryOf, request, upload, useKey, whenKeyIsWanted } from "./core/requests.js";
import { startTheme } from "./core/theme.js";
import { pageWords, setting, size } from "./core/words.js";
import { offerCorrections } from "./correct/lost_result.js";
import { showCompare } from "./result/compare_view.js";
import { showResult } from "./result/result_view.js";
import { follow, RunView } from "./result/run_view.js";
import { ChannelTools } from "./stack/channels.js";
import { StackView } from "./stack/settings_view.js";
import { showStart } from "./stack/start_view.js";
import { firstTime } from "./stack/time_points.js";
import { TimeSlider } from "./stack/time_slider.js";
import { watchStatus } from "./status/status.js";
import { annotationsList } from "./training/annotations.js";
import { trainingDialog, trainingsList, watchTraining } from "./training/training.js";
import { Viewer } from "./viewer/viewer.js";
import { forget as forgetCorrections } from "./volumes/correction_store.js";
import { parseTable } from "./volumes/object_table.js";
import { fetchMiddle, fetchPlane, fetchVolume, partOf } from "./volumes/planes.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("./volumes/planes.js").Triple} Triple */

const LATER_MILLISECONDS = 250;
// Edge of the pictures of channels.
const PICTURE_PIXELS = 160;

/** The stack that is shown, and what ends when another one is. */
class Session {
  /** @param {string} stack id, "" where the service does not keep it any more @param {string} name @param {number} bytes */
  constructor(stack, name, bytes) {
    this.stack = stack;
    this.name = name;
    this.ending = new AbortController();
    this.loaded = "";
    this.loading = new AbortController();
    this.following = new AbortController();
    this.inspecting = new AbortController();
    /** The job whose labels are shown. @type {Job | null} */
    this.job = null;
    byId("title").textContent = name;
    show("work");
    this.viewer = new Viewer(byId("viewer"));
    this.channels = new ChannelTools(this.viewer);
    this.times = new TimeSlider();
    this.times.addEventListener("change", () => this.goToTime(this.times.at).catch(report));
    this.viewer.toolbar.append(this.channels.root, this.times.root);
    this.settings = new StackView(byId("settings"), models, defaultModel, known);
    this.settings.setName(name, bytes);
    this.settings.addEventListener("change", () => this.inspectLater());
    this.settings.addEventListener("run", () => this.run());
    this.viewer.addEventListener("diameter", (event) =>
      this.settings.setDiameter(/** @type {CustomEvent} */ (event).detail),
    );
    /** @type {Inspection | null} */
    this.inspection = null;
    /** Whether the side says why the stack cannot be shown. */
    this.refused = false;
    this.timer = 0;
    this.labelling = new AbortController();
    /** Tells when a time point is left, and when another one is shown. */
    this.moved = new EventTarget();
  }

  end() {
    this.ending.abort();
    this.following.abort();
    this.loading.abort();
    clearTimeout(this.timer);
  }

  inspectLater() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.inspect(), LATER_MILLISECONDS);
  }

  /** Ask what is understood of the stack with the present parameters, and show its planes. */
  async inspect() {
    const parameters = { ...this.settings.parameters, stack: this.stack };
    this.inspecting.abort();
    this.inspecting = new AbortController();
    const signal = AbortSignal.any([this.inspecting.signal, this.ending.signal]);
    try {
      /** @type {Inspection} */
      const found = await json(`inspect?${queryOf(parameters)}`, { method: "POST", signal });
      this.inspection = found;
      if (this.refused) byId("side").replaceChildren(before());
      this.refused = false;
      const looked = partOf(found.file, parameters, found.file.time_points?.[0] ?? this.settings.parameters.time, 0);
      const whole = /** @type {Triple} */ (found.file.shape.slice(1));
      this.settings.fetchMiddle = (channel) =>
        fetchMiddle(`stacks/${this.stack}/planes`, { ...looked, channel }, whole, PICTURE_PIXELS, this.ending.signal);
      this.settings.show(found);
      const [first, stop] = found.file.time_points ?? [0, 1];
      this.times.show(first, stop, this.times.at);
      await this.#showPlanes(found);
      this.viewer.showDiameter(this.settings.statedDiameter);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      this.settings.refuse(error);
      this.refused = !this.loaded;
      if (this.refused) byId("side").replaceChildren(refusal(error));
    }
  }

  /** @param {Inspection} inspection */
  async #showPlanes({ file }) {
    const { channel, time } = this.settings.parameters;
    const shown = partOf(file, this.settings.parameters, file.time_points ? this.times.at : time, channel);
    const key = JSON.stringify(shown);
    if (key === this.loaded) {
      this.viewer.setVoxelSize(file.voxel_size);
      return;
    }
    // Time points of a series are shown with the same contrast.
    const fresh = this.loaded === "" || JSON.stringify({ ...JSON.parse(this.loaded), time: shown.time }) !== key;
    this.loading.abort();
    this.loading = new AbortController();
    this.loaded = key;
    const whole = /** @type {Triple} */ (file.shape.slice(1));
    const address = `stacks/${this.stack}/planes`;
    this.#fetchFrom(address, shown, whole);
    this.viewer.fetchWhole = (signal, onblock) => fetchVolume(address, shown, whole, signal, onblock, [1, 1, 1]);
    this.viewer.waiting.textContent = "Reading the stack";
    try {
      await fetchVolume(address, shown, whole, this.loading.signal, (volume, share) => {
        const first = this.viewer.scene.image !== volume;
        if (first) {
          this.viewer.open(volume, file.voxel_size);
          if (fresh) this.viewer.settle();
        } else this.viewer.refreshProjection();
        this.viewer.waiting.textContent = share < 1 ? `Reading the stack, ${Math.round(share * 100)} %` : "";
        this.viewer.draw();
      });
      if (fresh) this.viewer.settle();
      else this.viewer.refreshProjection();
      this.channels.show(file, Number(shown.channel) || 0, (other, signal, onblock) =>
        fetchVolume(address, { ...shown, channel: other }, whole, signal, onblock),
      );
    } catch (error) {
      if (!isAbort(error)) this.viewer.waiting.textContent = /** @type {Error} */ (error).message;
    }
  }

  /**
   * Say where the views get planes in full resolution.
   * @param {string} address @param {Record<string, unknown>} shown @param {Triple} whole
   */
  #fetchFrom(address, shown, whole) {
    this.viewer.fetchSharp = async (axis, at, signal) => {
      const { plane, step } = await fetchPlane(address, shown, whole, axis, at, signal);
      const job = this.job;
      const labels = job ? await fetchPlane(`jobs/${job.id}/planes`, this.#timeOf(job), whole, axis, at, signal) : null;
      return { image: plane, labels: labels?.plane ?? null, step };
    };
  }

  /** The time point that is shown, as the planes of a job name it. @param {Job} job */
  #timeOf(job) {
    return { time: job.time_points ? Math.max(0, this.times.at - firstTime(job.parameters.time)) : undefined };
  }

  /** Show another time point of a series, and of its labels. @param {number} time */
  async goToTime(time) {
    if (this.inspection === null) return;
    const [first, stop] = this.inspection.file.time_points ?? [0, 1];
    this.times.show(first, stop, time);
    // Of linked objects the same one stays chosen.
    const chosen = this.job?.parameters.link ? this.viewer.scene.selected : 0;
    this.moved.dispatchEvent(new Event("leaving"));
    if (this.job) this.viewer.setLabels(null);
    await Promise.all([this.#showPlanes(this.inspection), this.job && this.#showLabels(this.job)]);
    this.viewer.select(chosen);
    this.moved.dispatchEvent(new Event("time"));
  }

  /** @param {Job} job */
  async #showLabels(job) {
    const { viewer } = this;
    this.labelling.abort();
    this.labelling = new AbortController();
    const signal = AbortSignal.any([this.labelling.signal, this.following.signal]);
    const time = this.#timeOf(job);
    const address = `jobs/${job.id}/planes`;
    const probe = await request(`${address}?${queryOf({ ...time, to: 1, step: "1,9999,9999" })}`, { signal });
    const whole = /** @type {Triple} */ ((probe.headers.get("X-StackSeg-Volume") ?? "").split(",").map(Number));
    const labels = await fetchVolume(address, time, whole, signal, (volume) => {
      if (viewer.scene.image === null) viewer.open(volume, null);
    });
    this.job = job;
    viewer.setLabels(labels);
  }

  async run() {
    const { settings } = this;
    settings.run.disabled = true;
    const measurements = this.inspection?.output === "labels" ? "zip" : "";
    const query = queryOf({ ...settings.parameters, stack: this.stack, measurements });
    try {
      /** @type {Job} */
      const job = await json(`jobs?${query}`, { method: "POST" });
      const { model: _, ...others } = settings.parameters;
      const parameters = Object.entries(others).flatMap(([name, value]) => (value ? [setting(name, value)] : []));
      const { stack, name } = this;
      const thumbnail = this.viewer.thumbnail();
      remember({ job: job.id, stack, name, model: job.model, parameters: parameters.join(", "), thumbnail });
      history.pushState(null, "", `#job=${job.id}`);
      await this.follow(job.id);
    } catch (error) {
      report(error);
    } finally {
      settings.run.disabled = false;
    }
  }

  /** @param {string} id */
  async follow(id) {
    const side = byId("side");
    const running = new RunView(side, id);
    this.job = null;
    this.viewer.setLabels(null);
    this.following.abort();
    this.following = new AbortController();
    try {
      const job = await follow(id, this.following.signal, (now) => running.show(now));
      remember({ job: id, objects: job.objects, model: job.model, created: job.created });
      if (job.state === "done") await this.showResult(job);
      else side.replaceChildren(ending(job));
    } catch (error) {
      if (!isAbort(error)) throw error;
    }
  }

  /** @param {Job} job */
  async showResult(job) {
    const { viewer } = this;
    const { signal } = this.following;
    viewer.waiting.textContent = "Fetching the labels";
    const hasTable = job.parameters.measurements === "zip";
    const text = hasTable
      ? await (await request(`jobs/${job.id}/result`, { headers: { Accept: "text/csv" }, signal })).text()
      : null;
    await this.#showLabels(job);
    viewer.waiting.textContent = "";
    const table = text ? parseTable(text) : null;
    const segmentWith = async (/** @type {Record<string, string>} */ changed) => {
      this.settings.restore({ ...this.settings.parameters, ...changed });
      await this.inspect();
      await this.run();
    };
    const times = {
      at: () => this.times.at,
      go: (/** @type {number} */ time) => this.goToTime(time),
      target: this.moved,
    };
    const { name, stack } = this;
    showResult(byId("side"), job, { table, name, stack, viewer, abilities, signal, segmentWith, times });
    viewer.drawNow();
    remember({ job: job.id, thumbnail: viewer.thumbnail() });
  }
}

/** @param {Job} job that is over without a result */
function ending(job) {
  /** @type {Partial<Record<Job["state"], string>>} */
  const words = { failed: "The job has failed", cancelled: "Cancelled", expired: "The result had to make room" };
  return element(
    "div",
    { class: "run" },
    element("h2", {}, words[job.state] ?? job.state),
    element(
      "p",
      { class: job.problem ? "warning-text" : "muted" },
      job.problem ? pageWords(job.problem.detail) : "Change what you like, and segment again.",
    ),
  );
}

/** @param {Problem} problem */
function refusal(problem) {
  const title = problem.slug === "ambiguous-axes" ? "One thing to settle" : "This stack cannot be segmented as it is";
  const text =
    problem.slug === "ambiguous-axes"
      ? "The file does not say which axis is which. Choose on the left; the slices then show whether it is right."
      : problem.message;
  return element("div", { class: "run" }, element("h2", {}, title), element("p", { class: "muted" }, text));
}

function before() {
  return element(
    "div",
    { class: "run" },
    element("h2", {}, "Is this what you recorded?"),
    element(
      "p",
      { class: "muted" },
      "Check the slices, the channel and the proportions. Then press Segment: objects are outlined here, counted and measured.",
    ),
    element("h3", {}, "Moving about"),
    element(
      "dl",
      { class: "keys" },
      ...[
        ["wheel, j and k, arrows", "next plane"],
        ["drag", "move"],
        ["ctrl + wheel, + and −", "zoom"],
        ["click", "crosshair, object"],
        ["o, f", "objects on or off, filled"],
        ["0", "fit"],
      ].flatMap(([key, what]) => [element("dt", {}, key), element("dd", {}, what)]),
    ),
  );
}

/** @type {import("openapi").ModelInfo[]} */
let models = [];
/** @type {string | null} */
let defaultModel = null;
/** Names of the service's parameters. @type {Set<string>} */
let known = new Set();
/** What the service does beside segmenting. */
/** @type {import("openapi").Abilities} */
let abilities = {
  corrections: false,
  annotations_bytes: 0,
  training: false,
  training_problem: null,
  training_minutes: 0,
};
/** @type {Session | null} */
let session = null;

/** @param {"start" | "work" | "status" | "learn" | "compare"} which */
function show(which) {
  for (const view of ["start", "work", "status", "learn", "compare"]) byId(view).hidden = view !== which;
  byId("home").hidden = which === "start";
  document.body.classList.remove("busy");
  byId("problem").hidden = true;
}

/** @param {unknown} error */
function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/** @param {unknown} error */
function report(error) {
  if (isAbort(error)) return;
  const box = byId("problem");
  box.hidden = false;
  box.replaceChildren(
    element("span", {}, error instanceof Error ? error.message : String(error)),
    button("Close", () => (box.hidden = true), "quiet"),
  );
  if (!(error instanceof Problem)) console.error(error);
}

/** @param {Blob} file @param {string} name */
async function openFile(file, name) {
  const giving = new AbortController();
  const bar = element("progress", { max: 1, "aria-label": "Upload" });
  const words = element("p", { class: "muted", role: "status" }, size(file.size));
  const cancel = button("Cancel", () => giving.abort(), "secondary");
  const parts = [element("h2", {}, `Uploading ${name}`), bar, words, cancel];
  byId("start").replaceChildren(element("section", { class: "drop" }, ...parts));
  /** @param {number} share */
  const show = (share) => {
    bar.value = share;
    words.textContent = `${size(file.size * share)} of ${size(file.size)}`;
  };
  try {
    const stack = await upload(file, name, show, giving.signal);
    location.hash = `stack=${stack.id}`;
  } catch (error) {
    showHome();
    report(error);
  }
}

async function openSample() {
  try {
    const sample = await request(`models/${defaultModel}/sample`);
    await openFile(await sample.blob(), `${defaultModel}-sample.tif`);
  } catch (error) {
    report(error);
  }
}

function showHome() {
  show("start");
  byId("title").textContent = "Objects in 3D microscopy stacks";
  showStart(byId("start"), { open: openFile, sample: openSample, job: (id) => (location.hash = `job=${id}`) });
  if (abilities.corrections) showLearning().catch(report);
}

/** List the annotated stacks and the trainings of the service on the first screen. */
async function showLearning() {
  const { training, training_minutes: most } = abilities;
  const improve = training ? () => trainingDialog(most).catch(report) : null;
  const lists = await Promise.all([annotationsList({ improve }), training ? trainingsList() : null]);
  if (!byId("start").hidden) byId("start").append(...lists.filter((list) => list !== null));
}

/** @param {string} id @param {string | null} model that is chosen, instead of the default one */
async function openStack(id, model) {
  const stack = await json(`stacks/${id}`);
  session = new Session(id, stack.name || "stack.tif", stack.bytes);
  if (model) session.settings.restore({ model });
  byId("side").replaceChildren(before());
  await session.inspect();
}

/** @param {string} id */
async function openJob(id) {
  /** @type {Job} */
  const job = await json(`jobs/${id}`);
  const { stack: kept, measurements: _, ...parameters } = job.parameters;
  const stack = typeof kept === "string" ? await json(`stacks/${kept}`).catch(() => null) : null;
  if (session === null || stack === null || session.stack !== stack.id) {
    session?.end();
    session = new Session(stack?.id ?? "", job.name || "stack.tif", stack?.bytes ?? 0);
  }
  show("work");
  const opened = session;
  const given = Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
  opened.settings.restore({ ...given, model: String(parameters.model ?? job.model.split("/")[0]) });
  remember({ job: id, stack: opened.stack, name: job.name, model: job.model, created: job.created });
  const looking = stack ? opened.inspect() : Promise.resolve(opened.settings.lose());
  await Promise.all([looking, opened.follow(id)]);
}

/** @param {string} id @param {AbortSignal} signal */
async function openTraining(id, signal) {
  show("learn");
  byId("title").textContent = "Training of a model";
  await watchTraining(byId("learn"), id, signal, {
    segment: (annotation, model) => segmentAnnotation(annotation, model).catch(report),
  });
}

/** Open the stack of an annotation with a model; one that is kept no more is sent again. @param {string} id @param {string} model */
async function segmentAnnotation(id, model) {
  const { stack: former, name } = await json(`annotations/${id}`);
  await readModels();
  const kept = former ? await json(`stacks/${former}`).catch(() => null) : null;
  const stack = kept ?? (await upload(await (await request(`annotations/${id}/image`)).blob(), name, () => undefined));
  location.hash = `stack=${stack.id}&model=${encodeURIComponent(model)}`;
}

/** @param {AbortSignal} signal */
async function openStatus(signal) {
  show("status");
  byId("title").textContent = "Status of the service";
  await watchStatus(byId("status"), signal, readModels);
}

/** @param {string[]} jobs @param {AbortSignal} signal */
async function openCompare(jobs, signal) {
  show("compare");
  byId("title").textContent = "Two results side by side";
  await showCompare(byId("compare"), jobs, signal);
}

async function readModels() {
  const served = await json("models");
  models = served.models;
  defaultModel = served.default;
}

/** What refreshes the status until another view is shown. */
let watching = new AbortController();

/** @param {string} kind @param {string} id @param {string | null} model @param {AbortSignal} signal */
async function openView(kind, id, model, signal) {
  if (kind === "status") return openStatus(signal);
  if (kind === "compare" && id) return openCompare(id.split(","), signal);
  if (kind === "job" && id) return openJob(id);
  if (kind === "stack" && id) return openStack(id, model);
  if (kind === "training" && id) return openTraining(id, signal);
  return showHome();
}

async function route() {
  const address = new URLSearchParams(location.hash.slice(1));
  const [kind, id] = address.entries().next().value ?? ["", ""];
  watching.abort();
  watching = new AbortController();
  document.body.classList.add("busy");
  if (kind !== "job") {
    session?.end();
    session = null;
  }
  try {
    await openView(kind, id, address.get("model"), watching.signal);
  } catch (error) {
    document.body.classList.remove("busy");
    if (error instanceof Problem && error.status === 404) {
      history.replaceState(null, "", "#");
      showHome();
      if (kind === "job" && (await loseJob(id))) return;
    }
    report(error);
  }
}

/** Forget a job that the service does not know. @param {string} id @returns {Promise<boolean>} whether corrections of it are offered instead */
async function loseJob(id) {
  const name = entries().find(({ job }) => job === id)?.name ?? "stack.tif";
  const drop = () => {
    forget(id);
    forgetCorrections(id);
    showHome();
  };
  const offered = await offerCorrections(id, name, drop);
  if (!offered) drop();
  return offered;
}

/** @type {Promise<string> | null} */
let asking = null;
whenKeyIsWanted((refused) => {
  asking ??= new Promise((resolve) => {
    const dialog = /** @type {HTMLDialogElement} */ (byId("ask-key"));
    const input = /** @type {HTMLInputElement} */ (byId("key-field"));
    byId("key-problem").textContent = refused ? "The service does not know that key." : "";
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        resolve(input.value.trim());
      },
      { once: true },
    );
    dialog.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
    if (!dialog.open) dialog.showModal();
  });
  return asking;
});

async function start() {
  startTheme(byId("theme"));
  byId("home").addEventListener("click", () => (location.hash = ""));
  byId("key").addEventListener("click", () => {
    useKey("");
    location.reload();
  });
  const [document] = await Promise.all([json("openapi.json"), readModels()]);
  /** @type {{name: string}[]} */
  const parameters = document.paths["/jobs"].post.parameters;
  known = new Set(parameters.map(({ name }) => name));
  if (document.paths["/limits"]) abilities = { ...abilities, ...(await json("limits")) };
  byId("key").hidden = !sessionStorage.getItem("stackseg-key");
  // Not before: a change of the address meanwhile would open what `route` opens here once more.
  window.addEventListener("hashchange", route);
  await route();
}

start().catch(report);
