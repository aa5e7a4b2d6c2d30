/** A batch of stacks: uploads, inspects and segments them, and follows their jobs. It continues while other views are open. */

import { isAbort } from "../core/notices.js";
import { buildQuery, Problem, request, requestJson, uploadStack } from "../core/requests.js";
import { isFinished } from "../result/run_view.js";
import { deleteOldBatches, loadBatch, loadThumbnails, saveBatch, saveThumbnail } from "./batch_store.js";
import { packStack } from "./collect_files.js";
import { createEntry, getFileName, getPhase, getRequestParameters, isPending, makeKey } from "./entries.js";
import { isTemporary, Lane } from "./lane.js";
import { drawThumbnail, getThumbnailKey } from "./thumbnails.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {import("./entries.js").Parameters} Parameters */
/** @typedef {import("openapi").JobReport} Job */

const MAX_CONCURRENT_UPLOADS = 2;
const MAX_CONCURRENT_READS = 2;
/** Maximum number of jobs of a batch that have not ended. The service limits its queue, and other users need places in it. */
const MAX_UNFINISHED_JOBS = 8;
/** Number of interrupted uploads of a file after which it is not uploaded again, although the service responds. */
const MAX_FAILED_UPLOADS = 3;
const POLL_INTERVAL_MILLISECONDS = 1000;
/** Number of jobs that were submitted elsewhere and are expected between those of the batch in the list of jobs. */
const MARGIN_JOBS = 50;
const MAX_LISTED_JOBS = 1000;
const SAVE_DELAY_MILLISECONDS = 300;

/** The batches of this page by id. They continue while other views are open. @type {Map<string, Batch>} */
const openBatches = new Map();

/** Create a batch of the given files. @param {import("./collect_files.js").FoundFile[]} found @param {string} model @returns {Batch} */
export function createBatch(found, model) {
  const stacks = found.filter(({ skipReason }) => skipReason === "");
  const [first] = stacks.length > 0 ? stacks : found;
  const otherCount = Math.max(stacks.length - 1, 0);
  const name = otherCount > 0 ? `${getFileName(first.path)} and ${otherCount} more` : getFileName(first.path);
  const created = new Date().toISOString();
  const batch = new Batch({
    id: crypto.getRandomValues(new Uint32Array(3)).join("-"),
    name: getFolder(found.map(({ path }) => path)) || name,
    created,
    parameters: { model },
    shared: { channel: "", time: "", link: "", voxel_size: "" },
    entries: found.map((file, index) => createEntry(index, file)),
  });
  openBatches.set(batch.id, batch);
  batch.save();
  deleteOldBatches();
  return batch;
}

/** Return a batch of this page, or restore it from this browser's storage. @param {string} id @returns {Promise<Batch | null>} null if it is not stored */
export async function openBatch(id) {
  const record = openBatches.has(id) ? undefined : await loadBatch(id);
  if (record !== undefined) openBatches.set(id, new Batch(record, await loadThumbnails(id)));
  return openBatches.get(id) ?? null;
}

/** Forget a batch, and cancel its uploads. @param {string} id */
export function closeBatch(id) {
  openBatches.get(id)?.end();
  openBatches.delete(id);
}

/** Batch that dispatches `change` after its entries or the connection to the service have changed. */
export class Batch extends EventTarget {
  /** @param {import("./batch_store.js").BatchRecord} record @param {Map<number, string>} [thumbnails] data URLs by index */
  constructor({ id, name, created, parameters, shared, entries }, thumbnails = new Map()) {
    super();
    this.id = id;
    this.name = name;
    this.created = created;
    this.parameters = parameters;
    this.shared = shared;
    /** @type {Entry[]} */
    this.entries = entries.map((entry, index) => ({
      ...{ parts: [], ...entry, upload: null, isBusy: false, isVerified: false },
      thumbnail: thumbnails.get(index) ?? "",
      thumbnailKey: thumbnails.has(index) ? entry.thumbnailKey : "",
    }));
    /** Whether the last request got a response. */
    this.isConnected = true;
    this.saveTimer = 0;
    this.pollTimer = 0;
    this.isPolling = false;
    this.batchAbort = new AbortController();
    const onoutcome = (/** @type {unknown} */ error) => this.#noteOutcome(error);
    this.uploads = new Lane(MAX_CONCURRENT_UPLOADS, () => this.#findUpload(), onoutcome);
    this.reads = new Lane(MAX_CONCURRENT_READS, () => this.#findRead(), onoutcome);
    this.submissions = new Lane(1, () => this.#findSubmission(), onoutcome);
    window.addEventListener("beforeunload", (event) => this.#warnBeforeUnload(event), {
      signal: this.batchAbort.signal,
    });
    this.#continue();
  }

  /** The entries that can be stacks. */
  get stacks() {
    return this.entries.filter((entry) => entry.skipReason === "");
  }

  /** Cancel all requests. The jobs continue. */
  end() {
    this.batchAbort.abort();
    clearTimeout(this.saveTimer);
    clearTimeout(this.pollTimer);
    for (const { upload } of this.entries) upload?.abort.abort();
    this.entries = [];
  }

  /** Name of the files with the results, without suffix. */
  get fileStem() {
    const folder = getFolder(this.entries.map(({ path }) => path));
    return folder.replaceAll(/[^\p{L}\p{N}._-]+/gu, "_") || `batch_${this.created.slice(0, 10)}`;
  }

  /** Return the key of the request with which a stack would be segmented now. @param {Entry} entry */
  getKey(entry) {
    return makeKey(getRequestParameters(this, entry));
  }

  /** @param {Entry} entry @returns {boolean} whether the result was made with other settings */
  isStale(entry) {
    return entry.job !== "" && entry.jobKey !== this.getKey(entry);
  }

  /** List the stacks that `run` would segment: those without a job, and those whose job failed or had other settings. */
  listRunnable() {
    return this.stacks.filter((entry) => {
      const phase = getPhase(entry);
      if (phase === "ready") return true;
      const hasEnded = ["done", "failed", "cancelled", "expired", "gone"].includes(phase);
      if (!hasEnded || !(entry.stack || entry.parts.length)) return false;
      return (phase !== "done" && entry.job !== "") || this.isStale(entry);
    });
  }

  /** Change the settings of all stacks. @param {Parameters} parameters */
  setParameters(parameters) {
    this.parameters = { ...parameters };
    this.#changed();
  }

  /** Change the metadata for the files that need it. @param {Partial<import("./entries.js").SharedMetadata>} changes */
  setShared(changes) {
    this.shared = { ...this.shared, ...changes };
    this.#changed();
  }

  /** Change the settings of some stacks. @param {Entry[]} entries @param {Parameters} changes */
  setOwnParameters(entries, changes) {
    for (const entry of entries) {
      const merged = { ...entry.parameters, ...changes };
      entry.parameters = Object.fromEntries(Object.entries(merged).filter(([, value]) => value !== ""));
      if (getPhase(entry) === "question") entry.problem = null;
    }
    this.#changed();
  }

  /** Segment all stacks that have no result with the current settings. */
  run() {
    for (const entry of this.listRunnable()) this.#request(entry);
    this.#changed();
  }

  /** Segment a stack again, or upload it again if that failed. @param {Entry} entry */
  retry(entry) {
    const hadJob = entry.job !== "";
    const wasRequested = entry.isRequested;
    Object.assign(entry, { problem: null, failedUploads: 0, isCancelled: false });
    if (hadJob || wasRequested) this.#request(entry);
    this.#changed();
  }

  /** @param {Entry} entry */
  #request(entry) {
    const changes = { job: "", jobKey: "", report: null, isGone: false, isCancelling: false, isCancelled: false };
    Object.assign(entry, changes, { problem: null, isRequested: true, attempt: entry.attempt + 1 });
  }

  /** Cancel the upload or the job of a stack. @param {Entry} entry */
  cancel(entry) {
    entry.upload?.abort.abort();
    if (entry.job) entry.isCancelling = true;
    else entry.isCancelled = true;
    this.#changed();
  }

  /** Cancel everything that has not ended. */
  cancelAll() {
    for (const entry of this.stacks) {
      const phase = getPhase(entry);
      if (isPending(entry) || ["requested", "queued", "uploading"].includes(phase)) this.cancel(entry);
    }
  }

  /** Add files that were chosen again after a reload of the page. Other files become new entries. @param {import("./collect_files.js").FoundFile[]} found */
  addFiles(found) {
    for (const file of found) {
      const bytes = file.parts.reduce((sum, part) => sum + part.file.size, 0);
      const match =
        this.entries.find((entry) => entry.path === file.path && entry.bytes === bytes) ??
        this.entries.find((entry) => getPhase(entry) === "missing" && isSameFile(entry, file.path, bytes));
      if (match === undefined) this.entries.push(createEntry(this.entries.length, file));
      else if (!match.skipReason) match.parts = file.parts;
    }
    this.#changed();
  }

  #changed() {
    clearTimeout(this.saveTimer);
    this.saveTimer = window.setTimeout(() => this.save(), SAVE_DELAY_MILLISECONDS);
    this.#continue();
    this.dispatchEvent(new Event("change"));
  }

  /** Save the batch in this browser. */
  save() {
    const entries = this.entries.map(({ parts, upload, isBusy, thumbnail, ...stored }) => stored);
    const { id, name, created, parameters, shared } = this;
    return saveBatch({ id, name, created, parameters, shared, entries });
  }

  #continue() {
    this.uploads.run();
    this.reads.run();
    this.submissions.run();
    this.#poll();
  }

  /** @param {unknown} error null after success */
  #noteOutcome(error) {
    this.isConnected = !(error instanceof Problem && error.status === 0);
    if (error !== null && !(error instanceof Problem)) console.error(error);
    this.#changed();
  }

  /** @param {BeforeUnloadEvent} event */
  #warnBeforeUnload(event) {
    const isUploading = this.entries.some((entry) => ["uploading", "queued"].includes(getPhase(entry)));
    if (isUploading) event.preventDefault();
  }

  #findUpload() {
    const entry = this.stacks.find((candidate) => getPhase(candidate) === "queued" && candidate.parts.length > 0);
    if (entry === undefined) return null;
    const abort = new AbortController();
    entry.upload = { fraction: 0, abort };
    return () => this.#upload(entry, abort.signal);
  }

  /** @param {Entry} entry @param {AbortSignal} signal */
  async #upload(entry, signal) {
    const showFraction = (/** @type {number} */ fraction) => {
      if (entry.upload) entry.upload.fraction = fraction;
      this.dispatchEvent(new Event("change"));
    };
    try {
      const { content, name } = await packStack(entry.path, entry.parts, signal);
      signal.throwIfAborted();
      entry.stack = (await uploadStack(content, name, showFraction, signal)).id;
      entry.failedUploads = 0;
    } catch (error) {
      if (error instanceof Problem) await this.#handleUploadProblem(entry, error);
      else if (!signal.aborted) entry.problem = toEntryProblem(/** @type {Error} */ (error));
      throw error;
    } finally {
      entry.upload = null;
    }
  }

  /** Decide whether a file is uploaded again. A service that refuses a large file may close the connection without a response. @param {Entry} entry @param {Problem} problem */
  async #handleUploadProblem(entry, problem) {
    if (!isTemporary(problem)) entry.problem = toEntryProblem(problem);
    if (problem.status !== 0) return;
    const isAlive = await request("health/live").then(
      () => true,
      () => false,
    );
    if (isAlive) entry.failedUploads += 1;
    if (entry.failedUploads >= MAX_FAILED_UPLOADS) entry.problem = toEntryProblem(problem);
  }

  #findRead() {
    const isReadable = (/** @type {Entry} */ entry) => entry.stack !== "" && !entry.isBusy && entry.problem === null;
    const uninspected = this.stacks.find(
      (entry) => isReadable(entry) && !entry.isCancelled && entry.inspectedKey !== this.getKey(entry),
    );
    const unseen = this.stacks.find(
      (entry) => isReadable(entry) && entry.thumbnailKey !== this.#getThumbnailKey(entry),
    );
    const entry = uninspected ?? unseen;
    if (entry === undefined) return null;
    entry.isBusy = true;
    const task = uninspected ? () => this.#inspect(entry) : () => this.#drawThumbnail(entry);
    return () =>
      task().finally(() => {
        entry.isBusy = false;
      });
  }

  /** @param {Entry} entry */
  async #inspect(entry) {
    const key = this.getKey(entry);
    const parameters = getRequestParameters(this, entry);
    const query = buildQuery({ ...parameters, stack: entry.stack });
    try {
      /** @type {import("openapi").Inspection} */
      const inspection = await requestJson(`inspect?${query}`, { method: "POST", signal: this.batchAbort.signal });
      const { file } = inspection;
      const lacksVoxelSize = parameters.voxel_size ? (entry.facts?.lacksVoxelSize ?? false) : !file.voxel_size;
      entry.facts = { channelCount: file.channels.length, times: file.times, lacksVoxelSize };
      entry.inspection = inspection;
      entry.inspectedKey = key;
    } catch (error) {
      if (isTemporary(error) || !(error instanceof Problem)) throw error;
      entry.inspectedKey = key;
      if (isMissingStack(error)) entry.stack = "";
      else if (entry.job === "") entry.problem = toEntryProblem(error);
    }
  }

  /** @param {Entry} entry */
  async #drawThumbnail(entry) {
    const key = this.#getThumbnailKey(entry);
    try {
      entry.thumbnail = await drawThumbnail(entry, getRequestParameters(this, entry), this.batchAbort.signal);
      await saveThumbnail(this.id, entry.index, entry.thumbnail);
    } catch (error) {
      if (isTemporary(error) || isAbort(error)) throw error;
      if (error instanceof Problem && isMissingStack(error)) entry.stack = "";
    }
    // A stack that cannot be drawn keeps its previous thumbnail.
    entry.thumbnailKey = key;
  }

  /** @param {Entry} entry */
  #getThumbnailKey(entry) {
    return getThumbnailKey(entry, getRequestParameters(this, entry));
  }

  #findSubmission() {
    const unfinishedCount = this.entries.filter(isPending).length;
    if (unfinishedCount >= MAX_UNFINISHED_JOBS) return null;
    const entry = this.stacks.find(
      (candidate) => getPhase(candidate) === "requested" && candidate.inspectedKey === this.getKey(candidate),
    );
    return entry ? () => this.#submit(entry) : null;
  }

  /** @param {Entry} entry */
  async #submit(entry) {
    const parameters = getRequestParameters(this, entry);
    const measurements = entry.inspection?.output === "labels" ? "zip" : "";
    // After a lost response or a reload, the same key leads to the same job.
    const headers = { "Idempotency-Key": `${this.id}-${entry.index}-${entry.attempt}` };
    await this.save();
    try {
      const query = buildQuery({ ...parameters, stack: entry.stack, measurements });
      /** @type {Job} */
      const report = await requestJson(`jobs?${query}`, { method: "POST", headers, signal: this.batchAbort.signal });
      const changes = { report, job: report.id, jobKey: makeKey(parameters), isVerified: true, isRequested: false };
      // The user may have canceled the stack in the meantime.
      Object.assign(entry, changes, { isCancelling: entry.isCancelled, isCancelled: false });
      await this.save();
    } catch (error) {
      if (isTemporary(error) || !(error instanceof Problem)) throw error;
      if (isMissingStack(error)) entry.stack = "";
      else Object.assign(entry, { problem: toEntryProblem(error) });
    }
  }

  /** Poll the jobs of the batch until all have ended. */
  async #poll() {
    if (this.isPolling || !this.entries.some(isPending)) return;
    this.isPolling = true;
    try {
      await this.#updateReports();
      this.isConnected = true;
    } catch (error) {
      if (!isTemporary(error) && !this.batchAbort.signal.aborted) console.error(error);
      this.isConnected = !(error instanceof Problem && error.status === 0);
    }
    this.pollTimer = window.setTimeout(() => {
      this.isPolling = false;
      this.#poll();
    }, POLL_INTERVAL_MILLISECONDS);
    this.#changed();
  }

  async #updateReports() {
    const { signal } = this.batchAbort;
    const pendingEntries = this.entries.filter(isPending);
    const limit = Math.min(pendingEntries.length + MARGIN_JOBS, MAX_LISTED_JOBS);
    /** @type {{jobs: Job[]}} */
    const { jobs } = await requestJson(`jobs?limit=${limit}`, { signal });
    const reports = new Map(jobs.map((report) => [report.id, report]));
    for (const entry of pendingEntries) {
      const report = reports.get(entry.job) ?? (await this.#fetchReport(entry.job));
      if (report) entry.report = report;
      else entry.isGone = true;
      entry.isVerified = true;
      if (entry.isCancelling && report && !isFinished(report.state))
        await request(`jobs/${entry.job}`, { method: "DELETE", signal });
    }
  }

  /** @param {string} job @returns {Promise<Job | null>} null if the service does not know the job */
  async #fetchReport(job) {
    try {
      return await requestJson(`jobs/${job}`, { signal: this.batchAbort.signal });
    } catch (error) {
      if (error instanceof Problem && error.status === 404) return null;
      throw error;
    }
  }
}

/** @param {string[]} paths @returns {string} name of the folder that contains all files, "" if there is none */
function getFolder(paths) {
  const folders = new Set(paths.map((path) => (path.includes("/") ? path.split("/")[0] : "")));
  return folders.size === 1 ? [...folders][0] : "";
}

/** Return whether a file has the name and the size of an entry, although it may have been chosen without its folder. @param {Entry} entry @param {string} path @param {number} bytes */
function isSameFile(entry, path, bytes) {
  return getFileName(entry.path) === getFileName(path) && entry.bytes === bytes;
}

/** @param {Problem} problem @returns {boolean} whether the service no longer stores the stack */
function isMissingStack({ status, slug }) {
  return status === 404 && slug === "unknown-stack";
}

/** @param {Error} error @returns {import("./entries.js").EntryProblem} */
function toEntryProblem(error) {
  const [slug, suggestedValues] = error instanceof Problem ? [error.slug, error.suggestedValues] : ["", {}];
  return { slug, message: error.message, suggestedValues };
}
