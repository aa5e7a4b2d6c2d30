/** Requests to the service that serves this page. No other host is contacted. */

import { toPageTerms } from "./terminology.js";

const KEY = "stackseg-key";

/** An error response of the service: a problem document (RFC 9457). */
export class Problem extends Error {
  /**
   * @param {string} slug problem type @param {string} detail @param {number} status HTTP status, 0 if the service did not answer
   * @param {Record<string, string>} suggested values to try, by parameter name
   */
  constructor(slug, detail, status, suggested = {}) {
    super(toPageTerms(detail));
    this.slug = slug;
    this.status = status;
    this.suggested = suggested;
  }
}

/** @type {(rejected: boolean) => Promise<string>} */
let promptForKey = async () => "";

/** @param {(rejected: boolean) => Promise<string>} prompt called when the service requires a key or rejects the stored one */
export function setKeyPrompt(prompt) {
  promptForKey = prompt;
}

/** @returns {boolean} whether a key is stored, which every request then sends */
export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

/** @param {string} key */
export function storeKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @returns {Record<string, string>} */
function keyHeaders() {
  const key = sessionStorage.getItem(KEY);
  return key ? { "X-API-Key": key } : {};
}

/**
 * Send a request. If the service requires a key, prompt for it and try again. Throws a Problem for error responses.
 * @param {string} path relative to the page, so that a proxy can serve it below any path
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

/** Send a request without prompting for a key: not every valid key has permission for it. @param {string} path @param {RequestInit} [options] */
export async function requestWithoutPrompt(path, options = {}) {
  const headers = { ...keyHeaders(), .../** @type {Record<string, string>} */ (options.headers) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    if (options.signal?.aborted) throw error;
    throw new Problem("unreachable", "The service did not respond. It may be restarting. Try again in a minute.", 0);
  });
  if (response.ok) return response;
  throw await readProblem(response);
}

/** @param {Response} response */
async function readProblem(response) {
  const fallback = `The service responded with HTTP status ${response.status} ${response.statusText}.`;
  const document = await response.json().catch(() => ({}));
  const slug =
    String(document.type ?? "")
      .split(":")
      .at(-1) ?? "";
  return new Problem(slug, document.detail ?? fallback, response.status, document.suggested);
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

/** Build a query string. @param {Record<string, unknown>} parameters empty values are omitted */
export function buildQuery(parameters) {
  const filled = Object.entries(parameters).filter(
    ([, value]) => value !== undefined && value !== null && value !== "",
  );
  return new URLSearchParams(filled.map(([name, value]) => [name, String(value)])).toString();
}

/**
 * Upload a stack and report the progress, which `fetch` cannot do.
 * @param {Blob} file @param {string} name @param {(fraction: number) => void} onprogress
 * @param {AbortSignal} [signal]
 * @returns {Promise<import("openapi").StackReport>}
 */
export async function upload(file, name, onprogress, signal) {
  /** @type {XMLHttpRequest} */
  const xhr = await new Promise((resolve, reject) => {
    const pending = new XMLHttpRequest();
    pending.open("POST", "stacks");
    pending.setRequestHeader("Content-Type", "image/tiff");
    pending.setRequestHeader("X-Filename", encodeURIComponent(name));
    for (const [header, value] of Object.entries(keyHeaders())) pending.setRequestHeader(header, value);
    pending.upload.onprogress = (event) => onprogress(event.loaded / event.total);
    pending.onload = () => resolve(pending);
    pending.onabort = () => reject(signal?.reason);
    signal?.addEventListener("abort", () => pending.abort());
    pending.onerror = () => reject(new Problem("unreachable", "The upload was interrupted. Try again.", 0));
    pending.send(file);
  });
  const response = new Response(xhr.responseText || "{}", { status: xhr.status || 500 });
  if (response.status === 401) {
    storeKey(await promptForKey(hasKey()));
    return upload(file, name, onprogress, signal);
  }
  if (!response.ok) throw await readProblem(response);
  return response.json();
}
