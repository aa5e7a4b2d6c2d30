/** The open stack: its metadata, the displayed planes and time point, its jobs and their labels. */

import { byId } from "../core/elements.js";
import { isAbort } from "../core/notices.js";
import { buildQuery, Problem, request, requestJson } from "../core/requests.js";
import { describeSetting } from "../core/terminology.js";
import { showResult } from "../result/result_view.js";
import { follow, RunView } from "../result/run_view.js";
import { drawThumbnail } from "../result/screenshots.js";
import { Viewer } from "../viewer/viewer.js";
import { parseTable } from "../volumes/object_table.js";
import { fetchMiddle, fetchPlane, fetchVolume, partOf } from "../volumes/planes.js";
import { firstTime } from "../volumes/time_points.js";
import { ChannelTools } from "./channels.js";
import { checklist, describeFailure, describeUnreadableStack } from "./guidance.js";
import { rememberJob } from "./recent_jobs.js";
import { SettingsView } from "./settings_view.js";
import { TimeSlider } from "./time_slider.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {{models: import("openapi").ModelInfo[], defaultModel: string | null, parameters: Set<string>, abilities: import("openapi").Abilities}} Service parameters: their names */
/** @typedef {{id: string, name: string, bytes: number}} Stack id: "" if the service no longer stores the stack */

const INSPECTION_DELAY_MILLISECONDS = 250;
const CHANNEL_PREVIEW_PIXELS = 160;

export class Session {
  /** @param {Stack} stack @param {Service} service @param {(error: unknown) => void} showError */
  constructor({ id, name, bytes }, service, showError) {
    this.stack = id;
    this.name = name;
    this.service = service;
    this.showError = showError;
    this.ending = new AbortController();
    /** The displayed part of the stack: the parameters of its planes as JSON. */
    this.loadedPart = "";
    this.loading = new AbortController();
    this.following = new AbortController();
    this.inspecting = new AbortController();
    this.labeling = new AbortController();
    /** The job whose labels are displayed. @type {Job | null} */
    this.job = null;
    /** @type {Inspection | null} */
    this.inspection = null;
    /** Whether the side panel explains why the stack cannot be shown. */
    this.isUnreadable = false;
    this.timer = 0;
    /** Dispatches `leaving` before the time point changes, and `time` after the new one is displayed. */
    this.timeEvents = new EventTarget();
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
    times.addEventListener("change", () => this.goToTime(times.time).catch(this.showError));
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

  /** Request how the service interprets the stack with the current parameters, and show its planes. */
  async inspect() {
    this.inspecting.abort();
    this.inspecting = new AbortController();
    const signal = AbortSignal.any([this.inspecting.signal, this.ending.signal]);
    const parameters = { ...this.settings.parameters, stack: this.stack };
    try {
      await this.#show(await requestJson(`inspect?${buildQuery(parameters)}`, { method: "POST", signal }));
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      this.settings.showProblem(error);
      this.isUnreadable = !this.loadedPart;
      if (this.isUnreadable) this.side.replaceChildren(describeUnreadableStack(error));
    }
  }

  /** @param {Inspection} inspection */
  async #show(inspection) {
    const { settings, times } = this;
    const { file } = inspection;
    this.inspection = inspection;
    if (this.isUnreadable) this.side.replaceChildren(checklist());
    this.isUnreadable = false;
    const part = partOf(file, settings.parameters, file.time_points?.[0] ?? settings.parameters.time, 0);
    settings.metadata.fetchMiddle = (channel) =>
      fetchMiddle(this.#planesSource(file, { ...part, channel }), CHANNEL_PREVIEW_PIXELS, this.ending.signal);
    settings.show(inspection);
    const [first, stop] = file.time_points ?? [0, 1];
    times.show(first, stop, times.time);
    await this.#showPlanes(inspection);
    this.viewer.circle.show(settings.customDiameter);
  }

  /** @param {import("openapi").Description} file @param {Record<string, unknown>} parameters @returns {import("../volumes/planes.js").Source} */
  #planesSource({ shape: [, z, y, x] }, parameters) {
    return { address: `stacks/${this.stack}/planes`, parameters, fullShape: [z, y, x] };
  }

  /** @param {Inspection} inspection */
  async #showPlanes({ file }) {
    const { viewer, settings, channels } = this;
    const { channel, time } = settings.parameters;
    const part = partOf(file, settings.parameters, file.time_points ? this.times.time : time, channel);
    const key = JSON.stringify(part);
    if (key === this.loadedPart) return viewer.setVoxelSize(file.voxel_size);
    // All time points of a series are displayed with the same contrast.
    const isOtherImage =
      this.loadedPart === "" || JSON.stringify({ ...JSON.parse(this.loadedPart), time: part.time }) !== key;
    this.loading.abort();
    this.loading = new AbortController();
    this.loadedPart = key;
    const source = this.#planesSource(file, part);
    this.#setFullResolutionSource(source);
    viewer.fetchStatus.textContent = "Reading the stack";
    try {
      await fetchVolume(source, this.loading.signal, (volume, fraction) => {
        const isFirstBlock = viewer.scene.state.image !== volume;
        if (isFirstBlock) viewer.open(volume, file.voxel_size);
        if (isFirstBlock && isOtherImage) viewer.adjustContrast();
        else if (!isFirstBlock) viewer.refresh();
        viewer.fetchStatus.textContent = fraction < 1 ? `Reading the stack, ${Math.round(fraction * 100)}%` : "";
      });
      if (isOtherImage) viewer.adjustContrast();
      else viewer.refresh();
      channels.show(file, Number(part.channel) || 0, (other, signal, onblock) =>
        fetchVolume(this.#planesSource(file, { ...part, channel: other }), signal, onblock),
      );
    } catch (error) {
      if (!isAbort(error)) viewer.fetchStatus.textContent = /** @type {Error} */ (error).message;
    }
    return undefined;
  }

  /** Let the viewer fetch planes of a stack at full resolution. @param {import("../volumes/planes.js").Source} source */
  #setFullResolutionSource(source) {
    const { viewer } = this;
    viewer.fetchFullVolume = (signal, onblock) => fetchVolume(source, signal, onblock, [1, 1, 1]);
    viewer.planeLoader.fetch = async (axis, position, signal) => {
      const { plane, step } = await fetchPlane(source, axis, position, signal);
      const labels =
        this.job && (await fetchPlane(this.#labelsSource(this.job, source.fullShape), axis, position, signal));
      return { image: plane, labels: labels?.plane ?? null, step };
    };
  }

  /** The source of a job's labels at the displayed time point. @param {Job} job @param {Triple} fullShape @returns {import("../volumes/planes.js").Source} */
  #labelsSource(job, fullShape) {
    const time = job.time_points ? Math.max(0, this.times.time - firstTime(job.parameters.time)) : undefined;
    return { address: `jobs/${job.id}/planes`, parameters: { time }, fullShape };
  }

  /** Show another time point of a series with its labels. @param {number} time */
  async goToTime(time) {
    if (this.inspection === null) return;
    const { viewer, job } = this;
    const [first, stop] = this.inspection.file.time_points ?? [0, 1];
    this.times.show(first, stop, time);
    // A tracked object stays selected.
    const selected = job?.parameters.link ? viewer.scene.state.selected : 0;
    this.timeEvents.dispatchEvent(new Event("leaving"));
    if (job) viewer.setLabels(null);
    await Promise.all([this.#showPlanes(this.inspection), job && this.#showLabels(job)]);
    viewer.select(selected);
    this.timeEvents.dispatchEvent(new Event("time"));
  }

  /** @param {Job} job */
  async #showLabels(job) {
    const { viewer } = this;
    this.labeling.abort();
    this.labeling = new AbortController();
    const signal = AbortSignal.any([this.labeling.signal, this.following.signal]);
    const { address, parameters } = this.#labelsSource(job, [0, 0, 0]);
    const probe = await request(`${address}?${buildQuery({ ...parameters, to: 1, step: "1,9999,9999" })}`, { signal });
    const fullShape = /** @type {Triple} */ ((probe.headers.get("X-StackSeg-Volume") ?? "").split(",").map(Number));
    const labels = await fetchVolume({ address, parameters, fullShape }, signal, (volume) => {
      if (viewer.scene.state.image === null) viewer.open(volume, null);
    });
    this.job = job;
    viewer.setLabels(labels);
  }

  /** Submit a job with the current settings, and follow it. */
  async run() {
    const { settings, stack, name } = this;
    settings.run.disabled = true;
    const measurements = this.inspection?.output === "labels" ? "zip" : "";
    const query = buildQuery({ ...settings.parameters, stack, measurements });
    try {
      /** @type {Job} */
      const job = await requestJson(`jobs?${query}`, { method: "POST" });
      const { model: _, ...others } = settings.parameters;
      const texts = Object.entries(others).flatMap(([parameter, value]) =>
        value ? [describeSetting(parameter, value)] : [],
      );
      const thumbnail = drawThumbnail(this.viewer);
      rememberJob({ job: job.id, stack, name, model: job.model, parameters: texts.join(", "), thumbnail });
      history.pushState(null, "", `#job=${job.id}`);
      await this.follow(job.id);
    } catch (error) {
      this.showError(error);
    } finally {
      settings.run.disabled = false;
    }
  }

  /** Show the progress of a job, then its result. @param {string} id */
  async follow(id) {
    const { side } = this;
    const progressView = new RunView(side, id);
    this.job = null;
    this.viewer.setLabels(null);
    this.following.abort();
    this.following = new AbortController();
    try {
      const job = await follow(id, this.following.signal, (report) => progressView.show(report));
      rememberJob({ job: id, objects: job.objects, model: job.model, created: job.created });
      if (job.state === "done") await this.showResult(job);
      else side.replaceChildren(describeFailure(job));
    } catch (error) {
      if (!isAbort(error)) throw error;
    }
  }

  /** @param {Job} job */
  async showResult(job) {
    const { viewer, name, stack } = this;
    const { signal } = this.following;
    viewer.fetchStatus.textContent = "Loading the labels";
    const table = job.parameters.measurements === "zip" ? await fetchTable(job, signal) : null;
    await this.#showLabels(job);
    viewer.fetchStatus.textContent = "";
    const segmentWith = async (/** @type {Record<string, string>} */ changes) => {
      this.settings.restore({ ...this.settings.parameters, ...changes });
      await this.inspect();
      await this.run();
    };
    const times = {
      current: () => this.times.time,
      goTo: (/** @type {number} */ time) => this.goToTime(time),
      target: this.timeEvents,
    };
    const { abilities } = this.service;
    showResult(this.side, { job, stack, name }, table, { viewer, abilities, signal, segmentWith, times });
    viewer.drawNow();
    rememberJob({ job: job.id, thumbnail: drawThumbnail(viewer) });
  }
}

/** @param {Job} job @param {AbortSignal} signal @returns {Promise<import("../volumes/object_table.js").Table | null>} null if there are no objects */
async function fetchTable(job, signal) {
  const response = await request(`jobs/${job.id}/result`, { headers: { Accept: "text/csv" }, signal });
  const text = await response.text();
  return text ? parseTable(text) : null;
}
