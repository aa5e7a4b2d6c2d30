/** Requests to the service that has served this page; no other host is ever asked. */

import { pageWords } from "./words.js";

const KEY = "stackseg-key";

/** What the service has said against a request: the problem document of RFC 9457. */
export class Problem extends Error {
  /**
   * @param {string} slug @param {string} detail @param {number} status 0: the service did not answer
   * @param {Record<string, string>} suggested values to try, by parameter
   */
  constructor(slug, detail, status, suggested = {}) {
    super(pageWords(detail));
    this.slug = slug;
    this.status = status;
    this.suggested = suggested;
  }
}

/** @type {(refused: boolean) => Promise<string>} */
let askForKey = async () => "";

/** @param {(refused: boolean) => Promise<string>} ask is called when the service wants a key, or refuses one */
export function whenKeyIsWanted(ask) {
  askForKey = ask;
}

/** @returns {boolean} whether a key is sent */
export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

/** @param {string} key */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @returns {Record<string, string>} */
function keyHeaders() {
  const key = sessionStorage.getItem(KEY);
  return key ? { "X-API-Key": key } : {};
}

/**
 * @param {string} path relative to the page, so that a proxy may put the service below a path of its own
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
export async function request(path, options = {}) {
  try {
    return await requestOnce(path, options);
  } catch (error) {
    if (!(error instanceof Problem) || error.status !== 401) throw error;
  }
  useKey(await askForKey(hasKey()));
  return request(path, options);
}

/** As `request`, for what not every known key may do: another key is not asked for. @param {string} path @param {RequestInit} [options] */
export async function requestOnce(path, options = {}) {
  const headers = { ...keyHeaders(), .../** @type {Record<string, string>} */ (options.headers) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    if (options.signal?.aborted) throw error;
    throw new Problem("unreachable", "The service does not answer. It may be stopped or restarting; try again.", 0);
  });
  if (response.ok) return response;
  throw await readProblem(response);
}

/** @param {Response} response */
async function readProblem(response) {
  const fallback = `The service answers ${response.status} ${response.statusText}.`;
  const document = await response.json().catch(() => ({}));
  const slug =
    String(document.type ?? "")
      .split(":")
      .at(-1) ?? "";
  return new Problem(slug, document.detail ?? fallback, response.status, document.suggested);
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/** @param {Record<string, unknown>} parameters those that are empty are left out */
export function queryOf(parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
}

/**
 * Upload a stack, telling how far that has come: only XMLHttpRequest can.
 * @param {Blob} file @param {string} name @param {(share: number) => void} onprogress
 * @param {AbortSignal} [signal]
 * @returns {Promise<import("openapi").StackReport>}
 */
export async function upload(file, name, onprogress, signal) {
  /** @type {XMLHttpRequest} */
  const sent = await new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    sending.open("POST", "stacks");
    sending.setRequestHeader("Content-Type", "image/tiff");
    sending.setRequestHeader("X-Filename", encodeURIComponent(name));
    for (const [header, value] of Object.entries(keyHeaders())) sending.setRequestHeader(header, value);
    sending.upload.onprogress = (event) => onprogress(event.loaded / event.total);
    sending.onload = () => resolve(sending);
    sending.onabort = () => reject(signal?.reason);
    signal?.addEventListener("abort", () => sending.abort());
    sending.onerror = () => reject(new Problem("unreachable", "The upload broke off; try again.", 0));
    sending.send(file);
  });
  const answer = new Response(sent.responseText || "{}", { status: sent.status || 500 });
  if (answer.status === 401) {
    useKey(await askForKey(hasKey()));
    return upload(file, name, onprogress, signal);
  }
  if (!answer.ok) throw await readProblem(answer);
  return answer.json();
}
