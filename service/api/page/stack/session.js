/** The open stack with its metadata, its jobs, and the displayed planes and time point. */

import { waitForConnection } from "../core/connection.js";
import { byId, element, formatMessage } from "../core/elements.js";
import { isAbort } from "../core/error_bar.js";
import { cancelJob, createJob, pollJob, wasConnectionLost } from "../core/job_requests.js";
import { buildQuery, Problem, requestJson } from "../core/requests.js";
import { describeSetting } from "../core/terminology.js";
import { CorrectView } from "../correct/correct_view.js";
import { EmptyLabels } from "../correct/label_sources.js";
import { openGallery } from "../gallery/gallery.js";
import { fetchResults } from "../result/advice.js";
import {
  createFailureExplanation,
  createMissingJobExplanation,
  createUnreadableResultExplanation,
} from "../result/missing_result.js";
import { ProgressView } from "../result/progress_view.js";
import { showResult } from "../result/result_view.js";
import { drawThumbnail } from "../result/screenshots.js";
import { listChangedSettings, StaleNotice } from "../result/stale_notice.js";
import { Viewer } from "../viewer/viewer.js";
import { fetchTable, findChannel } from "../volumes/object_table.js";
import { fetchMiddlePlane, fetchPlane, fetchShape, fetchVolume, makePlaneParameters } from "../volumes/planes.js";
import { getFirstTime } from "../volumes/time_points.js";
import { ChannelTools } from "./channels.js";
import { createChecklist, createUnreadableStackExplanation } from "./guidance.js";
import { markMissingJob, rememberJob } from "./recent_jobs.js";
import { SettingsView } from "./settings_view.js";
import { TimeSlider } from "./time_slider.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("openapi").Inspection} Inspection */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {{models: import("openapi").ModelInfo[], defaultModel: string | null, parameterNames: Set<string>, capabilities: import("openapi").CallerLimits}} Service */
/** @typedef {{id: string, name: string, bytes: number}} Stack id: "" if the service no longer stores the stack; bytes: size of the file */

const INSPECTION_DELAY_MILLISECONDS = 250;
/** Maximum length of the longer edge of previews of channels and scenes, in voxels. */
const MAX_PREVIEW_EDGE = 160;

/** The views, settings and jobs of an open stack. */
export class Session {
  /** @param {Stack} stack @param {Service} service @param {(error: unknown) => void} showError */
  constructor({ id, name, bytes }, service, showError) {
    /** Id of the stack, "" if the service no longer stores the stack. */
    this.stackId = id;
    this.name = name;
    this.service = service;
    this.showError = showError;
    this.sessionAbort = new AbortController();
    /** The request parameters of the displayed planes, as JSON. */
    this.displayedPlaneParametersJson = "";
    this.planesAbort = new AbortController();
    /** Settles when the planes have been fetched. @type {Promise<unknown>} */
    this.planesPromise = Promise.resolve();
    this.jobAbort = new AbortController();
    this.inspectionAbort = new AbortController();
    this.labelsAbort = new AbortController();
    /** The job whose labels are displayed. @type {Job | null} */
    this.job = null;
    /** The scene of the followed job, null if no job is followed. @type {string | null} */
    this.segmentedScene = null;
    /** The labels that are annotated from nothing, or null. @type {EmptyLabels | null} */
    this.annotatedLabels = null;
    /** Resolves after the first inspection. @type {PromiseWithResolvers<void>} */
    this.firstInspection = Promise.withResolvers();
    /** The scene that was inspected last. */
    this.inspectedScene = "";
    /** @type {Inspection | null} */
    this.inspection = null;
    /** Whether the side panel explains why the stack cannot be shown. */
    this.isUnreadable = false;
    this.inspectionTimer = 0;
    /** Dispatches `leaving` before the time point changes, and `time` after the new time point is displayed. */
    this.timeEvents = new EventTarget();
    this.sidePanel = byId("side");
    this.staleNotice = new StaleNotice(() => this.submitJob());
    this.viewer = new Viewer(byId("viewer"));
    this.channelTools = new ChannelTools(this.viewer);
    this.timeSlider = new TimeSlider();
    this.settings = new SettingsView(byId("settings"), service);
    this.settings.setNameAndSize(name, bytes);
    this.viewer.toolbar.append(this.channelTools.root, this.timeSlider.root);
    this.#addEventListeners();
  }

  #addEventListeners() {
    const { timeSlider, settings, viewer } = this;
    timeSlider.addEventListener("change", () => this.goToTimePoint(timeSlider.time).catch(this.showError));
    settings.addEventListener("change", () => {
      if (this.segmentedScene !== null && getScene(settings.parameters) !== this.segmentedScene) this.#leaveJob();
      this.#updateAnnotatedLabels();
      this.#updateStaleNotice();
      this.inspectLater();
    });
    settings.addEventListener("run", () => this.submitJob());
    settings.addEventListener("gallery", () => openGallery(this.service.models, this));
    settings.addEventListener("annotate", () => this.annotate());
    this.timeEvents.addEventListener("leaving", () => this.annotatedLabels && this.jobAbort.abort());
    this.timeEvents.addEventListener("time", () => this.annotatedLabels && this.annotate());
    viewer.addEventListener("diameter", (event) =>
      settings.setDiameter(/** @type {CustomEvent<number>} */ (event).detail),
    );
  }

  /** Cancel all requests of the session. */
  end() {
    this.sessionAbort.abort();
    this.jobAbort.abort();
    this.planesAbort.abort();
    clearTimeout(this.inspectionTimer);
  }

  /** Hide the labels and the result of a job, because the views are about to show another scene. The job continues. */
  #leaveJob() {
    history.pushState(null, "", `#stack=${this.stackId}`);
    this.#endJob();
    this.sidePanel.replaceChildren(createChecklist());
  }

  /** Stop following a job or annotating the stack. */
  #endJob() {
    this.segmentedScene = this.annotatedLabels = null;
    this.jobAbort.abort();
    this.jobAbort = new AbortController();
    this.job = null;
    this.viewer.setLabels(null);
  }

  /** Return empty labels for the displayed image, or null if no image is displayed. */
  #createEmptyLabels() {
    const { inspection, settings, stackId } = this;
    if (inspection === null) return null;
    const { file } = inspection;
    const time = file.time_points ? this.timeSlider.time : settings.parameters.time;
    const { channel, ...selection } = makePlaneParameters(file, settings.parameters, time, settings.parameters.channel);
    const parameters = {
      ...selection,
      channel: file.channels.length > 1 ? channel : undefined,
      voxel_size: settings.parameters.voxel_size,
    };
    const startJob = () => createJob(buildQuery({ ...settings.parameters, ...parameters, stack: stackId }));
    return new EmptyLabels(stackId, parameters, settings.parameters.model, startJob);
  }

  /** Apply the settings to the labels that are annotated. If they select another image, stop annotating. */
  #updateAnnotatedLabels() {
    if (this.annotatedLabels === null) return;
    const labels = this.#createEmptyLabels();
    if (labels?.id === this.annotatedLabels.id) this.annotatedLabels.model = labels.model;
    else this.#leaveJob();
  }

  /** Annotate the displayed image from nothing. Earlier changes in this browser are restored. */
  async annotate() {
    const labels = this.#createEmptyLabels();
    if (labels === null) return;
    this.#endJob();
    this.annotatedLabels = labels;
    const { signal } = this.jobAbort;
    const fragment = `#${labels.getFragment()}`;
    if (location.hash !== fragment) history.pushState(null, "", fragment);
    const view = new CorrectView(labels, this.name, this.viewer, 0, this.service.capabilities, signal);
    this.sidePanel.replaceChildren(element("div", { class: "result" }, element("h2", {}, "Annotate"), view.root));
    view.panel.showProgress("Reading the stack");
    await this.planesPromise.catch(() => undefined);
    if (!signal.aborted) await view.enter();
  }

  /** Mark the displayed result if it was segmented with other settings. */
  #updateStaleNotice() {
    if (this.job && !this.settings.isStackMissing)
      this.staleNotice.show(listChangedSettings(this.job, this.settings.parameters));
  }

  /** Inspect the stack once the settings have not changed for a short time. */
  inspectLater() {
    // A response for the previous settings would be shown with the new ones.
    this.inspectionAbort.abort();
    clearTimeout(this.inspectionTimer);
    this.inspectionTimer = window.setTimeout(() => this.inspect(), INSPECTION_DELAY_MILLISECONDS);
  }

  /** Inspect the stack with the current parameters, and show its planes. */
  async inspect() {
    this.inspectionAbort.abort();
    this.inspectionAbort = new AbortController();
    const signal = AbortSignal.any([this.inspectionAbort.signal, this.sessionAbort.signal]);
    const parameters = { ...this.settings.parameters, stack: this.stackId };
    try {
      await this.#showInspection(await requestJson(`inspect?${buildQuery(parameters)}`, { method: "POST", signal }));
    } catch (error) {
      if (signal.aborted) return;
      this.firstInspection.resolve();
      if (!(error instanceof Problem)) throw error;
      if (error.status === 0) return this.#inspectAfterReconnection(signal);
      if (error.slug === "unknown-stack") return this.settings.showMissingStack();
      this.settings.showProblem(error);
      if (getScene(parameters) !== this.inspectedScene) this.#hidePlanes();
      this.isUnreadable = !this.displayedPlaneParametersJson;
      if (this.isUnreadable) this.sidePanel.replaceChildren(createUnreadableStackExplanation(error));
    }
  }

  /** Wait until the service responds, and inspect the stack again. @param {AbortSignal} signal */
  async #inspectAfterReconnection(signal) {
    this.settings.runButton.disabled = true;
    await waitForConnection(signal).catch(() => undefined);
    if (!signal.aborted) this.inspectLater();
  }

  /** Hide the planes, because another scene is selected. */
  #hidePlanes() {
    this.planesAbort.abort();
    this.displayedPlaneParametersJson = "";
    this.viewer.scene.set({ overlays: [] });
    this.viewer.root.classList.add("empty");
  }

  /** @param {Inspection} inspection */
  async #showInspection(inspection) {
    const { settings, timeSlider } = this;
    const { file } = inspection;
    this.inspection = inspection;
    this.firstInspection.resolve();
    this.inspectedScene = getScene(settings.parameters);
    if (this.isUnreadable) this.sidePanel.replaceChildren(createChecklist());
    this.isUnreadable = false;
    const planeParameters = makePlaneParameters(
      file,
      settings.parameters,
      file.time_points?.[0] ?? settings.parameters.time,
      0,
    );
    const { signal } = this.sessionAbort;
    settings.metadata.fetchers = {
      fetchChannel: (channel) =>
        fetchMiddlePlane(this.#getPlanesSource(file, { ...planeParameters, channel }), MAX_PREVIEW_EDGE, signal),
      fetchScene: (scene) => this.#fetchScenePreview(scene, planeParameters.allow_incomplete),
    };
    const isTimeMissing = file.times > 1 && !settings.parameters.time;
    settings.show(inspection);
    const [first, stop] = file.time_points ?? [0, 1];
    timeSlider.show(first, stop, timeSlider.time);
    // Without a time point, the problem of the file does not state whether the file has a default scene. The settings
    // have just selected a time point and request another inspection.
    if (isTimeMissing && file.scenes.length > 0) return;
    await this.#showPlanes(inspection);
    this.viewer.diameterCircle.show(settings.customDiameter);
    // The size of the brush and the volumes of objects depend on the voxel size.
    const { annotatedLabels } = this;
    if (annotatedLabels && annotatedLabels.query.voxel_size !== this.#createEmptyLabels()?.query.voxel_size)
      await this.annotate();
  }

  /** Fetch a plane from the middle of another scene, whose shape is not known. @param {number} scene @param {unknown} allow_incomplete */
  async #fetchScenePreview(scene, allow_incomplete) {
    const { signal } = this.sessionAbort;
    const source = { url: `stacks/${this.stackId}/planes`, parameters: { scene, time: 0, allow_incomplete } };
    return fetchMiddlePlane({ ...source, fullShape: await fetchShape(source, signal) }, MAX_PREVIEW_EDGE, signal);
  }

  /** @param {import("openapi").Description} file @param {Record<string, unknown>} parameters @returns {import("../volumes/planes.js").Source} */
  #getPlanesSource({ shape: [, z, y, x] }, parameters) {
    return { url: `stacks/${this.stackId}/planes`, parameters, fullShape: [z, y, x] };
  }

  /** @param {Inspection} inspection */
  async #showPlanes({ file }) {
    const { viewer, settings, channelTools } = this;
    const { channel, time } = settings.parameters;
    const planeParameters = makePlaneParameters(
      file,
      settings.parameters,
      file.time_points ? this.timeSlider.time : time,
      channel,
    );
    const key = JSON.stringify(planeParameters);
    if (key === this.displayedPlaneParametersJson) return viewer.setVoxelSize(file.voxel_size);
    // Keep the contrast if only the time point changes.
    const displayedParameters = JSON.parse(this.displayedPlaneParametersJson || "{}");
    const isNewImage = JSON.stringify({ ...displayedParameters, time: planeParameters.time }) !== key;
    if (displayedParameters.scene !== planeParameters.scene) this.#hidePlanes();
    this.planesAbort.abort();
    this.planesAbort = new AbortController();
    const { signal } = this.planesAbort;
    this.displayedPlaneParametersJson = key;
    const source = this.#getPlanesSource(file, planeParameters);
    this.#setFullResolutionSource(source);
    viewer.fetchStatus.textContent = "Reading the stack";
    try {
      this.planesPromise = fetchVolume(source, signal, (volume, fraction) => {
        const isFirstBlock = viewer.scene.state.image !== volume;
        if (isFirstBlock) viewer.open(volume, file.voxel_size);
        if (isFirstBlock && isNewImage) viewer.adjustContrast();
        else if (!isFirstBlock) viewer.refresh();
        viewer.fetchStatus.textContent = fraction < 1 ? `Reading the stack, ${Math.round(fraction * 100)}%` : "";
      });
      await this.planesPromise;
      if (isNewImage) viewer.adjustContrast();
      else viewer.refresh();
      channelTools.show(file, Number(planeParameters.channel) || 0, (overlayChannel, overlaySignal, onblock) =>
        fetchVolume(
          this.#getPlanesSource(file, { ...planeParameters, channel: overlayChannel }),
          overlaySignal,
          onblock,
        ),
      );
    } catch (error) {
      if (isAbort(error)) return undefined;
      viewer.fetchStatus.replaceChildren(formatMessage(error));
      if (!(await wasConnectionLost(error, signal)) || signal.aborted) return undefined;
      this.displayedPlaneParametersJson = "";
      this.inspectLater();
    }
    return undefined;
  }

  /** Set the source from which the viewer fetches planes at full resolution. @param {import("../volumes/planes.js").Source} source */
  #setFullResolutionSource(source) {
    const { viewer } = this;
    viewer.fetchFullVolume = (signal, onblock) => fetchVolume(source, signal, onblock, [1, 1, 1]);
    viewer.planeLoader.fetchPlane = async (axis, position, signal) => {
      const { plane, step } = await fetchPlane(source, axis, position, signal);
      const labels =
        this.job && (await fetchPlane(this.#getLabelsSource(this.job, source.fullShape), axis, position, signal));
      return { image: plane, labels: labels?.plane ?? null, step };
    };
  }

  /** Return the source of a job's labels at the displayed time point. @param {Job} job @param {Triple} fullShape @returns {import("../volumes/planes.js").Source} */
  #getLabelsSource(job, fullShape) {
    const time = job.time_points ? Math.max(0, this.timeSlider.time - getFirstTime(job.parameters.time)) : undefined;
    return { url: `jobs/${job.id}/planes`, parameters: { time }, fullShape };
  }

  /** Show a time point of a time series with its labels. @param {number} time */
  async goToTimePoint(time) {
    if (this.inspection === null) return;
    const { viewer, job } = this;
    const [first, stop] = this.inspection.file.time_points ?? [0, 1];
    this.timeSlider.show(first, stop, time);
    // A tracked object has the same id at all time points and stays selected.
    const selectedId = job?.parameters.link ? viewer.scene.state.selectedId : 0;
    this.timeEvents.dispatchEvent(new Event("leaving"));
    if (job) viewer.setLabels(null);
    await Promise.all([this.#showPlanes(this.inspection), job && this.#showLabels(job)]);
    viewer.select(selectedId);
    this.timeEvents.dispatchEvent(new Event("time"));
  }

  /** @param {Job} job */
  async #showLabels(job) {
    const { viewer } = this;
    this.labelsAbort.abort();
    this.labelsAbort = new AbortController();
    const signal = AbortSignal.any([this.labelsAbort.signal, this.jobAbort.signal]);
    const { url, parameters } = this.#getLabelsSource(job, [0, 0, 0]);
    const fullShape = await fetchShape({ url, parameters }, signal);
    const labels = await fetchVolume({ url, parameters, fullShape }, signal, (volume) => {
      if (viewer.scene.state.image === null) viewer.open(volume, null);
    });
    this.job = job;
    viewer.setLabels(labels);
  }

  /** Submit a job with the current settings, and follow the job. */
  async submitJob() {
    const { settings, sidePanel } = this;
    const earlierPanel = [...sidePanel.children];
    let isCanceled = false;
    const submissionAbort = new AbortController();
    settings.runButton.disabled = true;
    this.#createProgressView(submissionAbort.signal, () => {
      isCanceled = true;
      settings.runButton.disabled = settings.isStackMissing;
      sidePanel.replaceChildren(...earlierPanel);
    });
    try {
      const job = await this.#createJob();
      // The user canceled the job before the service accepted it.
      if (isCanceled) return await cancelJob(job.id);
      // The user may have left the stack or selected another scene in the meantime.
      if (this.sessionAbort.signal.aborted) return;
      if (getScene(job.parameters) !== getScene(settings.parameters)) {
        sidePanel.replaceChildren(createChecklist());
        return;
      }
      history.pushState(null, "", `#job=${job.id}`);
      await this.followJob(job.id);
    } catch (error) {
      if (!isCanceled) sidePanel.replaceChildren(...earlierPanel);
      if (error instanceof Problem && error.slug === "unknown-stack") settings.showMissingStack();
      else if (!isCanceled) this.showError(error);
    } finally {
      submissionAbort.abort();
      settings.runButton.disabled = settings.isStackMissing;
    }
  }

  /** Segment the stack with changed settings. A diameter of nuclei says nothing about cells, so another model does not use it unless `changes` contain it. @param {Record<string, string>} changes */
  async segmentWith(changes) {
    const { settings } = this;
    const isOtherModel = changes.model !== undefined && changes.model !== settings.parameters.model;
    settings.restore({ ...settings.parameters, ...(isOtherModel ? { diameter: "" } : {}), ...changes });
    await this.inspect();
    await this.submitJob();
  }

  /** Whether the stack can be segmented, so that models can be tried on a part of it. */
  get canTryModels() {
    return this.inspection !== null && !this.settings.isStackMissing;
  }

  /** The stack of which models are tried on a part, and the voxel under the crosshair, at full resolution. @returns {import("../gallery/trial.js").Source} */
  get trialSource() {
    if (this.inspection === null) throw new Error("The stack was not inspected.");
    const { stackId, name, settings, timeSlider, viewer } = this;
    const { file } = this.inspection;
    const { image, position } = viewer.scene.state;
    const center = image
      ? position.map((index, axis) => index * image.step[axis])
      : file.shape.slice(1).map((length) => length >> 1);
    return {
      stack: stackId,
      name,
      file,
      parameters: settings.parameters,
      time: timeSlider.time,
      center: /** @type {Triple} */ (center),
    };
  }

  /** Create a job with the current settings, and add it to the recent jobs. @returns {Promise<Job>} */
  async #createJob() {
    const { settings, stackId, name } = this;
    const measurements = this.inspection?.output === "labels" ? "zip" : "";
    const thumbnail = drawThumbnail(this.viewer);
    const { model: _, ...otherParameters } = settings.parameters;
    const descriptions = Object.entries(otherParameters).flatMap(([parameter, value]) =>
      value ? [describeSetting(parameter, value)] : [],
    );
    const job = await createJob(buildQuery({ ...settings.parameters, stack: stackId, measurements }));
    const parameters = descriptions.join(", ");
    rememberJob({ job: job.id, stack: stackId, name, model: job.model, parameters, thumbnail });
    return job;
  }

  /** @param {AbortSignal} signal ends the view @param {() => void} oncancel */
  #createProgressView(signal, oncancel) {
    return new ProgressView(this.sidePanel, this.service.capabilities.temporary_jobs, signal, oncancel);
  }

  /** Show the progress of a job, and then its result. @param {string} id @returns {Promise<void>} */
  async followJob(id) {
    const { sidePanel } = this;
    this.#endJob();
    this.segmentedScene = getScene(this.settings.parameters);
    const { signal } = this.jobAbort;
    const viewAbort = new AbortController();
    const progressView = this.#createProgressView(AbortSignal.any([signal, viewAbort.signal]), () =>
      cancelJob(id).catch(this.showError),
    );
    try {
      const job = await pollJob(id, signal, (report) => progressView.show(report));
      viewAbort.abort();
      rememberJob({ job: id, objects: job.objects, model: job.model, created: job.created });
      if (job.state === "done") await this.showResult(job);
      else sidePanel.replaceChildren(createFailureExplanation(job));
    } catch (error) {
      if (isAbort(error)) return;
      if (!(error instanceof Problem)) throw error;
      if (error.status === 404) return await this.#showMissingJob(id, progressView.isCanceling);
      if (await wasConnectionLost(error, signal)) return await this.followJob(id);
      if (signal.aborted) return;
      this.viewer.fetchStatus.textContent = "";
      const retry = () => this.followJob(id).catch(this.showError);
      sidePanel.replaceChildren(createUnreadableResultExplanation(error, retry));
    } finally {
      viewAbort.abort();
    }
  }

  /** Show that the service no longer has a job, for example because it was restarted. @param {string} id @param {boolean} isCanceled whether the user has canceled the job */
  async #showMissingJob(id, isCanceled) {
    const { sidePanel, stackId, settings } = this;
    markMissingJob(id);
    history.replaceState(null, "", `#stack=${stackId}`);
    const isStackMissing = await requestJson(`stacks/${stackId}`).then(
      () => false,
      (error) => error instanceof Problem && error.status === 404,
    );
    if (isStackMissing) settings.showMissingStack();
    const isTemporary = this.service.capabilities.temporary_jobs;
    sidePanel.replaceChildren(
      isCanceled && !isStackMissing
        ? createFailureExplanation({ state: "cancelled" })
        : createMissingJobExplanation(isTemporary, isStackMissing),
    );
  }

  /** @param {Job} job */
  async showResult(job) {
    const { viewer, name, stackId } = this;
    const { signal } = this.jobAbort;
    viewer.fetchStatus.textContent = "Loading the labels";
    this.settings.proposeDiameter(job.diameter ?? "");
    const [table, results] = await Promise.all([
      fetchTable(job, signal),
      stackId ? fetchResults(stackId, signal) : [],
      stackId ? this.firstInspection.promise : undefined,
    ]);
    await this.#showLabels(job);
    viewer.fetchStatus.textContent = "";
    const timeNavigation = {
      getTimePoint: () => this.timeSlider.time,
      goToTimePoint: (/** @type {number} */ time) => this.goToTimePoint(time),
      events: this.timeEvents,
    };
    const { capabilities, models } = this.service;
    const model = models.find(({ name: modelName }) => modelName === job.model.split("/")[0]);
    const channelNames = this.inspection?.file.channels ?? [];
    showResult(this.sidePanel, { job, stack: stackId, name }, table, {
      channelNames,
      channel: findChannel(channelNames, job.parameters.channel),
      decoding: model?.decoding ?? "",
      classNames: model?.decoding === "classes" ? model.outputs : [],
      viewer,
      capabilities,
      signal,
      results,
      segmentWith: (changes) => this.segmentWith(changes),
      compareModels: () => openGallery(this.service.models, this),
      timeNavigation,
    });
    this.sidePanel.prepend(this.staleNotice.root);
    this.#updateStaleNotice();
    viewer.drawNow();
    rememberJob({ job: job.id, thumbnail: drawThumbnail(viewer) });
  }
}

/** @param {Record<string, unknown>} parameters of a request @returns {string} the selected scene, "" for none */
function getScene({ scene }) {
  return String(scene ?? "");
}
