/** Requests to the service that serves this page. No other host is contacted. */

import { loadValue, saveValue } from "./browser_storage.js";
import { checkConnection, connection, PROGRESS_INTERVAL_MILLISECONDS } from "./connection.js";
import { toPageTerms } from "./terminology.js";

const API_KEY_STORAGE_KEY = "stackseg-key";

/** An error that the service reported in a problem document (RFC 9457), or a failure to reach the service. */
export class Problem extends Error {
  /**
   * @param {string} slug last part of the problem type @param {string} detail @param {number} status HTTP status, 0 if there was no response
   * @param {Record<string, string>} suggestedValues values to try, by parameter name
   */
  constructor(slug, detail, status, suggestedValues = {}) {
    super(toPageTerms(detail));
    /** The message in the terms of the HTTP API. */
    this.detail = detail;
    this.slug = slug;
    this.status = status;
    this.suggestedValues = suggestedValues;
  }
}

/** The API key, null if it was not read from the storage yet. @type {string | null} */
let keyInMemory = null;

/** @type {(isRejected: boolean) => Promise<string>} */
let promptForKey = async () => "";

/** @param {(isRejected: boolean) => Promise<string>} prompt called when the service requires a key or rejects the stored one */
export function setKeyPrompt(prompt) {
  promptForKey = prompt;
}

/** @returns {boolean} whether a key is stored. If so, every request sends it. */
export function hasKey() {
  return loadKey() !== "";
}

/** @param {string} key */
export function storeKey(key) {
  keyInMemory = key;
  saveValue("sessionStorage", API_KEY_STORAGE_KEY, key);
}

/** @returns {string} the API key, "" for none */
function loadKey() {
  keyInMemory ??= loadValue("sessionStorage", API_KEY_STORAGE_KEY);
  return keyInMemory ?? "";
}

/** @returns {Record<string, string>} */
function createKeyHeaders() {
  const key = loadKey();
  return key ? { "X-API-Key": key } : {};
}

/**
 * Send a request. If the service requires a key, prompt for the key and send the request again. Throws a Problem if the
 * service responds with an error.
 * @param {string} path relative to the URL of the page, so that a proxy can serve the page under any path
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
export async function request(path, options = {}) {
  try {
    return await requestWithoutPrompt(path, options);
  } catch (error) {
    if (!(error instanceof Problem) || error.status !== 401) throw error;
  }
  storeKey(await promptForKey(hasKey()));
  return request(path, options);
}

/** Send a request without prompting for a key. Use this for requests that not every key is allowed to make. @param {string} path @param {RequestInit} [options] */
export async function requestWithoutPrompt(path, options = {}) {
  const headers = { ...createKeyHeaders(), .../** @type {Record<string, string>} */ (options.headers) };
  const response = await fetchWhileConnected(path, { ...options, headers }).catch((error) => {
    if (options.signal?.aborted) throw error;
    checkConnection();
    throw new Problem("unreachable", "The service did not respond. It may be restarting. Try again in a minute.", 0);
  });
  if (response.ok) return response;
  throw await readProblem(response);
}

/** Fetch a response. Check the connection if the response takes long. If the connection is lost, cancel requests that only read. @param {string} path @param {RequestInit} options */
async function fetchWhileConnected(path, options) {
  const [lostAbort, settledAbort] = [new AbortController(), new AbortController()];
  const signal = options.signal ? AbortSignal.any([options.signal, lostAbort.signal]) : lostAbort.signal;
  const isReading = (options.method ?? "GET") === "GET";
  connection.subscribe(() => {
    if (isReading && connection.state.lostAt) lostAbort.abort();
  }, settledAbort.signal);
  const timer = setInterval(checkConnection, PROGRESS_INTERVAL_MILLISECONDS);
  try {
    return await fetch(path, { ...options, signal });
  } finally {
    clearInterval(timer);
    settledAbort.abort();
  }
}

/** @param {Response} response */
async function readProblem(response) {
  const defaultDetail = `The service responded with HTTP status ${response.status} ${response.statusText}.`;
  const body = await response.json().catch(() => ({}));
  const slug =
    String(body.type ?? "")
      .split(":")
      .at(-1) ?? "";
  return new Problem(slug, body.detail ?? defaultDetail, response.status, body.suggested);
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

/** Build a query string. @param {Record<string, unknown>} parameters undefined, null and empty values are omitted */
export function buildQuery(parameters) {
  const nonEmptyEntries = Object.entries(parameters).filter(
    ([, value]) => value !== undefined && value !== null && value !== "",
  );
  return new URLSearchParams(nonEmptyEntries.map(([name, value]) => [name, String(value)])).toString();
}

/**
 * Upload a stack and report the progress. This uses XMLHttpRequest, because `fetch` does not report upload progress.
 * @param {Blob} file @param {string} name @param {(fraction: number) => void} onprogress
 * @param {AbortSignal} [signal]
 * @returns {Promise<import("openapi").StackReport>}
 */
export async function uploadStack(file, name, onprogress, signal) {
  /** @type {XMLHttpRequest} */
  const completedXhr = await new Promise((resolve, reject) => {
    const xhr = new XMLHttpRequest();
    xhr.open("POST", "stacks");
    xhr.setRequestHeader("Content-Type", "image/tiff");
    xhr.setRequestHeader("X-Filename", encodeURIComponent(name));
    for (const [header, value] of Object.entries(createKeyHeaders())) xhr.setRequestHeader(header, value);
    let timer = setInterval(checkConnection, PROGRESS_INTERVAL_MILLISECONDS);
    xhr.upload.onprogress = (event) => {
      clearInterval(timer);
      timer = setInterval(checkConnection, PROGRESS_INTERVAL_MILLISECONDS);
      onprogress(event.loaded / event.total);
    };
    xhr.onloadend = () => clearInterval(timer);
    xhr.onload = () => resolve(xhr);
    xhr.onabort = () => reject(signal?.reason);
    signal?.addEventListener("abort", () => xhr.abort());
    xhr.onerror = () => {
      checkConnection();
      reject(new Problem("unreachable", "The upload was interrupted. Try again.", 0));
    };
    xhr.send(file);
  });
  const response = new Response(completedXhr.responseText || "{}", { status: completedXhr.status || 500 });
  if (response.status === 401) {
    storeKey(await promptForKey(hasKey()));
    return uploadStack(file, name, onprogress, signal);
  }
  if (!response.ok) throw await readProblem(response);
  return response.json();
}

/** Show a picture in an image element. It is fetched by script, because an image element cannot send the API key. @param {string} path @param {HTMLImageElement} image @param {AbortSignal} [signal] */
export async function showPicture(path, image, signal) {
  const picture = await (await request(path.replace(/^\//, ""), { signal })).blob();
  const url = URL.createObjectURL(picture);
  image.onload = image.onerror = () => URL.revokeObjectURL(url);
  image.src = url;
  image.hidden = false;
}
