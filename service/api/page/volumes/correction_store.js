/** Corrections of results in this browser (IndexedDB), so that nothing is lost when the page is loaded again. */

/** @typedef {import("./label_edit.js").Edit} Edit */
/**
 * Labels as they were segmented, which outlive the service's result.
 * @typedef {object} Segmented
 * @property {Blob} zipped their numbers, in C order
 * @property {number} bytes of a number @property {import("./planes.js").Triple} shape
 * @property {import("openapi").VoxelSize | null} voxelSize
 */

const NAME = "stackseg-corrections";
const EDITS = "edits";
// The numbers beside a result under which stand which tab corrects it, which annotated stacks were made of it here, and its
// labels as segmented.
const OWNER = -1;
const ANNOTATIONS = -2;
const SEGMENTED = -3;
const ME = `${Date.now()}-${Math.random()}`;
const ANSWER_MILLISECONDS = 1000;
/** The results that this tab corrects. @type {Set<string>} */
const owned = new Set();

/** @template T @param {IDBRequest<T>} asked @returns {Promise<T>} */
function answer(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** @type {Promise<IDBDatabase> | null} */
let opening = null;

/** @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
async function store(mode) {
  if (opening === null) {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(EDITS);
    opening = answer(asked);
  }
  return (await opening).transaction(EDITS, mode).objectStore(EDITS);
}

/** Under what the corrections of a result are kept. @param {import("openapi").JobReport} job @param {number} time point that is corrected, of a series */
export function keyOf(job, time) {
  return job.time_points ? `${job.id}@${time}` : job.id;
}

/** @param {string} job id, with @ and the time point of a series @returns {IDBKeyRange} its corrections, whose keys are [job, number] */
function all(job) {
  return IDBKeyRange.bound([job, 0], [job, Number.MAX_SAFE_INTEGER]);
}

/** A browser that keeps nothing, as in private windows, is not an error. @template T @param {() => Promise<T>} work @param {T} otherwise @returns {Promise<T>} */
async function tolerant(work, otherwise) {
  try {
    return await work();
  } catch {
    return otherwise;
  }
}

/** @param {string} job @returns {Promise<Edit[]>} the corrections of a result that were not taken back */
export function load(job) {
  return tolerant(async () => answer((await store("readonly")).getAll(all(job))), /** @type {Edit[]} */ ([]));
}

/** @param {string} job @returns {Promise<number>} how many corrections of a result are kept */
export function count(job) {
  return tolerant(async () => answer((await store("readonly")).count(all(job))), 0);
}

/**
 * Keep the newest correction as the one with this number, or forget what comes from there on.
 * @param {string} job @param {number} number @param {Edit | null} edit
 * @returns {Promise<"kept" | "elsewhere" | "nowhere">} elsewhere: another tab corrects this result, and nothing was written
 */
export function keep(job, number, edit) {
  return tolerant(async () => {
    const edits = await store("readwrite");
    const owner = await answer(edits.get([job, OWNER]));
    if (owner !== undefined && owner !== ME) return "elsewhere";
    edits.delete(IDBKeyRange.bound([job, number], [job, Number.MAX_SAFE_INTEGER]));
    if (edit !== null) await answer(edits.put(edit, [job, number]));
    return "kept";
  }, "nowhere");
}

/** @param {string} job @returns {Promise<string[]>} ids of the annotated stacks that were made of a result in this browser */
export function annotationsOf(job) {
  return tolerant(async () => (await answer((await store("readonly")).get([job, ANNOTATIONS]))) ?? [], []);
}

/** @param {string} job @param {string} annotation id of an annotated stack that was made of this result here */
export async function addAnnotation(job, annotation) {
  const known = await annotationsOf(job);
  await tolerant(
    async () => answer((await store("readwrite")).put([...known, annotation], [job, ANNOTATIONS])),
    undefined,
  );
}

/** @returns {Promise<Map<string, number>>} how many corrections are kept of each result, and of each time point of a series */
export function counts() {
  return tolerant(async () => {
    const keys = /** @type {[string, number][]} */ (await answer((await store("readonly")).getAllKeys()));
    const found = new Map();
    for (const [job, number] of keys) if (number >= 0) found.set(job, (found.get(job) ?? 0) + 1);
    return found;
  }, new Map());
}

/** @param {string} job @returns {Promise<Segmented | undefined>} the labels that its corrections are of */
export function loadSegmented(job) {
  return tolerant(async () => answer((await store("readonly")).get([job, SEGMENTED])), undefined);
}

/** @param {string} job @param {Segmented} labels that its corrections are of */
export function keepSegmented(job, labels) {
  return tolerant(async () => answer((await store("readwrite")).put(labels, [job, SEGMENTED])), undefined);
}

/** @param {string} job that is corrected no more, with all of its time points */
export function forget(job) {
  return tolerant(async () => {
    const edits = await store("readwrite");
    for (const [from, to] of [
      [job, job],
      [`${job}@`, `${job}@\uffff`],
    ])
      edits.delete(IDBKeyRange.bound([from, SEGMENTED], [to, Number.MAX_SAFE_INTEGER]));
  }, undefined);
}

/**
 * Say that this tab corrects a result, so that no other one does at the same time. That is kept with the corrections,
 * where writing checks it: Web Locks are missing where a page does not come by HTTPS. A tab that was closed does not answer.
 * @param {string} job @param {boolean} force also where another tab does
 * @returns {Promise<boolean>} whether this tab may; false: another one does, and lives
 */
export async function own(job, force) {
  const owner = await tolerant(async () => answer((await store("readonly")).get([job, OWNER])), undefined);
  if (owner !== undefined && owner !== ME && !force && (await lives(job))) return false;
  await tolerant(async () => answer((await store("readwrite")).put(ME, [job, OWNER])), undefined);
  tabs.postMessage({ job, said: "mine" });
  owned.add(job);
  return true;
}

/** @param {string} job that this tab corrects no more */
export function disown(job) {
  if (!owned.delete(job)) return;
  tolerant(async () => {
    const edits = await store("readwrite");
    if ((await answer(edits.get([job, OWNER]))) === ME) await answer(edits.delete([job, OWNER]));
  }, undefined);
}

/** @param {string} job @param {() => void} ontaken another tab has taken it @param {AbortSignal} signal */
export function whenTaken(job, ontaken, signal) {
  const listen = (/** @type {MessageEvent} */ { data }) => {
    if (data.job === job && data.said === "mine") ontaken();
  };
  tabs.addEventListener("message", listen, { signal });
}

/** Ask the other tabs which of them corrects a result. @param {string} job @returns {Promise<boolean>} */
function lives(job) {
  return new Promise((resolve) => {
    const asked = new AbortController();
    const end = (/** @type {boolean} */ alive) => {
      asked.abort();
      resolve(alive);
    };
    const listen = (/** @type {MessageEvent} */ { data }) => data.job === job && data.said === "I do" && end(true);
    tabs.addEventListener("message", listen, { signal: asked.signal });
    tabs.postMessage({ job, said: "who?" });
    setTimeout(() => end(false), ANSWER_MILLISECONDS);
  });
}

const tabs = new BroadcastChannel(NAME);
tabs.addEventListener("message", ({ data }) => {
  if (data.said === "who?" && owned.has(data.job)) tabs.postMessage({ job: data.job, said: "I do" });
  if (data.said === "mine") owned.delete(data.job);
});
