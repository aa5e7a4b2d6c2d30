/** Storage of corrections in this browser (IndexedDB), so that they survive a reload of the page. */

/** @typedef {import("./label_edit.js").Edit} Edit */
/**
 * Labels before any correction. They remain available after the service has deleted the result.
 * @typedef {object} OriginalLabels
 * @property {Blob} zipped label values in C order, gzip-compressed
 * @property {number} bytes per label value @property {import("./planes.js").Triple} shape
 * @property {import("openapi").VoxelSize | null} voxelSize
 */

const DATABASE = "stackseg-corrections";
const EDITS = "edits";
// Record keys are [result, number]. Numbers from 0 are corrections. The negative numbers below are other data of the result.
/** The tab that corrects the result. */
const OWNER = -1;
/** Ids of the annotated stacks created from the result in this browser. */
const ANNOTATIONS = -2;
/** The labels before any correction. */
const ORIGINAL_LABELS = -3;
const TAB_ID = `${Date.now()}-${Math.random()}`;
/** Time that other tabs have to reply. */
const REPLY_TIMEOUT_MILLISECONDS = 1000;
/** The results that this tab corrects. @type {Set<string>} */
const owned = new Set();

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @type {Promise<IDBDatabase> | null} */
let database = null;

/** @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
async function openStore(mode) {
  if (database === null) {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(EDITS);
    database = resultOf(request);
  }
  return (await database).transaction(EDITS, mode).objectStore(EDITS);
}

/** Return the key of a result's corrections. @param {import("openapi").JobReport} job @param {number} time time point, used if the job is a series */
export function keyOf(job, time) {
  return job.time_points ? `${job.id}@${time}` : job.id;
}

/** @param {string} key of a result, or of one time point of a series @returns {IDBKeyRange} the keys of its corrections */
function correctionRange(key) {
  return IDBKeyRange.bound([key, 0], [key, Number.MAX_SAFE_INTEGER]);
}

/** Run database work, and return a fallback if the browser stores nothing, as in private windows. @template T @param {() => Promise<T>} work @param {T} fallback @returns {Promise<T>} */
async function withFallback(work, fallback) {
  try {
    return await work();
  } catch {
    return fallback;
  }
}

/** @param {string} key @returns {Promise<Edit[]>} the corrections of a result, without undone ones */
export function load(key) {
  return withFallback(
    async () => resultOf((await openStore("readonly")).getAll(correctionRange(key))),
    /** @type {Edit[]} */ ([]),
  );
}

/** @param {string} key @returns {Promise<number>} the number of stored corrections of a result */
export function count(key) {
  return withFallback(async () => resultOf((await openStore("readonly")).count(correctionRange(key))), 0);
}

/**
 * Store a correction under its number and delete all later ones. Without a correction, only delete.
 * @param {string} key @param {number} number @param {Edit | null} edit
 * @returns {Promise<"saved" | "owned-by-other-tab" | "unavailable">} owned-by-other-tab: nothing was written
 */
export function save(key, number, edit) {
  return withFallback(async () => {
    const edits = await openStore("readwrite");
    const owner = await resultOf(edits.get([key, OWNER]));
    if (owner !== undefined && owner !== TAB_ID) return "owned-by-other-tab";
    edits.delete(IDBKeyRange.bound([key, number], [key, Number.MAX_SAFE_INTEGER]));
    if (edit !== null) await resultOf(edits.put(edit, [key, number]));
    return "saved";
  }, "unavailable");
}

/** @param {string} job @returns {Promise<string[]>} ids of the annotated stacks created from a result in this browser */
export function annotationsOf(job) {
  return withFallback(async () => (await resultOf((await openStore("readonly")).get([job, ANNOTATIONS]))) ?? [], []);
}

/** Record that an annotated stack was created from a result. @param {string} job @param {string} annotation id */
export async function addAnnotation(job, annotation) {
  const existing = await annotationsOf(job);
  await withFallback(
    async () => resultOf((await openStore("readwrite")).put([...existing, annotation], [job, ANNOTATIONS])),
    undefined,
  );
}

/** @returns {Promise<Map<string, number>>} the number of stored corrections by key */
export function counts() {
  return withFallback(async () => {
    const keys = /** @type {[string, number][]} */ (await resultOf((await openStore("readonly")).getAllKeys()));
    const totals = new Map();
    for (const [key, number] of keys) if (number >= 0) totals.set(key, (totals.get(key) ?? 0) + 1);
    return totals;
  }, new Map());
}

/** @param {string} key @returns {Promise<OriginalLabels | undefined>} the labels before any correction */
export function loadOriginalLabels(key) {
  return withFallback(async () => resultOf((await openStore("readonly")).get([key, ORIGINAL_LABELS])), undefined);
}

/** @param {string} key @param {OriginalLabels} labels */
export function saveOriginalLabels(key, labels) {
  return withFallback(
    async () => resultOf((await openStore("readwrite")).put(labels, [key, ORIGINAL_LABELS])),
    undefined,
  );
}

/** Delete everything stored for a job and all of its time points. @param {string} job */
export function forget(job) {
  return withFallback(async () => {
    const edits = await openStore("readwrite");
    for (const [from, to] of [
      [job, job],
      [`${job}@`, `${job}@\uffff`],
    ])
      edits.delete(IDBKeyRange.bound([from, ORIGINAL_LABELS], [to, Number.MAX_SAFE_INTEGER]));
  }, undefined);
}

/**
 * Claim a result for this tab, so that only one tab corrects it at a time. The claim is stored with the corrections and
 * checked by every write, because Web Locks are only available over HTTPS. A claim of a closed tab is ignored.
 * @param {string} key @param {boolean} force whether to take the result from another open tab
 * @returns {Promise<boolean>} false if another open tab corrects the result
 */
export async function claim(key, force) {
  const owner = await withFallback(async () => resultOf((await openStore("readonly")).get([key, OWNER])), undefined);
  if (owner !== undefined && owner !== TAB_ID && !force && (await isOwnedByOpenTab(key))) return false;
  await withFallback(async () => resultOf((await openStore("readwrite")).put(TAB_ID, [key, OWNER])), undefined);
  tabs.postMessage({ key, type: "claim" });
  owned.add(key);
  return true;
}

/** Release a result that this tab claimed. @param {string} key */
export function release(key) {
  if (!owned.delete(key)) return;
  withFallback(async () => {
    const edits = await openStore("readwrite");
    if ((await resultOf(edits.get([key, OWNER]))) === TAB_ID) await resultOf(edits.delete([key, OWNER]));
  }, undefined);
}

/** Call `onclaim` when another tab claims a result. @param {string} key @param {() => void} onclaim @param {AbortSignal} signal */
export function listenForClaims(key, onclaim, signal) {
  const listen = (/** @type {MessageEvent} */ { data }) => {
    if (data.key === key && data.type === "claim") onclaim();
  };
  tabs.addEventListener("message", listen, { signal });
}

/** Ask the other open tabs whether one of them corrects a result. @param {string} key @returns {Promise<boolean>} */
function isOwnedByOpenTab(key) {
  return new Promise((resolve) => {
    const listening = new AbortController();
    const end = (/** @type {boolean} */ isOwned) => {
      listening.abort();
      resolve(isOwned);
    };
    const listen = (/** @type {MessageEvent} */ { data }) => data.key === key && data.type === "owned" && end(true);
    tabs.addEventListener("message", listen, { signal: listening.signal });
    tabs.postMessage({ key, type: "query" });
    setTimeout(() => end(false), REPLY_TIMEOUT_MILLISECONDS);
  });
}

const tabs = new BroadcastChannel(DATABASE);
tabs.addEventListener("message", ({ data }) => {
  if (data.type === "query" && owned.has(data.key)) tabs.postMessage({ key: data.key, type: "owned" });
  if (data.type === "claim") owned.delete(data.key);
});
