/** A batch of stacks: uploads, inspects and segments them, and follows their jobs. It continues while other views are open. */

import { Problem } from "../core/requests.js";
import { saveBatch } from "./batch_store.js";
import { createEntry, getFileName, getPhase, getRequestParameters, isPending, makeKey } from "./entries.js";
import { JobWatcher } from "./job_watcher.js";
import { Lane } from "./lane.js";
import { inspectStack, submitJob, updateThumbnail, uploadFiles } from "./stack_tasks.js";
import { getThumbnailKey } from "./thumbnails.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {import("./entries.js").Parameters} Parameters */
/** @typedef {import("openapi").JobReport} Job */

const MAX_CONCURRENT_UPLOADS = 2;
const MAX_CONCURRENT_READS = 2;
/** Maximum number of jobs of a batch that have not ended. The service limits its queue, and other users need places in it. */
const MAX_UNFINISHED_JOBS = 8;
const SAVE_DELAY_MILLISECONDS = 300;

/** Batch that dispatches `change` after its entries have changed. */
export class Batch extends EventTarget {
  /** @param {import("./batch_store.js").BatchRecord} record @param {Map<number, string>} [thumbnails] data URLs by index */
  constructor({ id, name, folder, created, parameters, shared, entries }, thumbnails = new Map()) {
    super();
    this.id = id;
    this.name = name;
    /** Folder that contains all files, "" if there is none. The paths of the entries are relative to this folder. */
    this.folder = folder;
    this.created = created;
    this.parameters = parameters;
    this.shared = shared;
    /** @type {Entry[]} */
    this.entries = entries.map((entry) => ({
      ...{ parts: [], ...entry, upload: null, isBusy: false, isVerified: false },
      thumbnail: thumbnails.get(entry.index) ?? "",
      thumbnailKey: thumbnails.has(entry.index) ? entry.thumbnailKey : "",
    }));
    this.saveTimer = 0;
    this.batchAbort = new AbortController();
    const onoutcome = (/** @type {unknown} */ error) => this.#noteOutcome(error);
    this.uploads = new Lane(MAX_CONCURRENT_UPLOADS, () => this.#findUpload(), onoutcome);
    this.reads = new Lane(MAX_CONCURRENT_READS, () => this.#findRead(), onoutcome);
    this.submissions = new Lane(1, () => this.#findSubmission(), onoutcome);
    this.watcher = new JobWatcher(this, onoutcome);
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
    for (const { upload } of this.entries) upload?.abort.abort();
    this.entries = [];
  }

  /** Name of the files with the results, without suffix. */
  get fileStem() {
    return this.folder.replaceAll(/[^\p{L}\p{N}._-]+/gu, "_") || `batch_${this.created.slice(0, 10)}`;
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
    this.#inspectRefusedStacks();
    this.#changed();
  }

  /** Change the metadata for the files that need it. @param {Partial<import("./entries.js").SharedMetadata>} changes */
  setShared(changes) {
    this.shared = { ...this.shared, ...changes };
    this.#inspectRefusedStacks();
    this.#changed();
  }

  /** Inspect the stacks that were refused with the previous settings again. */
  #inspectRefusedStacks() {
    for (const entry of this.stacks) {
      if (entry.stack !== "" && entry.inspectedKey !== this.getKey(entry)) entry.problem = null;
    }
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

  /** Use the result of a job that was submitted for the stack in another view. Its settings become settings of this stack. @param {Entry} entry @param {Job} report */
  adopt(entry, report) {
    const { stack: _, measurements: _measurements, ...parameters } = report.parameters;
    const shared = getRequestParameters(this, { facts: entry.facts, parameters: {} });
    entry.parameters = {};
    for (const name of new Set([...Object.keys(shared), ...Object.keys(parameters)])) {
      const value = String(parameters[name] ?? "");
      if (value !== (shared[name] ?? "")) entry.parameters[name] = value;
    }
    Object.assign(entry, { job: report.id, report, isVerified: false, isGone: false, isRequested: false });
    entry.jobKey = this.getKey(entry);
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

  /** Segment a stack with other settings than the other stacks. @param {Entry} entry @param {Parameters} changes */
  runWith(entry, changes) {
    this.setOwnParameters([entry], changes);
    this.retry(entry);
  }

  /** Remove a stack without a result from the list. @param {Entry} entry */
  remove(entry) {
    this.entries = this.entries.filter((other) => other !== entry);
    this.#changed();
  }

  /** Cancel everything that has not ended. */
  cancelAll() {
    for (const entry of this.stacks) {
      const phase = getPhase(entry);
      if (isPending(entry) || ["requested", "queued", "uploading"].includes(phase)) this.cancel(entry);
    }
  }

  /** Add files as new entries, except files that were chosen again after a reload of the page. @param {import("./collect_files.js").FoundFile[]} found */
  addFiles(found) {
    const prefix = `${this.folder}/`;
    for (const { path, ...content } of found) {
      const file = { ...content, path: this.folder && path.startsWith(prefix) ? path.slice(prefix.length) : path };
      const bytes = file.parts.reduce((sum, part) => sum + part.file.size, 0);
      const match =
        this.entries.find((entry) => entry.path === file.path && entry.bytes === bytes) ??
        this.entries.find((entry) => getPhase(entry) === "missing" && isSameFile(entry, file.path, bytes));
      if (match === undefined) this.entries.push(createEntry(this.#createIndex(), file));
      else if (!match.skipReason) match.parts = file.parts;
    }
    this.#changed();
  }

  /** Return an index that no entry has, because thumbnails and requests are stored by index. */
  #createIndex() {
    return this.entries.reduce((max, { index }) => Math.max(max, index), -1) + 1;
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
    const { id, name, folder, created, parameters, shared } = this;
    return saveBatch({ id, name, folder, created, parameters, shared, entries });
  }

  #continue() {
    this.uploads.run();
    this.reads.run();
    this.submissions.run();
    this.watcher.run();
  }

  /** @param {unknown} error null after success */
  #noteOutcome(error) {
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
    return () => uploadFiles(this, entry, abort.signal);
  }

  #findRead() {
    const isReadable = (/** @type {Entry} */ entry) => entry.stack !== "" && !entry.isBusy && entry.problem === null;
    const uninspected = this.stacks.find(
      (entry) => isReadable(entry) && !entry.isCancelled && entry.inspectedKey !== this.getKey(entry),
    );
    const unseen = this.stacks.find(
      (entry) => isReadable(entry) && entry.thumbnailKey !== getThumbnailKey(entry, getRequestParameters(this, entry)),
    );
    const entry = uninspected ?? unseen;
    if (entry === undefined) return null;
    entry.isBusy = true;
    const task = uninspected ? () => inspectStack(this, entry) : () => updateThumbnail(this, entry);
    return () =>
      task().finally(() => {
        entry.isBusy = false;
      });
  }

  #findSubmission() {
    const unfinishedCount = this.entries.filter(isPending).length;
    if (unfinishedCount >= MAX_UNFINISHED_JOBS) return null;
    const entry = this.stacks.find(
      (candidate) => getPhase(candidate) === "requested" && candidate.inspectedKey === this.getKey(candidate),
    );
    return entry ? () => submitJob(this, entry) : null;
  }
}

/** Return whether a file has the name and the size of an entry, although it may have been chosen without its folder. @param {Entry} entry @param {string} path @param {number} bytes */
function isSameFile(entry, path, bytes) {
  return getFileName(entry.path) === getFileName(path) && entry.bytes === bytes;
}
