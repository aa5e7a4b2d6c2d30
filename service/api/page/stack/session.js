/** The stack that is shown with its labels: what is understood of it, its time points, its jobs and their results. */

import { byId } from "../core/elements.js";
import { isAbort } from "../core/notices.js";
import { json, Problem, queryOf, request } from "../core/requests.js";
import { setting } from "../core/words.js";
import { showResult } from "../result/result_view.js";
import { follow, RunView } from "../result/run_view.js";
import { drawThumbnail } from "../result/view_pictures.js";
import { Viewer } from "../viewer/viewer.js";
import { parseTable } from "../volumes/object_table.js";
import { fetchMiddle, fetchPlane, fetchVolume, partOf } from "../volumes/planes.js";
import { firstTime } from "../volumes/time_points.js";
import { ChannelTools } from "./channels.js";
import { afterJob, beforeRun, unreadable } from "./guidance.js";
import { remember } from "./recent_jobs.js";
import { SettingsView } from "./settings_view.js";
import { TimeSlider } from "./time_slider.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {{models: import("openapi").ModelInfo[], defaultModel: string | null, parameters: Set<string>, abilities: import("openapi").Abilities}} Service parameters: their names */
/** @typedef {{id: string, name: string, bytes: number}} Stack id: "" where the service does not keep it any more */

const INSPECTION_DELAY_MILLISECONDS = 250;
const CHANNEL_PICTURE_PIXELS = 160;

export class Session {
  /** @param {Stack} stack @param {Service} service @param {(error: unknown) => void} report shows what went wrong */
  constructor({ id, name, bytes }, service, report) {
    this.stack = id;
    this.name = name;
    this.service = service;
    this.report = report;
    this.ending = new AbortController();
    /** The part of the stack that the views show, as parameters of its planes. */
    this.loaded = "";
    this.loading = new AbortController();
    this.following = new AbortController();
    this.inspecting = new AbortController();
    this.labelling = new AbortController();
    /** The job whose labels are shown. @type {Job | null} */
    this.job = null;
    /** @type {Inspection | null} */
    this.inspection = null;
    /** Whether the side says why the stack cannot be shown. */
    this.refused = false;
    this.timer = 0;
    /** Tells when a time point is left, and when another one is shown. */
    this.moved = new EventTarget();
    this.side = byId("side");
    this.viewer = new Viewer(byId("viewer"));
    this.channels = new ChannelTools(this.viewer);
    this.times = new TimeSlider();
    this.settings = new SettingsView(byId("settings"), service);
    this.settings.setName(name, bytes);
    this.viewer.toolbar.append(this.channels.root, this.times.root);
    this.#listen();
  }

  #listen() {
    const { times, settings, viewer } = this;
    times.addEventListener("change", () => this.goToTime(times.at).catch(this.report));
    settings.addEventListener("change", () => this.inspectLater());
    settings.addEventListener("run", () => this.run());
    viewer.addEventListener("diameter", (event) =>
      settings.setDiameter(/** @type {CustomEvent<number>} */ (event).detail),
    );
  }

  end() {
    this.ending.abort();
    this.following.abort();
    this.loading.abort();
    clearTimeout(this.timer);
  }

  inspectLater() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.inspect(), INSPECTION_DELAY_MILLISECONDS);
  }

  /** Ask what is understood of the stack with the present parameters, and show its planes. */
  async inspect() {
    this.inspecting.abort();
    this.inspecting = new AbortController();
    const signal = AbortSignal.any([this.inspecting.signal, this.ending.signal]);
    const parameters = { ...this.settings.parameters, stack: this.stack };
    try {
      await this.#show(await json(`inspect?${queryOf(parameters)}`, { method: "POST", signal }));
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      this.settings.refuse(error);
      this.refused = !this.loaded;
      if (this.refused) this.side.replaceChildren(unreadable(error));
    }
  }

  /** @param {Inspection} inspection */
  async #show(inspection) {
    const { settings, times } = this;
    const { file } = inspection;
    this.inspection = inspection;
    if (this.refused) this.side.replaceChildren(beforeRun());
    this.refused = false;
    const looked = partOf(file, settings.parameters, file.time_points?.[0] ?? settings.parameters.time, 0);
    settings.questions.fetchMiddle = (channel) =>
      fetchMiddle(this.#planes(file, { ...looked, channel }), CHANNEL_PICTURE_PIXELS, this.ending.signal);
    settings.show(inspection);
    const [first, stop] = file.time_points ?? [0, 1];
    times.show(first, stop, times.at);
    await this.#showPlanes(inspection);
    this.viewer.circle.show(settings.statedDiameter);
  }

  /** @param {import("openapi").Description} file @param {Record<string, unknown>} parameters @returns {import("../volumes/planes.js").Source} */
  #planes({ shape: [, z, y, x] }, parameters) {
    return { address: `stacks/${this.stack}/planes`, parameters, whole: [z, y, x] };
  }

  /** @param {Inspection} inspection */
  async #showPlanes({ file }) {
    const { viewer, settings, channels } = this;
    const { channel, time } = settings.parameters;
    const shown = partOf(file, settings.parameters, file.time_points ? this.times.at : time, channel);
    const key = JSON.stringify(shown);
    if (key === this.loaded) return viewer.setVoxelSize(file.voxel_size);
    // Time points of a series are shown with the same contrast.
    const fresh = this.loaded === "" || JSON.stringify({ ...JSON.parse(this.loaded), time: shown.time }) !== key;
    this.loading.abort();
    this.loading = new AbortController();
    this.loaded = key;
    const source = this.#planes(file, shown);
    this.#fetchFrom(source);
    viewer.waiting.textContent = "Reading the stack";
    try {
      await fetchVolume(source, this.loading.signal, (volume, share) => {
        const first = viewer.scene.state.image !== volume;
        if (first) viewer.open(volume, file.voxel_size);
        if (first && fresh) viewer.settle();
        else if (!first) viewer.refresh();
        viewer.waiting.textContent = share < 1 ? `Reading the stack, ${Math.round(share * 100)} %` : "";
      });
      if (fresh) viewer.settle();
      else viewer.refresh();
      channels.show(file, Number(shown.channel) || 0, (other, signal, onblock) =>
        fetchVolume(this.#planes(file, { ...shown, channel: other }), signal, onblock),
      );
    } catch (error) {
      if (!isAbort(error)) viewer.waiting.textContent = /** @type {Error} */ (error).message;
    }
    return undefined;
  }

  /** Say where the views get planes in full resolution. @param {import("../volumes/planes.js").Source} source of the stack */
  #fetchFrom(source) {
    const { viewer } = this;
    viewer.fetchWhole = (signal, onblock) => fetchVolume(source, signal, onblock, [1, 1, 1]);
    viewer.sharp.fetch = async (axis, at, signal) => {
      const { plane, step } = await fetchPlane(source, axis, at, signal);
      const labels = this.job && (await fetchPlane(this.#labels(this.job, source.whole), axis, at, signal));
      return { image: plane, labels: labels?.plane ?? null, step };
    };
  }

  /** The labels of a job at the time point that is shown. @param {Job} job @param {Triple} whole @returns {import("../volumes/planes.js").Source} */
  #labels(job, whole) {
    const time = job.time_points ? Math.max(0, this.times.at - firstTime(job.parameters.time)) : undefined;
    return { address: `jobs/${job.id}/planes`, parameters: { time }, whole };
  }

  /** Show another time point of a series, and of its labels. @param {number} time */
  async goToTime(time) {
    if (this.inspection === null) return;
    const { viewer, job } = this;
    const [first, stop] = this.inspection.file.time_points ?? [0, 1];
    this.times.show(first, stop, time);
    // Of linked objects the same one stays chosen.
    const chosen = job?.parameters.link ? viewer.scene.state.selected : 0;
    this.moved.dispatchEvent(new Event("leaving"));
    if (job) viewer.setLabels(null);
    await Promise.all([this.#showPlanes(this.inspection), job && this.#showLabels(job)]);
    viewer.select(chosen);
    this.moved.dispatchEvent(new Event("time"));
  }

  /** @param {Job} job */
  async #showLabels(job) {
    const { viewer } = this;
    this.labelling.abort();
    this.labelling = new AbortController();
    const signal = AbortSignal.any([this.labelling.signal, this.following.signal]);
    const { address, parameters } = this.#labels(job, [0, 0, 0]);
    const probe = await request(`${address}?${queryOf({ ...parameters, to: 1, step: "1,9999,9999" })}`, { signal });
    const whole = /** @type {Triple} */ ((probe.headers.get("X-StackSeg-Volume") ?? "").split(",").map(Number));
    const labels = await fetchVolume({ address, parameters, whole }, signal, (volume) => {
      if (viewer.scene.state.image === null) viewer.open(volume, null);
    });
    this.job = job;
    viewer.setLabels(labels);
  }

  async run() {
    const { settings, stack, name } = this;
    settings.run.disabled = true;
    const measurements = this.inspection?.output === "labels" ? "zip" : "";
    const query = queryOf({ ...settings.parameters, stack, measurements });
    try {
      /** @type {Job} */
      const job = await json(`jobs?${query}`, { method: "POST" });
      const { model: _, ...others } = settings.parameters;
      const chosen = Object.entries(others).flatMap(([parameter, value]) => (value ? [setting(parameter, value)] : []));
      const thumbnail = drawThumbnail(this.viewer);
      remember({ job: job.id, stack, name, model: job.model, parameters: chosen.join(", "), thumbnail });
      history.pushState(null, "", `#job=${job.id}`);
      await this.follow(job.id);
    } catch (error) {
      this.report(error);
    } finally {
      settings.run.disabled = false;
    }
  }

  /** @param {string} id */
  async follow(id) {
    const { side } = this;
    const running = new RunView(side, id);
    this.job = null;
    this.viewer.setLabels(null);
    this.following.abort();
    this.following = new AbortController();
    try {
      const job = await follow(id, this.following.signal, (now) => running.show(now));
      remember({ job: id, objects: job.objects, model: job.model, created: job.created });
      if (job.state === "done") await this.showResult(job);
      else side.replaceChildren(afterJob(job));
    } catch (error) {
      if (!isAbort(error)) throw error;
    }
  }

  /** @param {Job} job */
  async showResult(job) {
    const { viewer, name, stack } = this;
    const { signal } = this.following;
    viewer.waiting.textContent = "Fetching the labels";
    const table = job.parameters.measurements === "zip" ? await fetchTable(job, signal) : null;
    await this.#showLabels(job);
    viewer.waiting.textContent = "";
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
    const { abilities } = this.service;
    showResult(this.side, { job, stack, name }, table, { viewer, abilities, signal, segmentWith, times });
    viewer.drawNow();
    remember({ job: job.id, thumbnail: drawThumbnail(viewer) });
  }
}

/** @param {Job} job @param {AbortSignal} signal @returns {Promise<import("../volumes/object_table.js").Table | null>} null: it is empty */
async function fetchTable(job, signal) {
  const answer = await request(`jobs/${job.id}/result`, { headers: { Accept: "text/csv" }, signal });
  const text = await answer.text();
  return text ? parseTable(text) : null;
}
